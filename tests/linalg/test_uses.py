"""How parameters enter a model is read from its calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cases
import fsmap
from fsmap.linalg import points
from fsmap.linalg.jacobian import ChangedError, Watch, look, survey


def seen(module, *shape):
    f, params = fsmap.functional(module.double())
    return look(f, params, torch.ones(2, *shape))


def test_layers_of_an_mlp():
    found = look(*cases.case("wide")[:3])
    assert [(u.weight, u.bias, u.shape, u.places, u.width) for u in found.uses] == [
        ("0.weight", "0.bias", (1, 8), 1, 8),
        ("2.weight", "2.bias", (1, 3), 1, 3),
    ]
    assert found.others == ()
    assert found.outputs == 3
    assert found.leads


def test_shared_weights_are_used_twice_and_frozen_ones_not_at_all():
    assert [u.weight for u in look(*cases.case("shared")[:3]).uses] == ["first.weight"] * 2
    frozen = look(*cases.case("frozen")[:3])
    assert [(u.weight, u.bias) for u in frozen.uses] == [("2.weight", "2.bias")]


def test_normalization_and_attention_are_other_uses():
    found = look(*cases.case("sequence")[:3])
    assert "encoder.norm1.weight" in found.others
    assert "encoder.self_attn.in_proj_weight" in found.others
    assert [u.weight for u in found.uses] == [
        *("encoder.linear1.weight", "encoder.linear2.weight", "head.weight")
    ]
    assert found.uses[0].places == 2  # tokens
    assert not found.leads


class Tied(nn.Module):
    """A weight that is a linear layer's and something else's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layer(x) @ self.layer.weight


def test_one_other_use_makes_a_parameter_other(seeded):
    found = seen(Tied(), 2)
    assert set(found.others) == {"layer.weight", "idle"}
    assert [(u.weight, u.bias) for u in found.uses] == [(None, "layer.bias")]


def test_questions_about_shape_are_no_uses(seeded):
    class Asking(nn.Linear):
        def forward(self, x):
            assert self.weight.shape[1] == x.shape[-1]
            assert self.weight.dtype == x.dtype
            assert self.weight.numel() > 0
            return super().forward(x)

    assert seen(Asking(2, 3), 2).others == ()


def test_weights_as_inputs_and_keyword_arguments(seeded):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            return F.linear(input=x, weight=F.linear(self.a, self.b))

    assert seen(Odd(), 2).others == ("a", "b")

    class Named(nn.Linear):
        def forward(self, x):
            return F.linear(input=x, weight=self.weight, bias=self.bias)

    assert [(u.weight, u.bias) for u in seen(Named(2, 2), 2).uses] == [("weight", "bias")]


@pytest.mark.parametrize(
    ("module", "shape", "places"),
    [
        (nn.Conv2d(2, 3, 2), (2, 4, 5), 12),
        (nn.Conv2d(2, 3, (2, 3), stride=2, padding=(1, 0), dilation=(1, 2)), (2, 6, 8), 8),
        (nn.Conv2d(2, 3, 2, padding_mode="circular", padding=1), (2, 3, 3), 16),
        (nn.Conv2d(2, 3, 1, padding="valid"), (2, 3, 3), None),
        (nn.Conv2d(2, 4, 2, groups=2), (2, 4, 4), None),
        (nn.Conv1d(2, 3, 2, stride=2), (2, 7), 3),
        (nn.Conv3d(1, 2, 2), (1, 3, 3, 3), None),
        (nn.ConvTranspose2d(1, 2, 2), (1, 3, 3), None),
    ],
)
def test_convolutions(module, shape, places):
    found = seen(module, *shape)
    if places is None:  # differentiated as any other parameter
        assert found.others == ("weight", "bias")
    else:
        assert found.others == ()
        assert [u.places for u in found.uses] == [places]


def test_plain_functions_are_seen_too():
    params = {"w": torch.ones(2, 3), "c": torch.ones(2)}
    found = look(lambda p, x: F.linear(x, p["w"]) * p["c"], params, torch.ones(4, 3))
    assert [u.weight for u in found.uses] == ["w"]
    assert found.others == ("c",)


def test_numbers_per_point():
    case = cases.case("wide")  # K = 3 outputs; layers 2 → 8 → 3
    found = look(case.f, case.params, case.x)
    assert found.numbers_per_point(case.params) == (2 + 3 * 8) + (8 + 3 * 3)
    sequence = cases.case("sequence")
    found = look(sequence.f, sequence.params, sequence.x)
    others = sum(sequence.params[name].numel() for name in found.others)
    written = [
        u.places * (u.kernel[0] + 4 * u.width) + 4 * u.width * u.kernel[0] for u in found.uses
    ]
    assert found.numbers_per_point(sequence.params) == 4 * others + sum(written)
    compact = [
        min(u.places * (u.kernel[0] + 4 * u.width), 4 * u.width * u.kernel[0]) for u in found.uses
    ]
    assert found.compact_numbers(sequence.params) == 4 * others + sum(compact)


def test_taps_are_added_and_inputs_kept():
    case = cases.case("wide")
    taps = [torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(5, 3)]
    with Watch(case.params, taps) as watch:
        out = case.f(case.params, case.x)
    hidden = case.module[0](case.x) + taps[0]
    torch.testing.assert_close(out, case.module[1:](hidden))
    torch.testing.assert_close(watch.finish()[1], case.module[1](hidden))


def test_other_calls_than_surveyed_are_noticed():
    case = cases.case("wide")
    for taps in ([torch.zeros(5, 8)], [torch.zeros(4, 8), torch.zeros(5, 3)]):
        with pytest.raises(ChangedError), Watch(case.params, taps):
            case.f(case.params, case.x)
    watch = Watch(case.params, [torch.zeros(5, 8), torch.zeros(5, 3), torch.zeros(1)])
    with watch:
        case.f(case.params, case.x)
    with pytest.raises(ChangedError):
        watch.finish()


def test_survey_of_one_point_is_enough():
    case = cases.case("dict_input")
    first = points.take(case.x, slice(0, 1))
    found = survey(lambda: case.f(case.params, first), case.params)
    assert found.uses[0].shape == (1, 2, 2)
