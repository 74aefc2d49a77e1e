"""Attention written out is torch's attention, with all derivatives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsmap
from fsmap.linalg import second_order
from fsmap.linalg.jacobian import SecondOrder

B, L, S, E, H = 2, 5, 7, 8, 2


def masks(kind: str) -> dict[str, torch.Tensor]:
    ignored = torch.tensor([[False] * S, [False] * 4 + [True] * 3])
    return {
        "none": {},
        "bool": {"attn_mask": (torch.rand(L, S) < 0.4) & ~torch.eye(L, S, dtype=torch.bool)},
        "float": {"attn_mask": torch.randn(L, S)},
        "per head": {"attn_mask": torch.randn(B * H, L, S)},
        "padding": {"key_padding_mask": ignored},
        "both": {
            "attn_mask": torch.randn(L, S),
            "key_padding_mask": torch.zeros(B, S).masked_fill(ignored, -torch.inf),
        },
    }[kind]


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "per head", "padding", "both"])
def test_heads_are_those_of_torch(kind, bias, extra, seeded, monkeypatch):
    monkeypatch.setattr(second_order, "_padding", lambda key: extra)
    layer = nn.MultiheadAttention(E, H, bias=bias, batch_first=True)
    options = {"average_attn_weights": False, **masks(kind)}
    x, z = torch.randn(B, L, E), torch.randn(B, S, E)
    params = dict(layer.named_parameters())
    psi = {n: torch.randn_like(p) for n, p in params.items()}

    def tangent(wanted, context):
        """Σ ẏ², and its gradient."""

        def call(p):
            with context():
                given = {"need_weights": wanted, **options}
                return torch.func.functional_call(layer, p, (x, z, z), given)[0]

        out, dot = torch.func.jvp(call, (params,), (psi,))
        leaves = list(params.values())
        return out, torch.autograd.grad(dot.square().sum(), leaves, materialize_grads=True)

    expected = tangent(True, torch.enable_grad)  # torch's own, written out
    torch.testing.assert_close(tangent(False, SecondOrder), expected)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "one mask for all keys": {"attn_mask": torch.ones(L, 1)},
    "no key, float": {"attn_mask": torch.zeros(L, S).index_fill(0, torch.tensor(1), -torch.inf)},
    "groups": {"enable_gqa": True},
    "dropout": {"dropout_p": 1.0},
}


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_those_of_torch(name, extra, seeded, monkeypatch):
    """Padded keys change nothing; a query that may see no key gets 0 with a gradient of 0."""
    monkeypatch.setattr(second_order, "_padding", lambda key: extra)
    q, k, v = (torch.randn(B, n, m, 4).requires_grad_() for n, m in ((4, L), (H, S), (H, S)))
    q = q if name == "groups" else q[:, :H]
    found = []
    for context in (torch.enable_grad, SecondOrder):
        with context():
            out = F.scaled_dot_product_attention(q, k, v, **OPTIONS[name])
        found.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("estimator", ["jvp", "vjp", "exact", "fd"])
def test_left_padding_in_a_causal_encoder(estimator, seeded):
    layer = nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True)
    causal = torch.ones(L, L).triu(1).bool()
    forward = lambda m, x: m(x, causal, x[..., 0] == 0)  # noqa: E731
    x = torch.randn(3, L, E)
    x[0, :2] = 0  # left padding: the first token sees nothing
    px, options = lambda n, g: x[:n], {"estimator": estimator, "forward": forward}
    out, R = fsmap.LMAP(layer, px, num_points=2, **options)(x)
    torch.testing.assert_close(out, forward(layer, x))
    (out.sum() + R).backward()
    assert R > 0
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_self_attention_is_projected_once(seeded):
    layer = nn.MultiheadAttention(E, H)
    x = torch.randn(L, B, E)
    expected = layer(x, x, x)  # weights too
    arguments = (x, x, x, E, H, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0)
    arguments = (*arguments, layer.out_proj.weight, layer.out_proj.bias)
    ignored = torch.arange(L) > 2 + torch.arange(B)[:, None]
    masked = F.multi_head_attention_forward(*arguments, key_padding_mask=ignored)[0]
    with SecondOrder():
        torch.testing.assert_close(layer(x, x, x), expected)
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected[0])
        options = {"key_padding_mask": ignored, "need_weights": False}
        found = F.multi_head_attention_forward(*arguments, **options)[0]
    torch.testing.assert_close(found, masked)
