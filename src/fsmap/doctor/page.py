"""A diagnosis as a page of plain text, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from itertools import groupby

from fsmap.doctor.doctor import VALID, Diagnosis
from fsmap.doctor.symmetry import Finding

MARKS = {True: "ok", False: "!!", None: "??"}  # at the beginning of a section
LISTED = 6  # findings of a kind before the list is cut


def page(d: Diagnosis) -> str:
    """The whole page; each section starts with ``[ok]``, ``[!!]`` or ``[??]``."""
    frozen = f" ({d.frozen:,} frozen ones left out)" if d.frozen else ""
    facts = (
        f"P = {d.parameters:,} parameters{frozen}, S = {d.points:,} points, K = {d.outputs} "
        f"output{'s' * (d.outputs != 1)}; {d.mode} mode, examined in {d.precision} in "
        f"{d.seconds:.2g} s"
    )
    head = [f"fsmap doctor: {d.module}", *_wrap(facts, 2), ""]
    head += _wrap(f"{d.verdict.upper()}: {d.summary}", 0)
    sections = [head, _rank(d), _symmetries(d), _eigenvalues(d), _jitters(d)]
    if d.notes:
        sections.append(["Notes", *(line for n in d.notes for line in _wrap(f"- {n}", 5))])
    return "\n\n".join("\n".join(lines) for lines in sections)


def _rank(d: Diagnosis) -> list[str]:
    r = d.rank
    facts = [f"{r.rank:,} of {d.parameters:,}" if r.rank is not None else "not computed"]
    if r.missing_rows:
        facts.append(
            f"{r.missing_rows:,} eigenvalues are zero because there are too few points, at least "
            f"{r.points_needed:,} are needed to see the others"
        )
    if r.unexplained is not None and r.deficit:
        facts.append(f"the symmetries below explain {r.known:,} of {r.deficit:,} null directions")
    if r.sure is False:
        facts.append(
            "the eigenvalues fall below rounding without a gap: which of them are zero in exact "
            f"arithmetic is not known (tolerance {r.tolerance:.0e})"
        )
    if r.grows is not None:
        facts.append(f"the second half of the points {'added to' if r.grows else 'kept'} it")
    if r.nearby is not None:
        facts.append(f"at parameters 1 % away there are {r.nearby:,} null directions")
    known = r.unexplained is not None or r.deficit == 0
    ok = d.verdict in ("regular", "harmless") if known else None
    lines = _section(ok, "Rank (Theorem 1)", facts)
    return lines + [line for v in d.null_vectors for line in _wrap(f"- null vector: {v.text}", 5)]


def _symmetries(d: Diagnosis) -> list[str]:
    number = sum(f.pathological for f in d.symmetries)
    verdict = f"{number} pathological at these parameters" if number else "none pathological"
    lines = _section(not number, "Symmetries (Theorem 2)", [verdict])
    for kind, found in groupby(d.symmetries, key=lambda f: f.kind):
        group = list(found)
        mark = "!" if group[0].pathological else "-"
        lines += _wrap(f"{mark} {kind.replace('_', ' ')}: {group[0].text}", 5)
        lines += [line for f in group[:LISTED] for line in _wrap(_finding(f), 9)]
        if len(group) > LISTED:
            rest = sum(f.directions for f in group[LISTED:])
            lines += _wrap(f"and {len(group) - LISTED} more with {rest:,} null directions", 9)
    return lines


def _finding(f: Finding) -> str:
    names = [str(unit) for unit in f.units]
    shown = ", ".join(names if len(names) <= 8 else [*names[:7], f"… ({len(names)})"])
    units = f"units {shown} of " if names else ""
    new = f", {f.adds:,} of them new" if f.adds is not None and f.adds < f.directions else ""
    return f"{units}{f.where}: {f.directions:,} null directions{new}"


def _eigenvalues(d: Diagnosis) -> list[str]:
    e = d.eigenvalues
    verdict = f"largest between {e.largest:.3g} and {e.largest_upper:.3g}"
    if e.condition is not None:
        verdict = f"{e.largest:.3g} … {e.smallest_nonzero:.3g}, condition {e.condition:.1e}"
    error = f" ± {e.trace_stderr:.1g}" if e.trace_stderr else ""
    trace = f"trace {e.trace:.4g}{error} (the regularizer R of L-MAP, before λ)"
    lines = _section(None if e.condition is None else True, "Eigenvalues", [verdict, trace])
    shown = [f"1e{n}:\xa0{number:,}" for n, number in e.decades]
    shown = shown if len(shown) <= 14 else [*shown[:7], "…", *shown[-6:]]
    return lines + (_wrap("By decade: " + "  ".join(shown), 5) if shown else [])


def _jitters(d: Diagnosis) -> list[str]:
    rows = {row.name: row for row in d.jitters}
    kinds = (("fs-map", "=", "exact FS-MAP"), ("l-map", "≥", "L-MAP"))
    known = [(rows[name].jitter, *rest) for name, *rest in kinds if name in rows]
    advice = [f"recommended ε {sign} {jitter:.0e} for {what}" for jitter, sign, what in known]
    if not advice:
        return _section(None, "Jitter", ["𝒥 is zero, no ε can be recommended"])
    errors = {row.name: row.error_bound if row.error is None else row.error for row in d.jitters}
    holds = errors.get("given", 0.0) <= VALID
    if not holds:
        advice.append("at the given one the first-order form of L-MAP does not hold")
    table = [["ε", "from", "λ_max/ε", "effective rank", "log det(I+𝒥/ε)", "first order", "error"]]
    table[0] += ["λ=1/(2εN)"] if d.jitters[0].lam is not None else []
    for row in d.jitters:
        numbers = [(row.effective, ".1f"), (row.log_det, ".5g"), (row.first_order, ".5g")]
        cells = [f"{row.jitter:.3g}", row.name, f"{row.ratio:.2g}"]
        cells += ["–" if value is None else format(value, form) for value, form in numbers]
        cells.append(("≤ " if row.error is None else "") + f"{100 * errors[row.name]:.2g} %")
        table.append(cells + ([f"{row.lam:.2g}"] if row.lam is not None else []))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    padded = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in table]
    return _section(holds, "Jitter", advice) + [("     " + "  ".join(p)).rstrip() for p in padded]


def _section(ok: bool | None, title: str, facts: list[str]) -> list[str]:
    return _wrap(f"[{MARKS[ok]}] {title}: {'; '.join(facts)}", 0, hanging=5)


def _wrap(text: str, indent: int, hanging: int = 2) -> list[str]:
    first, rest = " " * indent, " " * (indent + hanging)
    wrapper = textwrap.TextWrapper(98, first, rest, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in wrapper.wrap(text)]
