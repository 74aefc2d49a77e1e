"""Claims about null directions, held against the Jacobian."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fsmap.assess.families import Family
from fsmap.assess.spectrum import Spectrum
from fsmap.functional import count, ravel
from fsmap.types import Params

NEARLY = 0.02  # ‖Jv‖ over what it would be with random signs in v: 1 for any v, 0 for a null vector
LARGEST_BUILD = 3e7  # entries of the directions of one family that are all written out
LARGEST_BASIS = 1500  # parameters up to which directions are kept, to count the independent ones
CHUNK = 8e6  # entries written out at a time


class Checked(NamedTuple):
    """A family after the check."""

    family: Family
    kept: int  # directions that are null
    residual: float  # the largest ‖Jv‖/(‖v‖σ_max) among them; among all where none is
    nearly: bool  # none is null, but all are nearly so
    directions: Tensor | None  # [kept, P] unit vectors, where they are not too many


def check(families: Iterable[Family], params: Params, spectrum: Spectrum) -> list[Checked]:
    """Hold each family against the Jacobian, and drop those that do not hold.

    Args:
        families: Claims.
        params: Parameters.
        spectrum: Holds rows of A, or random combinations of them.

    Returns:
        The families with at least one null direction, and those that are nearly null.
    """
    columns = spectrum.probes.square().sum(0)  # [P]
    checked = [_check(family, params, spectrum, columns) for family in families]
    return [c for c in checked if c.kept or c.nearly]


def _check(family: Family, params: Params, spectrum: Spectrum, columns: Tensor) -> Checked:
    P = count(params)
    threshold = spectrum.resolution
    written = family.size * P <= LARGEST_BUILD
    keep = written and P <= LARGEST_BASIS
    residuals, ratios, kept = [], [], []
    for V in _directions(family, params, complete=written):
        residual, ratio = _effects(V, spectrum, columns)
        residuals.append(residual)
        ratios.append(ratio)
        if keep:
            kept.append(V[residual <= threshold])
    residual, ratio = torch.cat(residuals), torch.cat(ratios)
    if len(residual) == 0:  # every direction of the family is zero at these parameters
        return Checked(family, 0, 0.0, False, None)
    null = residual <= threshold
    number = int(null.sum()) if written else family.size * bool(null.all())
    shown = residual[null] if number else residual
    nearly = not number and bool((ratio <= NEARLY).all())
    return Checked(
        family, number, float(shown.max()), nearly, torch.cat(kept) if keep and number else None
    )


def _directions(family: Family, params: Params, *, complete: bool) -> Iterable[Tensor]:
    """Unit vectors ``[m, P]``: all of them in chunks, or random combinations of too many."""
    like = next(iter(params.values()))

    def one(c: Tensor) -> Tensor:
        return ravel(family.direction(c, params))

    if complete:
        size = max(1, int(CHUNK / count(params)))
        groups = [range(i, min(i + size, family.size)) for i in range(0, family.size, size)]
    else:
        groups = [range(2)]
    generator = torch.Generator(like.device).manual_seed(0)
    for group in groups:
        if complete:
            c = like.new_zeros(len(group), family.size)
            c[torch.arange(len(group)), torch.arange(group.start, group.stop)] = 1
        else:
            shape = (len(group), family.size)
            c = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        V = vmap(one)(c)
        norms = V.norm(dim=1, keepdim=True)
        alive = norms[:, 0] > 0  # the scale of a unit that is zero is no direction
        yield (V[alive] / norms[alive]).double()


def _effects(V: Tensor, spectrum: Spectrum, columns: Tensor) -> tuple[Tensor, Tensor]:
    """‖Av‖/σ_max, and ‖Av‖ over its root mean square when v's entries get random signs."""
    A = spectrum.probes
    weight = 1.0 if spectrum.exact else 1 / len(A)
    square = weight * (V @ A.mT).square().sum(1)
    shuffled = weight * V.square() @ columns
    largest = spectrum.largest.value.abs().clamp_min(1e-300)
    return (square / largest).sqrt(), (square / shuffled.clamp_min(1e-300)).sqrt()


def independent(checked: list[Checked], null: Tensor | None) -> list[int]:
    """How many directions each adds to those before it, as far as they were written out.

    Args:
        checked: In the order in which they may claim a direction.
        null: Orthonormal null vectors ``[d, P]`` where they are known; only what lies in their span
        counts.

    Returns:
        One number per entry.
    """
    added = []
    basis: Tensor | None = None
    for c in checked:
        if c.directions is None:
            added.append(0)
            continue
        V = c.directions if null is None else c.directions @ null.mT
        for _ in range(2):
            V = V if basis is None else V - (V @ basis.mT) @ basis
        new = _span(V)
        basis = new if basis is None else torch.cat([basis, new])
        added.append(len(new))
    return added


def _span(V: Tensor) -> Tensor:
    """Orthonormal basis of rows that are unit vectors or shorter; below 1e-7 is dependent."""
    if not V.numel():
        return V[:0]
    if len(V) > V.shape[1]:
        V = torch.linalg.qr(V, mode="r")[1]
    _, sigma, rows = torch.linalg.svd(V, full_matrices=False)
    kept: Tensor = rows[sigma > 1e-7]
    return kept
