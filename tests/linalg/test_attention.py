"""Attention written out is torch's attention, with all derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("causal", [True, False])
def test_padded_keys_change_nothing(causal, seeded, monkeypatch):
    q, k, v = (torch.randn(B, H, n, 4) for n in (L, S, S))
    plain = second_order.scaled_dot_product_attention(q, k, v, is_causal=causal)
    monkeypatch.setattr(second_order, "_padding", lambda key: 3)
    torch.testing.assert_close(
        second_order.scaled_dot_product_attention(q, k, v, is_causal=causal), plain
    )


def test_self_attention_is_projected_once(seeded):
    layer = nn.MultiheadAttention(E, H)
    x = torch.randn(L, B, E)
    expected = layer(x, x, x, need_weights=True)[0]
    with SecondOrder():
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)
