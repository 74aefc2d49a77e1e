r"""Linear freedoms in one direction only: kernels of narrow readers, rotations under LayerNorm.

* narrow readers: where units are read by linear maps alone and these have a common kernel, what is
  made inside of the kernel has no effect.
* rotations: LayerNorm divides by a Euclidean norm, so an orthogonal map of the centered units,
  undone by the linear maps behind, leaves the function alone: makers change by Ωz, readers by
  −WΓΩΓ⁻¹, with Ω antisymmetric. RMSNorm the same, without the centering.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fsmap.assess.families import Family, trainable, unique
from fsmap.assess.wiring.facts import Wiring
from fsmap.assess.wiring.units import Member, NormRead, Segment, total, where
from fsmap.types import Params


def narrow_readers(segment: Segment, params: Params, everything: Params) -> Iterator[Family]:
    """Changes of the makers that no reader sees.

    Args:
        segment: Units.
        params: Trainable parameters.
        everything: All of them.

    Yields:
        A family for each maker.
    """
    readers = unique(segment.role("in"))
    makers = [m for m in unique(segment.role("out")) if m.name in params and not m.gain]
    if not segment.linear or not readers or any(m.gain or m.block > 1 for m in readers):
        return
    seen = torch.cat([m.blocks(everything[m.name]) for m in readers], dim=1).mT  # [outputs, n]
    _, sigma, V = torch.linalg.svd(seen, full_matrices=True)
    kernel = V[int((sigma > 1e-12 * sigma.max()).sum()) :]  # [d, n]
    for m in makers if len(kernel) else ():
        p = params[m.name]
        if not m.additive and p.ndim < 2:
            continue  # a gain multiplies each unit by itself: nothing can be mixed

        def build(c: Tensor, m: Member = m, p: Tensor = p) -> Params:  # [d, entries per unit]
            return {m.name: m.place(kernel.mT @ c, p)}

        shape = (len(kernel), m.blocks(p).shape[1])
        yield Family("narrow_readers", where([*segment.members]), shape, build)


def under_layernorm(wiring: Wiring, params: Params) -> Iterator[Family]:
    """Rotations of units that are read through LayerNorm or RMSNorm.

    Args:
        wiring: The module's units.
        params: Trainable parameters.

    Yields:
        A family for each set of units that can be rotated.
    """
    for segment in wiring.segments:
        makers = unique(segment.role("out"))
        if not segment.norms or not makers or not trainable(makers, params):
            continue
        mixed = all(not m.gain and (m.additive or params[m.name].ndim > 1) for m in makers)
        behind = [(norm, _behind(norm, wiring, params)) for norm in segment.norms]
        plain = unique(segment.role("in"))
        if mixed and segment.linear and trainable(plain, params):
            if all(readers is not None for _, readers in behind):
                yield _rotation(segment, makers, plain, behind, params)


def _behind(norm: NormRead, wiring: Wiring, params: Params) -> list[Member] | None:
    """Linear readers of what a LayerNorm makes; None where something else happens to it."""
    if norm.kind not in ("layer", "rms"):
        return None
    made = [s for s in wiring.segments if any(n is norm for n in s.normed)]
    if len(made) != 1 or not made[0].linear or not made[0].scalable:
        return None
    readers = unique(made[0].role("in"))
    usable = trainable(readers, params) and not any(m.gain or m.block > 1 for m in readers)
    biases = norm.bias is None or all(m.bias in params for m in readers)
    known = all(name is None or name in params for name in (norm.weight, norm.bias))
    return readers if readers and usable and biases and known else None


def _rotation(
    segment: Segment,
    makers: list[Member],
    plain: list[Member],
    behind: list[tuple[NormRead, list[Member] | None]],
    params: Params,
) -> Family:
    n = segment.units
    eye = torch.eye(n).to(params[makers[0].name])
    centered = any(norm.kind == "layer" for norm, _ in behind)
    C = eye - 1 / n if centered else eye
    pairs = torch.triu_indices(n, n, 1)

    def build(c: Tensor) -> Params:  # [n(n−1)/2]
        upper = torch.zeros_like(eye).index_put((pairs[0], pairs[1]), c)
        omega = C @ (upper - upper.mT) @ C
        parts = [
            (m.name, m.place(omega @ m.blocks(params[m.name]), params[m.name])) for m in makers
        ]
        for m in plain:
            parts.append((m.name, m.place(omega @ m.blocks(params[m.name]), params[m.name])))
        for norm, readers in behind:
            parts += _undone(omega, norm, readers or [], params)
        return total(parts)

    return Family("layernorm_rotation", where([*segment.members]), (pairs.shape[1],), build)


def _undone(
    omega: Tensor, norm: NormRead, readers: list[Member], params: Params
) -> list[tuple[str, Tensor]]:
    """−WΓΩΓ⁻¹ of every reader, and what its bias has to do about β."""
    ones = torch.ones_like(omega[0])
    gamma = ones if norm.weight is None else params[norm.weight]
    parts = []
    for m in readers:
        p = params[m.name]
        turned = (omega @ (gamma[:, None] * m.blocks(p))) / gamma[:, None]  # (−WΓΩΓ⁻¹)ᵀ, Ωᵀ = −Ω
        change = m.place(turned, p)
        parts.append((m.name, change))
        if norm.bias is not None:
            beta = params[norm.bias].reshape([-1 if d == m.dim else 1 for d in range(p.ndim)])
            effect = (change * beta).movedim(1 - m.dim, 0).flatten(1).sum(1)
            parts.append((m.bias or "", -effect))
    return parts
