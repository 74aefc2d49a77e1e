import pytest
import torch

from fsmap import functional, trace
from fsmap.data.synthetic import moons
from fsmap.objective.geometry import Laplacian, LogDet, NoGeometry
from fsmap.paper.networks import moons_solutions
from fsmap.paper.networks.moons_fits import METHODS, Fitted, MoonsConfig, builder, network, train
from fsmap.paper.networks.moons_solutions import PAPER_JITTERS, SolutionsConfig, chain

TINY = MoonsConfig(steps=4, lr=1e-2, grid=6, lap_points=9, det_points=5)


def nothing(share):
    assert 0 <= share <= 1


def test_objectives_are_those_of_their_names():
    jitter = torch.tensor(0.5)
    kinds = {"ps-map": NoGeometry, "fs-map": LogDet, "l-map": Laplacian}
    for method in METHODS:
        objective = builder(TINY, method, 200)(*([] if method == "ps-map" else [jitter]))
        assert isinstance(objective.geometry, kinds[method])
        assert objective.num_data == 200
    assert builder(TINY, "l-map", 200)(jitter).geometry.probes == 1


def test_full_size_is_the_papers():
    config = MoonsConfig()
    assert (config.steps, config.lr, len(config.px())) == (10_000, 1e-3, 1600)
    assert sum(p.numel() for p in network(0).parameters()) == 354
    assert config.deviations("ps-map") == ()
    assert len(config.deviations("l-map")) == 1
    assert len(TINY.deviations("ps-map")) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_member_does_not_depend_on_its_neighbors(method):
    both = list(train(TINY, method, [0.1, 10.0], 0, nothing))
    alone = list(train(TINY, method, [10.0], 0, nothing))
    assert len(both) == (1 if method == "ps-map" else 2)
    for name, p in alone[0].params.items():
        torch.testing.assert_close(both[-1].params[name], p)
    moved = [not torch.equal(p, network(0).get_parameter(n)) for n, p in alone[0].params.items()]
    assert all(moved)


def test_training_can_start_elsewhere():
    start = {n: torch.zeros_like(p) for n, p in network(0).named_parameters()}
    (zero,) = train(TINY, "ps-map", (), 0, nothing, start=start)
    # all weights at zero: only the output's biases have a gradient
    assert zero.params["layers.0.weight"].abs().max() == 0
    (fitted,) = train(TINY, "ps-map", (), 0, nothing)
    assert fitted.params["layers.0.weight"].abs().max() > 0


def test_a_chain_goes_down_and_each_link_starts_where_the_last_one_ended():
    config = SolutionsConfig(steps=5, grid=6, lap_points=9)
    links = list(chain(config, "l-map", [0.1, 1.0, 10.0], 0, nothing))
    assert [link.member["jitter"] for link in links] == [10.0, 1.0, 0.1]
    step = MoonsConfig(steps=1, grid=6, lap_points=9)
    (again,) = train(step, "l-map", [0.1], 0, nothing, start=links[1].params)
    assert all(torch.equal(p, again.params[n]) for n, p in links[2].params.items())


def test_numbers_of_a_fit():
    f, params = functional(network(3))
    data = moons(dtype=torch.float64)
    fitted = Fitted({}, f, params, data)
    out = f(params, data.x)
    assert abs(fitted.nll() - torch.nn.functional.cross_entropy(out, data.y).item()) < 1e-12
    assert fitted.accuracy() == (out.argmax(1) == data.y).double().mean()
    x = TINY.px().all()
    exact = trace(f, params, x, method="exact").value
    torch.testing.assert_close(fitted.eigenvalues(x).sum(), exact.detach())


def test_the_slider_contains_the_papers_jitters():
    jitters = SolutionsConfig().jitters()
    assert len(jitters) == 13
    assert set(PAPER_JITTERS) <= set(jitters)
    assert jitters == sorted(jitters)


def test_points_of_a_picture_go_row_by_row_from_below():
    points = moons_solutions.points(3)
    assert points[0].tolist() == pytest.approx(list(moons_solutions.LOW))
    assert points[2].tolist() == pytest.approx([moons_solutions.HIGH[0], moons_solutions.LOW[1]])
    assert points[-1].tolist() == pytest.approx(list(moons_solutions.HIGH))
