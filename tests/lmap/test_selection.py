"""R over sampled outputs and weighted positions: the slow definition, and no bias."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.oracles import jacobian_slow, mean_and_sem
from torch import Tensor, nn

import fsmap
from fsmap.lmap.options import Outputs
from fsmap.px import Stream

S, K = 4, 6
PX = fsmap.px.Normal(shape=(2,))


class Tokens(nn.Module):
    """Outputs [S, T, K] from an embedding that is tied to the head."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(K, 3)
        self.mix = nn.Linear(3, 3)
        self.head = nn.Linear(3, K, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens)).tanh())


def tokens(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, K, (n, 3), generator=generator)


def drawn() -> Tensor:
    """The points of step 0."""
    return PX.sample(S, Stream(0, 0).points()).double()


def mlp() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, K))


def slow(module: nn.Module, x: Tensor, rows: Tensor) -> float:
    """(V/k)·Σ over sampled outputs of (Jψ)², meaned over points."""
    f, params = fsmap.functional(module)
    vector = torch.cat([p[0].reshape(-1) for p in Stream(0, 0).psi(params).values()])
    tangent = jacobian_slow(f, params, x) @ vector  # [S, T·K]
    picked = tangent.reshape(len(x), -1, K)[..., rows]
    return float(picked.square().sum() / len(x) * K / len(rows))


@pytest.mark.parametrize("estimator", ["jvp", "fd", "fd_central"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.usefixtures("seeded")
def test_sampled_outputs_are_the_definition(tied: bool, estimator: str) -> None:
    module = Tokens(tied)
    penalty = fsmap.LaplacianPenalty(
        module, tokens, num_points=S, outputs=2, estimator=estimator, beta=1e-6
    )
    if tied:
        module.head.forward = partial(nn.Linear.forward, module.head)  # as hooks of accelerate do
    own = vars(module.head).get("forward")
    sizes: list[int] = []
    module.head.register_forward_hook(lambda _, __, out: sizes.append(out.shape[-1]))
    value = penalty()
    assert set(sizes[1:]) == {2}  # after one pass that finds the head
    rows = Outputs(K, None).draw(2, Stream(0, 0))
    x = tokens(S, Stream(0, 0).points())
    assert value.item() == pytest.approx(
        slow(module, x, rows), rel=1e-4 if "fd" in estimator else 1e-10
    )
    value.backward()
    assert module.head.weight.grad.abs().sum() > 0
    assert vars(module.head).get("forward") is own  # the layer is whole again


def test_a_default_device_is_not_that_of_draws() -> None:
    source, px = torch.Generator("cpu"), fsmap.px.Empirical(torch.zeros(9, 2))
    with torch.device("meta"):
        assert px.sample(2, source).device.type == "cpu"
        assert Outputs(K, None).draw(2, Stream(0, 0)).device.type == "cpu"


@pytest.mark.parametrize("mode", ["joint", "frozen", "batch"])
def test_modes_agree_with_the_definition(mode: str) -> None:
    module = mlp()
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(2))
    out, value = fsmap.LMAP(module, PX, num_points=S, outputs=2, batchnorm=mode)(x)
    points = drawn()
    points = torch.cat([x, points]) if mode == "joint" else points
    rows = Outputs(K, None).draw(2, Stream(0, 0))
    assert out.shape == (3, K)  # the loss has all outputs
    assert value.item() == pytest.approx(slow(module, points, rows), rel=1e-10)


@pytest.mark.parametrize("options", [{}, {"estimator": "exact"}], ids=str)
@pytest.mark.parametrize("mode", ["joint", "frozen"])
def test_sampling_is_unbiased_and_exact_with_all_outputs(mode: str, options: dict) -> None:
    module, x = mlp(), torch.ones(3, 2)
    points = torch.randn(S, 2, generator=torch.Generator().manual_seed(0))
    common = {"num_points": S, "batchnorm": mode, **options}

    def value(seed: int, outputs: int | None, **more: object) -> float:
        chosen = {**common, **more}
        lm = fsmap.LMAP(module, lambda n, g: points, seed=seed, outputs=outputs, **chosen)
        return lm(x)[1].item()

    assert value(0, K) == value(0, None) == value(0, 10 * K)
    exact = fsmap.LMAP(module, lambda n, g: points, num_points=S, batchnorm=mode, estimator="exact")
    mean, sem = mean_and_sem([value(seed, 2) for seed in range(200)])
    assert abs(mean - exact(x)[1].item()) < 5 * sem


@pytest.mark.usefixtures("seeded")
def test_a_head_is_found_only_where_its_output_is_returned() -> None:
    x = torch.zeros(2, 2)
    for module, head in (
        (mlp(), "2"),
        (nn.Sequential(nn.Linear(2, K), nn.Tanh()), None),
        (nn.Sequential(nn.Linear(2, K), nn.Dropout(0.5)), None),
    ):
        before = torch.get_rng_state()
        assert Outputs.of(*fsmap.functional(module), x) == Outputs(K, head)
        assert torch.equal(before, torch.get_rng_state())
    module = nn.Sequential(nn.Linear(2, K), nn.Tanh())  # then the output is indexed
    value = fsmap.LaplacianPenalty(module, PX, num_points=S, outputs=3)()
    rows = Outputs(K, None).draw(3, Stream(0, 0))
    assert value.item() == pytest.approx(slow(module, drawn(), rows), rel=1e-10)


def test_masked_positions_weigh_nothing() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Tokens(tied=False)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    x = tokens(4, torch.Generator().manual_seed(0))
    px = lambda n, g: {"tokens": x, "mask": mask}  # noqa: E731
    forward = lambda m, batch: m(batch["tokens"])  # noqa: E731
    weights = fsmap.metric.Weights(lambda b: b["mask"])
    common = {"num_points": 4, "forward": forward, "metric": weights}
    f, params = fsmap.functional(module)
    psi = torch.cat([p[0].reshape(-1) for p in Stream(0, 0).psi(params).values()])
    tangent = (jacobian_slow(f, params, x) @ psi).reshape(4, 3, K)
    wanted = (tangent.square().sum(-1) * mask).sum() / 4
    assert fsmap.LaplacianPenalty(module, px, **common)().item() == pytest.approx(wanted.item())
    rows = Outputs(K, None).draw(2, Stream(0, 0))
    wanted = (tangent[..., rows].square().sum(-1) * mask).sum() / 4 * K / 2
    for term in (
        fsmap.LaplacianPenalty(module, px, outputs=2, **common),
        lambda: fsmap.LMAP(module, px, outputs=2, batchnorm="frozen", **common)(px(0, None))[1],
        lambda: fsmap.LMAP(module, px, outputs=2, **common)(px(0, None))[1],  # joint: x twice
    ):
        assert term().item() == pytest.approx(wanted.item())
