"""From checked claims and a spectrum to findings, a rank that is explained, and a verdict."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.assess.diagnosis import Finding, Rank
from fsmap.assess.families import KINDS, ON_POINTS, PATHOLOGICAL
from fsmap.assess.naming import NullVector, describe, outside, sparse_basis
from fsmap.assess.spectrum import Spectrum, grows_with_points
from fsmap.assess.verify import Checked, independent
from fsmap.types import Params

WIDE_GAP = 1e4  # between eigenvalues kept and dropped, for the rank to be sure
FEW_POINTS = 20  # so few that a unit may be silent, or constant, on all of them by chance
SHOWN, SAMPLE = 5, 3  # null vectors that no symmetry accounts for, and that one does


class Evidence(NamedTuple):
    """Everything that was measured."""

    spectrum: Spectrum
    checked: list[Checked]  # in the order of ``KINDS``
    added: list[int] | None  # independent directions each adds to those before; None: too many
    params: Params
    frozen: Params
    outputs: int  # K

    @property
    def tolerance(self) -> float:
        """σ/σ_max up to which a singular value counts as zero."""
        largest = float(self.spectrum.largest.value.abs())
        return (self.spectrum.floor / largest) ** 0.5 if largest > 0 else 0.0

    def known(self) -> Tensor | None:
        """All verified directions that were written out, ``[m, P]``."""
        found = [c.directions for c in self.checked if c.directions is not None]
        return torch.cat(found) if found else None


def gather(
    spectrum: Spectrum, checked: list[Checked], params: Params, frozen: Params, outputs: int
) -> Evidence:
    """Sort what was checked, and count which null directions are new with each.

    Args:
        spectrum: Of 𝒥.
        checked: Claims that hold.
        params: Trainable parameters.
        frozen: The others.
        outputs: K.

    Returns:
        The evidence.
    """
    order = list(KINDS)
    checked = sorted(checked, key=lambda c: order.index(c.family.kind))
    written = all(c.directions is not None for c in checked if c.kept)
    added = independent(checked, spectrum.null) if written else None
    return Evidence(spectrum, checked, added, params, frozen, outputs)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Claims that hold, joined by kind and place, pathological ones first."""
    groups: dict[tuple[object, ...], list[tuple[Checked, int | None]]] = {}
    none: list[int | None] = [None] * len(evidence.checked)
    added = none if evidence.added is None else evidence.added
    for c, number in zip(evidence.checked, added, strict=True):
        units = c.family.units if c.family.kind.startswith("twin") else ()
        groups.setdefault((c.family.kind, c.family.where, c.nearly, units), []).append((c, number))
    joined = [_join([c for c, _ in g], [n for _, n in g]) for g in groups.values()]
    return tuple(f for f in joined if f.kind != "no_effect" or f.adds != 0)


def _join(group: list[Checked], added: list[int | None]) -> Finding:
    first, nearly = group[0].family, group[0].nearly
    numbers = [n for n in added if n is not None]
    return Finding(
        kind=first.kind,
        where=first.where,
        units=tuple(sorted({u for c in group for u in c.family.units})),
        directions=sum(c.family.size if nearly else c.kept for c in group),
        adds=sum(numbers) if len(numbers) == len(added) else None,
        residual=max(c.residual for c in group),
        nearly=nearly,
        pathological=first.kind in PATHOLOGICAL,
        distance=max(c.family.distance for c in group),
        text=KINDS[first.kind],
    )


def rank(evidence: Evidence, num_points: int) -> Rank:
    """Theorem 1, with what is missing for want of points told from what is missing for good."""
    s = evidence.spectrum
    known = sum(c.kept for c in evidence.checked if c.family.kind != "no_effect")
    if evidence.added is not None:
        known = sum(evidence.added)
    certain = known if evidence.added is not None else 0
    missing = max(0, s.parameters - evidence.outputs * num_points)
    deficit = None if s.rank is None else s.parameters - s.rank
    unexplained = grows = None
    if deficit is not None and missing == 0 and evidence.added is not None:
        unexplained = max(0, deficit - known)
    if unexplained and s.exact and s.rank is not None:
        grows = grows_with_points(s.probes, evidence.tolerance, s.rank)
    gap = s.gap
    return Rank(
        method=s.method,
        rank=s.rank,
        deficit=deficit,
        missing_rows=missing,
        points_needed=math.ceil((s.parameters - certain) / max(evidence.outputs, 1)),
        known=known,
        known_exactly=evidence.added is not None,
        unexplained=unexplained,
        tolerance=evidence.tolerance,
        gap=None if gap is None or math.isinf(gap) else gap,
        sure=None if gap is None else gap >= WIDE_GAP,
        grows=grows,
    )


def null_vectors(evidence: Evidence) -> tuple[NullVector, ...]:
    """The sparsest null vectors that no known symmetry accounts for; or of all, if each has one."""
    null = evidence.spectrum.null
    if null is None or not len(null):
        return ()
    gap = evidence.spectrum.gap
    basis = sparse_basis(null)
    rest = outside(basis, evidence.known())
    if len(rest) and gap is not None and gap < WIDE_GAP:
        return ()  # no gap: any direction of little effect would pass for one
    basis = rest[:SHOWN] if len(rest) else basis[:SAMPLE]
    A = evidence.spectrum.probes
    largest = evidence.spectrum.largest.value.abs().sqrt().clamp_min(1e-300)
    residuals = (basis @ A.mT).norm(dim=1) / basis.norm(dim=1) / largest
    return tuple(
        describe(v, evidence.params, float(r)) for v, r in zip(basis, residuals, strict=True)
    )


def judge(rank: Rank, symmetries: tuple[Finding, ...], num_points: int) -> tuple[str, str]:
    """One word and one sentence."""
    exact = [f for f in symmetries if not f.nearly]
    by_chance = ON_POINTS if num_points < FEW_POINTS else ()
    bad = [f for f in exact if f.pathological and f.kind not in by_chance]
    if bad:
        kinds = ", ".join(dict.fromkeys(f.kind.replace("_", " ") for f in bad))
        return "pathological", (
            f"𝒥 is singular at these parameters ({kinds}). Exact FS-MAP needs a jitter: without "
            "one this is an optimum whatever the data say."
        )
    idle_here = [f for f in exact if f.kind in by_chance]
    if idle_here:
        kinds = ", ".join(dict.fromkeys(f.kind.replace("_", " ") for f in idle_here))
        return "undecided", (
            f"there are {kinds}, but on so few points (S = {num_points}) that may be chance: give "
            f"at least {FEW_POINTS}."
        )
    near = [f for f in symmetries if f.nearly and f.pathological]
    if near:
        distance = min(f.distance for f in near)
        kinds = ", ".join(dict.fromkeys(f.kind.replace("_", " ") for f in near))
        return "near-pathological", (
            f"𝒥 is nearly singular: these parameters are near a fixed point ({kinds}, relative "
            f"distance {distance:.1g}), where exact FS-MAP without a jitter has infinite density."
        )
    if rank.rank is None or rank.missing_rows:
        why = "it is too large to factorize" if rank.rank is None else "there are too few points"
        told = f" {rank.known:,} null directions are known all the same." if rank.known else ""
        return "undecided", f"the rank of 𝒥 cannot be told: {why}.{told}"
    if rank.deficit == 0:
        return "regular", "𝒥 has full rank on these points: no singularity here."
    idle = sum(f.adds or 0 for f in exact if f.kind == "no_effect")
    if rank.unexplained == 0 and idle:
        return "unused", (
            f"{idle} parameters have no effect on any of the points: they are not used, or p_X "
            "does not reach them."
        )
    if rank.unexplained == 0:
        return "harmless", (
            "𝒥 is singular for every value of the parameters, by continuous symmetries: no "
            "pathological optimum; a jitter makes the log-determinant a pseudo-determinant."
        )
    if rank.sure is False:
        return "ill-conditioned", (
            "the eigenvalues of 𝒥 fall smoothly below rounding: it is singular for all practical "
            "purposes, and only the jitter says where the log-determinant ends."
        )
    if rank.grows:
        return "undecided", (
            f"the rank of 𝒥 still grows with the number of points; {rank.unexplained} null "
            "directions on these belong to no known symmetry."
        )
    return "unexplained", (
        f"𝒥 is singular on these points, and {rank.unexplained} null directions belong to no known "
        "symmetry."
    )
