"""A diagnosis as a page of plain text, at most 100 columns wide."""

from __future__ import annotations

import textwrap

from fsmap.doctor.doctor import VALID, Diagnosis
from fsmap.doctor.symmetry import Finding

MARKS = {True: "ok", False: "!!", None: "??"}  # at the beginning of a section
LISTED = 6  # lines of a list before it is cut


def page(d: Diagnosis) -> str:
    """The whole page; each section starts with ``[ok]``, ``[!!]`` or ``[??]``."""
    frozen = f" ({d.frozen:,} frozen ones left out)" if d.frozen else ""
    facts = (
        f"P = {d.parameters:,} parameters{frozen}, S = {d.points:,} points, K = {d.outputs} "
        f"output{'s' * (d.outputs != 1)}; {d.mode} mode, examined in {d.precision} in "
        f"{d.seconds:.2g} s"
    )
    head = [f"fsmap doctor: {d.module}", *_wrap(facts, "  "), ""]
    head += _wrap(f"{d.verdict.upper()}: {d.summary}", "")
    sections = [head, _rank(d), _symmetries(d), _eigenvalues(d), _jitters(d)]
    if d.notes:
        sections.append(
            ["Notes", *(ln for note in d.notes for ln in _wrap(note, "       ", "     - "))]
        )
    return "\n\n".join("\n".join(lines) for lines in sections)


def _rank(d: Diagnosis) -> list[str]:
    r, title = d.rank, "Rank (Theorem 1)"
    body: list[str] = []
    if r.rank is None:
        lines = _section(None, title, "not computed, the model is too large")
    elif r.missing_rows:
        most = d.points_used * d.outputs
        verdict = f"{r.rank:,} of at most {most:,} with {d.points_used:,} points: too few"
        lines = _section(None, title, verdict)
        body.append(
            f"{r.missing_rows:,} of the {r.deficit:,} zero eigenvalues exist because there are too "
            f"few points. At least {r.points_needed:,} points are needed to see the others."
        )
    elif r.deficit == 0:
        lines = _section(True, title, f"full, {d.parameters:,} of {d.parameters:,}")
    else:
        verdict = f"{r.rank:,} of {d.parameters:,}: {r.deficit:,} null directions"
        lines = _section(d.verdict == "harmless", title, verdict)
        if r.unexplained is None:
            body.append(f"The symmetries below explain at most {r.known:,} (they may overlap).")
        else:
            body.append(f"The symmetries below explain {r.known:,} of them.")
        if r.sure is False:
            body.append(
                "The eigenvalues fall below rounding without a gap: which of them are zero in "
                f"exact arithmetic is not known (tolerance {r.tolerance:.0e})."
            )
        elif r.grows is not None:
            added = "added to the rank: more points may help" if r.grows else "did not add to it"
            body.append(f"The second half of the points {added}.")
        if r.nearby is not None:
            body.append(f"At parameters 1 % away there are {r.nearby:,} null directions.")
    for text in body:
        lines += _wrap(text, "     ")
    if d.null_vectors:
        which = "that no symmetry explains" if r.unexplained else "(the sparsest)"
        lines.append(f"     Null vectors {which}:")
    return lines + [ln for v in d.null_vectors for ln in _wrap(v.text, "         ", "       - ")]


def _symmetries(d: Diagnosis) -> list[str]:
    number = sum(f.pathological for f in d.symmetries)
    verdict = "only those that hold for all parameters, which are harmless"
    if number:
        verdict = f"{number} pathological finding{'s' * (number != 1)} at these parameters"
    lines = _section(not number, "Symmetries (Theorem 2)", verdict if d.symmetries else "none")
    groups: dict[str, list[Finding]] = {}
    for f in d.symmetries:
        groups.setdefault(f.kind, []).append(f)
    for kind, group in groups.items():
        mark = "!" if group[0].pathological else "-"
        lines += _wrap(f"{kind.replace('_', ' ')}: {group[0].text}", "       ", f"     {mark} ")
        for f in group[:LISTED]:
            lines += _wrap(_finding(f), "           ", "         ")
        if len(group) > LISTED:
            rest = sum(f.directions for f in group[LISTED:])
            lines.append(f"         and {len(group) - LISTED} more with {rest:,} directions")
    return lines


def _finding(f: Finding) -> str:
    names = [str(unit) for unit in f.units]
    shown = ", ".join(names if len(names) <= 8 else [*names[:7], f"… ({len(names)})"])
    units = f"unit{'s' * (len(names) != 1)} {shown} of " if names else ""
    new = f", {f.adds:,} of them new" if f.adds is not None and f.adds < f.directions else ""
    return f"{units}{f.where}: {f.directions:,} null direction{'s' * (f.directions != 1)}{new}"


def _eigenvalues(d: Diagnosis) -> list[str]:
    e = d.eigenvalues
    verdict = f"largest between {e.largest:.3g} and {e.largest_upper:.3g}"
    if e.condition is not None:
        verdict = f"{e.largest:.3g} … {e.smallest_nonzero:.3g}, condition {e.condition:.1e}"
    lines = _section(None if e.condition is None else True, "Eigenvalues", verdict)
    error = f" ± {e.trace_stderr:.1g}" if e.trace_stderr else ""
    lines += _wrap(f"Trace {e.trace:.4g}{error}: the regularizer R of L-MAP, before λ.", "     ")
    if e.decades:
        zeros = d.parameters - sum(number for _, number in e.decades)
        shown = [f"1e{n}:\xa0{number:,}" for n, number in e.decades]
        shown = shown if len(shown) <= 14 else [*shown[:7], "…", *shown[-6:]]
        shown += [f"zero:\xa0{zeros:,}"] if zeros else []
        lines += _wrap("By decade: " + "  ".join(shown), "     ")
    return lines


def _jitters(d: Diagnosis) -> list[str]:
    rows = {row.name: row for row in d.jitters}
    advice = [
        f"ε {sign} {rows[name].jitter:.0e} for {what}"
        for name, sign, what in (("fs-map", "=", "exact FS-MAP"), ("l-map", "≥", "L-MAP"))
        if name in rows
    ]
    if not advice:
        return _section(None, "Jitter", "𝒥 is zero, no ε can be recommended")
    given = rows.get("given")
    error = 0.0 if given is None else given.error_bound if given.error is None else given.error
    lines = _section(error <= VALID, "Jitter", "recommended " + ", ".join(advice))
    if given is not None:
        holds = "holds" if error <= VALID else "does not hold"
        lines += _wrap(f"At ε = {given.jitter:.3g} the first-order form of L-MAP {holds}.", "     ")
    table = [["ε", "from", "λ_max/ε", "effective rank", "log det(I+𝒥/ε)", "first order", "error"]]
    table[0] += ["λ=1/(2εN)"] if d.jitters[0].lam is not None else []
    for row in d.jitters:
        known = [(row.effective, ".1f"), (row.log_det, ".5g"), (row.first_order, ".5g")]
        cells = [f"{row.jitter:.3g}", row.name, f"{row.ratio:.2g}"]
        cells += ["–" if value is None else format(value, form) for value, form in known]
        bound = "≤ " if row.error is None else ""
        relative = row.error_bound if row.error is None else row.error
        cells.append(bound + (f"{100 * relative:.2g} %" if relative < 10 else "> 10×"))
        table.append(cells + ([f"{row.lam:.2g}"] if row.lam is not None else []))
    return lines + _columns(table)


def _section(ok: bool | None, title: str, verdict: str) -> list[str]:
    return _wrap(f"[{MARKS[ok]}] {title}: {verdict}", "     ", "")


def _wrap(text: str, indent: str, first: str | None = None) -> list[str]:
    start = indent if first is None else first
    lines = textwrap.wrap(
        text, 98, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
    )
    return [line.replace("\xa0", " ") for line in lines]


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows]
    return [("     " + "  ".join(row)).rstrip() for row in cells]
