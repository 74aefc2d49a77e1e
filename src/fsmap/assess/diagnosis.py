"""What the doctor found: plain values, as JSON and as a page."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from fsmap.assess.cost import Cost
from fsmap.assess.jitter import JitterRow
from fsmap.assess.naming import NullVector, Part

VERDICTS = (
    *("regular", "harmless", "pathological", "near-pathological"),
    *("unused", "ill-conditioned", "unexplained", "undecided"),
)
VERSION = 1  # of the JSON; grows when a key changes its meaning or disappears


class Rank(NamedTuple):
    """Theorem 1: is 𝒥 singular on these points?"""

    method: str  # "svd", "values", "eigh" or "lanczos"
    rank: int | None  # None: too large to be computed
    deficit: int | None  # P − rank
    missing_rows: int  # max(0, P − Q): zero eigenvalues for want of points alone
    points_needed: int  # least number of points that could give all the rank there can be
    known: int  # null directions known from symmetries, independent ones
    known_exactly: bool  # False: they were counted, and may overlap
    unexplained: int | None  # null directions that no known symmetry accounts for; None: unknown
    tolerance: float  # σ/σ_max up to which a singular value counts as zero
    gap: (
        float | None
    )  # smallest eigenvalue kept over largest dropped; None where none or only zeros drop
    sure: bool | None  # whether that gap is wide
    grows: bool | None  # whether the second half of the points added to the rank; None: not asked


class Eigenvalues(NamedTuple):
    """Of 𝒥. What is not known is None."""

    largest: float  # a lower bound where the method is "lanczos"
    largest_upper: float
    smallest: float | None  # the P-th
    smallest_nonzero: float | None
    condition: float | None  # largest over smallest nonzero
    trace: float
    trace_stderr: float
    decades: tuple[tuple[int, int], ...]  # (n, how many lie in [10ⁿ, 10ⁿ⁺¹)), largest first


class Finding(NamedTuple):
    """One symmetry, or one kind of idle unit, at one place."""

    kind: str
    where: str
    units: tuple[int, ...]  # the units it is about, where it is about some of them
    directions: int  # null directions it implies
    adds: int | None  # those among them that no finding above it accounts for; None: not computed
    residual: float  # the largest ‖Jv‖/(‖v‖σ_max)
    nearly: bool  # not null, but close
    pathological: (
        bool  # at special parameters only: FS-MAP without jitter has an infinite density there
    )
    distance: float  # relative distance to the fixed point
    text: str


class Pair(NamedTuple):
    """The two most similar units of a layer."""

    where: str
    units: tuple[int, int]
    distance: float  # ‖a − b‖/(‖a‖ + ‖b‖) of all that belongs to them


class Diagnosis(NamedTuple):
    """What :func:`fsmap.doctor` returns. ``print`` shows a page, :meth:`to_json` has everything."""

    module: str
    mode: str  # "train" or "eval"
    precision: str
    parameters: int  # P
    frozen: int
    points: int  # S
    points_used: int
    outputs: int  # K
    verdict: str  # one of ``VERDICTS``
    summary: str
    rank: Rank
    eigenvalues: Eigenvalues
    symmetries: tuple[Finding, ...]
    null_vectors: tuple[NullVector, ...]
    closest: tuple[Pair, ...]
    jitters: tuple[JitterRow, ...]
    costs: tuple[Cost, ...]
    auto: str
    unfollowed: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """The page."""
        from fsmap.assess.page import page

        return page(self)

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and lists; the keys are the names of the fields."""
        return {"version": VERSION, **_plain(self)}

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Diagnosis:
        """The inverse of :meth:`to_json`."""
        given = json.loads(text)
        given.pop("version")
        given["rank"] = Rank(**given["rank"])
        decades = tuple((n, m) for n, m in given["eigenvalues"].pop("decades"))
        given["eigenvalues"] = Eigenvalues(**given["eigenvalues"], decades=decades)
        given["symmetries"] = tuple(
            Finding(**{**f, "units": tuple(f["units"])}) for f in given["symmetries"]
        )
        given["null_vectors"] = tuple(
            NullVector(v["text"], tuple(Part(**p) for p in v["parts"]), v["residual"])
            for v in given["null_vectors"]
        )
        given["closest"] = tuple(
            Pair(p["where"], (p["units"][0], p["units"][1]), p["distance"])
            for p in given["closest"]
        )
        given["jitters"] = tuple(JitterRow(**row) for row in given["jitters"])
        given["costs"] = tuple(Cost(**row) for row in given["costs"])
        for name in ("unfollowed", "notes"):
            given[name] = tuple(given[name])
        return cls(**given)


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
