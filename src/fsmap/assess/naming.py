"""Null vectors in words: which entries of which parameters, with which signs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.functional import unravel
from fsmap.types import Params

FEW = 6  # parts of a vector that are named one by one
SMALL = 1e-6  # entries below this fraction of the largest are not named


class Part(NamedTuple):
    """A null vector's entries in one parameter."""

    parameter: str
    entries: str  # like "[3, :]"
    share: float  # of the squared norm
    sign: int  # +1 or −1 where all entries have it, 0 where signs are mixed


class NullVector(NamedTuple):
    """A direction in parameter space that does not change the function on the points."""

    text: str
    parts: tuple[Part, ...]
    residual: float  # ‖Jv‖/(‖v‖σ_max)


def sparse_basis(null: Tensor) -> Tensor:
    """A basis of the same space whose vectors have few entries where that is possible.

    Gauss–Jordan elimination with complete pivoting: each vector is 1 at its own pivot and 0 at
    those of the others, so that directions with separate supports come out separately.

    Args:
        null: Orthonormal rows ``[d, P]``.

    Returns:
        ``[d, P]``, the sparsest first, largest entry 1.
    """
    rows = null.clone()
    for i in range(len(rows)):
        index = int(rows[i:].abs().argmax())
        r, p = i + index // rows.shape[1], index % rows.shape[1]
        rows[[i, r]] = rows[[r, i]]
        rows[i] = rows[i] / rows[i, p]
        factors = rows[:, p].clone()
        factors[i] = 0
        rows = rows - torch.outer(factors, rows[i])
    rows = torch.where(rows.abs() < SMALL * rows.abs().amax(1, keepdim=True), 0.0, rows)
    return rows[(rows != 0).sum(1).argsort(stable=True)]


def outside(basis: Tensor, known: Tensor | None) -> Tensor:
    """The vectors of a basis ``[d, P]`` that are no combination of known directions ``[m, P]``."""
    if known is None or not len(known):
        return basis
    if len(known) > known.shape[1]:
        known = torch.linalg.qr(known, mode="r")[1]
    _, sigma, V = torch.linalg.svd(known, full_matrices=False)
    span = V[sigma > 1e-7 * sigma.max()]
    rest = basis - (basis @ span.mT) @ span
    return basis[rest.norm(dim=1) > 1e-5 * basis.norm(dim=1)]


def describe(vector: Tensor, params: Params, residual: float) -> NullVector:
    """A null vector in words.

    Args:
        vector: ``[P]``.
        params: For names and shapes.
        residual: ‖Jv‖/(‖v‖σ_max).

    Returns:
        The vector's entries by parameter, largest share first.
    """
    total = vector.square().sum()
    threshold = SMALL * vector.abs().max()
    parts = []
    for name, piece in unravel(vector, params).items():
        parts += _pieces(name, piece, threshold, total)
    parts.sort(key=lambda part: -round(part.share, 4))  # equal ones in the order of the module
    return NullVector(_sentence(parts), tuple(parts), residual)


def _pieces(name: str, piece: Tensor, threshold: Tensor, total: Tensor) -> list[Part]:
    """Rows or columns with entries, each a part; or one part where they are many."""
    mask = piece.abs() > threshold
    if not bool(mask.any()):
        return []
    if int(mask.sum()) <= 3:  # few enough to be named one by one
        groups = [(_index(i.tolist()), tuple(i.tolist())) for i in mask.nonzero()]
    else:
        groups = _slices(piece, mask)
    if len(groups) > 4:
        where = f" ({int(mask.sum())} of {piece.numel()} entries)"
        return [Part(name, where, float(piece.square().sum() / total), _sign(piece[mask]))]
    return [
        Part(name, label, float(piece[at].square().sum() / total), _sign(piece[at][mask[at]]))
        for label, at in groups
    ]


def _slices(piece: Tensor, mask: Tensor) -> list[tuple[str, tuple[int | slice, ...]]]:
    """The entries as rows or as columns, whichever are fewer: label and index of each."""
    if piece.ndim == 0:
        return [("", ())]
    best: list[tuple[str, tuple[int | slice, ...]]] | None = None
    for dim in range(min(piece.ndim, 2)):
        other = [d for d in range(piece.ndim) if d != dim]
        hit = mask.any(dim=tuple(other)) if other else mask
        indices = hit.nonzero().flatten().tolist()
        if best is None or len(indices) < len(best):
            best = []
            for i in indices:
                at = (*[slice(None)] * dim, i)
                best.append((_label(piece, mask, dim, i), at))
    assert best is not None
    return best


def _label(piece: Tensor, mask: Tensor, dim: int, i: int) -> str:
    entries = mask.select(dim, i).nonzero()
    if piece.ndim > 1 and len(entries) == 1:  # a single entry, in full
        full = entries[0].tolist()
        return _index([*full[:dim], i, *full[dim:]])
    return _index([*[":"] * dim, i, *[":"] * (piece.ndim - dim - 1)])


def _index(places: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, places)) + "]" if places else ""


def _sign(values: Tensor) -> int:
    if bool((values > 0).all()):
        return 1
    return -1 if bool((values < 0).all()) else 0


def _spread(parts: list[Part]) -> str:
    """Shares of whole parameters, where entries are too many to be named."""
    shares: dict[str, float] = {}
    for part in parts:
        shares[part.parameter] = shares.get(part.parameter, 0.0) + part.share
    largest = sorted(shares.items(), key=lambda item: -item[1])[:4]
    named = ", ".join(f"{name} {100 * share:.0f} %" for name, share in largest)
    return f"spread over {len(shares)} parameters: {named}" + ", …" * (len(shares) > 4)


def _sentence(parts: list[Part]) -> str:
    named = [f"{part.parameter}{part.entries}" for part in parts]
    if len(parts) == 1:
        return named[0]
    if len(parts) > FEW:
        return _spread(parts)
    text = ", ".join(named[:-1]) + " and " + named[-1]
    signs = [part.sign for part in parts]
    if len(parts) == 2 and sorted(signs) == [-1, 1]:
        return text + ", with opposite signs"
    return text
