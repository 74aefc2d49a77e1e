"""LogTrace: its value and gradient, the bound, scale, loops of every kind, and what is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

import fsmap
from fsmap.errors import CollapseWarning, InputError, MissingEveryWarning, NonFiniteWarning
from fsmap.lmap.module import MEMORY, NATS, SHARE

PX = fsmap.px.Normal(shape=(3,))
CLOSE = {"rtol": 1e-6, "atol": 0.0}  # buffers are float32


def call(penalty: fsmap.LogTrace, R: float, **options: int) -> tuple[float, float]:
    """Value, and derivative by R."""
    given = torch.tensor(R, requires_grad=True)
    value = penalty(given, **options)
    value.backward()
    return value.item(), given.grad.item()


def draws(number: int) -> list[float]:
    return (50 + 40 * torch.rand(number, generator=torch.Generator().manual_seed(0))).tolist()


def test_value_and_gradient_of_many_steps():
    penalty, seen, mean = fsmap.LogTrace(nats=0.3), [], 0.0
    for R in draws(2 * MEMORY + 5):
        seen.append(R)
        mean += (R - mean) / min(len(seen), MEMORY)
        small = SHARE * sum(seen[:MEMORY]) / min(len(seen), MEMORY)
        wanted = 0.3 * math.log(1 + R / small), 0.3 / (mean + small)
        assert call(penalty, R) == pytest.approx(wanted, rel=1e-6)
    assert penalty.reg_strength == pytest.approx(wanted[1], rel=1e-6)
    assert int(penalty.steps) == len(seen)


class Scaled(nn.Module):
    """A network whose output is multiplied by a constant."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)
        self.layers, self.scale = nn.Sequential(*layers), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layers(x)


def trained(scale: float = 1.0, metric: Tensor | None = None, steps: int = 60) -> Tensor:
    """Parameters after training with LogTrace; the loss divides by the constant again."""
    module = Scaled(scale)
    lm = fsmap.LMAP(module, PX, num_points=8, metric=metric)
    penalty = fsmap.LogTrace(0.1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(16, 3, generator=generator)
        out, R = lm(x)
        loss = F.cross_entropy(out / scale, (x[:, 0] > 0).long()) + penalty(R)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert penalty.skipped == 0
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def test_a_factor_of_r_changes_no_training(seeded):
    plain = trained()
    assert torch.equal(trained(scale=32.0), plain)  # R times 1024, without rounding
    assert_close(trained(scale=math.sqrt(1000.0)), plain, rtol=1e-5, atol=1e-7)
    assert_close(trained(metric=1000.0 * torch.eye(2)), plain, rtol=1e-5, atol=1e-7)
    assert (plain - trained(steps=0)).norm() > 1  # something was learned


def test_none_is_zero_where_nothing_is_trained():
    penalty = fsmap.LogTrace()
    with torch.no_grad():
        assert penalty(None) == 0
    assert penalty.eval()(None) == 0


def test_looking_moves_nothing():
    penalty = fsmap.LogTrace(0.2)
    with torch.no_grad():  # before the first step R stands for its own mean
        assert penalty(torch.tensor(7.0)).item() == pytest.approx(0.2 * math.log(101), rel=1e-6)
    for R in draws(3):
        call(penalty, R)
    before = copy.deepcopy(penalty.state_dict())
    with torch.no_grad():
        penalty(torch.tensor(1e9))
    call(penalty.eval(), 1e9)
    assert all(torch.equal(before[name], t) for name, t in penalty.state_dict().items())


def test_steps_without_r_are_left_out():
    plain, sparse = fsmap.LogTrace(0.1), fsmap.LogTrace(0.1)
    for R in draws(MEMORY + 3):
        value, slope = call(plain, R)
        assert call(sparse, 3 * R, every=3) == pytest.approx((value, slope), rel=1e-6)
        for _ in range(2):  # by R itself the gradient is three times as strong
            zero = sparse(torch.zeros(()), every=3)
            assert zero == 0
            assert not zero.requires_grad
    assert_close(dict(sparse.state_dict()), dict(plain.state_dict()), **CLOSE)


def test_the_mean_moves_once_per_optimizer_step():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=0.0)
    whole, parts = fsmap.LogTrace(0.1), fsmap.LogTrace(0.1).attach(optimizer)
    for R in draws(4):
        expected = call(whole, R)
        call(parts, 0.5 * R)
        mine = call(parts, 1.5 * R)  # the mean of both is R
        assert mine[1] == pytest.approx(expected[1], rel=1e-6)
        assert int(parts.sums[1]) == 2
        optimizer.step()
    assert_close(dict(parts.state_dict()), dict(whole.state_dict()), **CLOSE)
    optimizer.step()  # without an R: nothing moves
    assert int(parts.steps) == 4
    with pytest.raises(InputError, match="already"):
        parts.attach(optimizer)
    parts.detach()
    call(parts, 3.0)
    assert int(parts.steps) == 5
    call(parts.attach(optimizer), 3.0)
    assert int(parts.steps) == 5


def test_what_float32_cannot_hold_does_not_enter_the_mean():
    penalty = fsmap.LogTrace()
    call(penalty, 1e39)  # the default dtype of the tests is float64
    call(penalty, 5.0)
    assert (penalty.mean, penalty.first, penalty.skipped) == (5, 5, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e9])
def test_what_is_not_finite_does_not_enter_the_mean(bad: float):
    penalty, clean = fsmap.LogTrace(), fsmap.LogTrace()
    for R in draws(4):
        assert call(penalty, R) == pytest.approx(call(clean, R))
        assert not math.isfinite(call(penalty, bad)[0])  # the loss shows it
    assert penalty.skipped == 4
    assert_close(penalty.mean, clean.mean)
    assert_close(penalty.first, clean.first)


SAID = {  # what R is in turn, on how many steps before the warning
    NonFiniteWarning: ([math.nan], []),
    MissingEveryWarning: ([0.0, 2.0], []),
    CollapseWarning: ([1.0], [1e3, 50.0]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", SAID)
def test_warnings_are_given_once(kind: type[Warning]):
    penalty = fsmap.LogTrace()

    def five_memories(values: list[float]) -> None:
        for n in range(5 * MEMORY):
            R = values[n % len(values)]
            penalty(torch.tensor(R, requires_grad=R != 0))

    values, before = SAID[kind]
    for R in before:
        five_memories([R])
    with pytest.warns(kind):
        five_memories(values)
    five_memories(values)


def test_a_forgotten_every_is_said_at_once():
    penalty = fsmap.LogTrace()
    call(penalty, 2.0)
    penalty(torch.tensor(0.0))
    with pytest.warns(MissingEveryWarning, match="detached"):
        penalty(torch.tensor(0.0))


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(("own", "given"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_another_every_than_that_of_lmap_is_said_at_once(own: int, given: int):
    lm = fsmap.LMAP(nn.Linear(3, 2), PX, num_points=2, every=own)
    penalty = fsmap.LogTrace()
    with pytest.warns(MissingEveryWarning, match=f"every={own}, and"):
        penalty(lm(torch.ones(2, 3))[1], every=given)


def test_a_resumed_run_has_the_same_bits():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=0.0)
    penalty = fsmap.LogTrace().attach(optimizer)
    for number, R in enumerate(draws(10)):
        call(penalty, R)
        if number % 2:
            optimizer.step()
    call(penalty, 3.0)  # in the middle of a step
    again = fsmap.LogTrace()
    again.load_state_dict(copy.deepcopy(penalty.state_dict()))
    again.attach(optimizer)
    for R in draws(5):
        assert call(penalty, R) == call(again, R)
        optimizer.step()
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in penalty.state_dict().items())


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_compiled_once_with_the_same_numbers(every: int, attached: bool, fresh_compiler: None):
    counter = CompileCounter()
    plain, penalty = fsmap.LogTrace(), fsmap.LogTrace()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=0.0)
    if attached:
        penalty.attach(optimizer)

    @torch.compile(backend=counter, fullgraph=True)
    def step(R: Tensor) -> Tensor:
        return penalty(R, every=every)

    for number in draws(MEMORY + 3):
        given = torch.tensor(number, requires_grad=True)
        value = step(given)
        value.backward()
        optimizer.step()
        assert (value.item(), given.grad.item()) == pytest.approx(call(plain, number, every=every))
    assert counter.frame_count == 1
    assert_close(dict(penalty.state_dict()), dict(plain.state_dict()))


def test_half_precision_is_widened():
    penalty = fsmap.LogTrace().to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        value = penalty(torch.tensor(300.0, dtype=torch.bfloat16, requires_grad=True))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(NATS * math.log(101), rel=1e-6)
    penalty.half()
    assert (penalty.mean.dtype, penalty.mean) == (torch.float32, 300)
    assert penalty(torch.ones(1)).shape == ()


def worker(rank: int, folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    penalty = fsmap.LogTrace(0.1)
    found = [call(penalty, R * (1.5 if rank else 0.5)) for R in draws(3)]
    call(penalty, math.nan if rank else 70.0)
    with torch.no_grad():
        if rank:  # a look on one rank waits for nobody
            penalty(torch.tensor(5.0))
    torch.save((found, penalty.state_dict()), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_all_ranks_have_the_same_mean(tmp_path: Path):
    mp.start_processes(worker, (str(tmp_path),), nprocs=2, start_method="fork")
    (first, state), (_, other) = (torch.load(tmp_path / f"rank{r}.pt") for r in range(2))
    assert all(torch.equal(t, other[name]) for name, t in state.items())
    alone = fsmap.LogTrace(0.1)
    slopes = [call(alone, R)[1] for R in draws(3)]  # ranks have half and three halves of R
    assert [slope for _, slope in first] == pytest.approx(slopes, rel=1e-6)
    call(alone, 70.0)
    assert_close(state["mean"], alone.mean, **CLOSE)
    assert int(state["sums"][2]) == 1


@pytest.mark.gpu
def test_a_cuda_graph_moves_the_mean():
    plain, penalty = fsmap.LogTrace(), fsmap.LogTrace()
    given = torch.full((), 3.0, device="cuda", dtype=torch.float32, requires_grad=True)
    call(plain, 3.0)
    penalty(given)  # the buffers move to the GPU
    assert penalty.mean.is_cuda
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        value = penalty(given)
    for R in draws(4):
        with torch.no_grad():
            given.fill_(R)
        graph.replay()
        assert value.item() == pytest.approx(call(plain, R)[0], rel=1e-5)
    assert int(penalty.steps) == 5
