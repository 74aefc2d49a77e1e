"""A diagnosis as a page of plain text, at most 100 columns wide."""

from __future__ import annotations

from fsmap.assess.diagnosis import Diagnosis, Finding
from fsmap.assess.jitter import VALID, JitterRow
from fsmap.assess.words import columns, count, listed, number, percent, plural, seconds, size, wrap

MARKS = {True: "ok", False: "!!", None: "??"}  # a section's verdict
LISTED = 6  # lines of a list before it is cut


def page(d: Diagnosis) -> str:
    """The whole page.

    Args:
        d: A diagnosis.

    Returns:
        Lines; each section starts with a line that carries its verdict: ``[ok]``, ``[!!]`` or
        ``[??]``.
    """
    sections = [
        _head(d),
        _rank(d),
        _symmetries(d),
        _eigenvalues(d),
        _jitters(d),
        _costs(d),
        _notes(d),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(d: Diagnosis) -> list[str]:
    frozen = f" ({count(d.frozen)} frozen ones left out)" if d.frozen else ""
    facts = (
        f"P = {count(d.parameters)} parameters{frozen}, S = {count(d.points)} points, "
        f"K = {d.outputs} {plural(d.outputs, 'output')}; {d.mode} mode, examined in {d.precision}, "
        f"{seconds(d.seconds)}"
    )
    lines = [f"fsmap doctor: {d.module}", *wrap(facts, "  ")]
    return [*lines, "", *wrap(f"{d.verdict.upper()}: {d.summary}", "")]


def _section(ok: bool | None, title: str, verdict: str) -> list[str]:
    return wrap(f"[{MARKS[ok]}] {title}: {verdict}", "     ", first="")


def _rank(d: Diagnosis) -> list[str]:
    r, P = d.rank, d.parameters
    Q = d.points_used * d.outputs
    body: list[str] = []
    if r.rank is None:
        lines = _section(None, "Rank (Theorem 1)", "too large to be factorized; not computed")
    elif r.missing_rows:
        lines = _section(
            None,
            "Rank (Theorem 1)",
            f"{count(r.rank)} of at most {count(Q)} from {count(d.points_used)} points: "
            "too few to tell",
        )
        share = "All" if r.missing_rows == r.deficit else f"{count(r.missing_rows)} of the"
        body.append(
            f"{share} {count(r.deficit or 0)} zero eigenvalues are there for want of points. At "
            f"least {count(r.points_needed)} points are needed to see whether there are others."
        )
    elif r.deficit == 0:
        lines = _section(True, "Rank (Theorem 1)", f"full, {count(P)} of {count(P)}")
    else:
        lines = _section(
            d.verdict == "harmless",
            "Rank (Theorem 1)",
            f"{count(r.rank)} of {count(P)}: {count(r.deficit or 0)} null directions",
        )
        body.append(_explained(d))
    if r.deficit and not r.missing_rows and r.sure is False:
        body.append(
            "The eigenvalues fall smoothly into rounding, without a gap: which of them are zero in "
            f"exact arithmetic cannot be told (tolerance {r.tolerance:.0e})."
        )
    if r.grows is not None and r.sure is not False:
        body.append(_growth(r.grows))
    for text in body:
        lines += wrap(text, "     ")
    return lines + _null_vectors(d)


def _growth(grows: bool) -> str:
    if grows:
        return (
            "The second half of the points added to the rank: more points may add to it still "
            "(units that are active on few points look like this)."
        )
    return "The second half of the points added nothing to the rank: more of them will hardly help."


def _explained(d: Diagnosis) -> str:
    r = d.rank
    if not r.known_exactly or r.unexplained is None:
        return f"Known symmetries account for at most {count(r.known)} of them (they may overlap)."
    if r.unexplained == 0:
        return "All of them come from the symmetries below."
    if r.known == 0:
        return "None of them comes from a known symmetry."
    rest = count(r.unexplained)
    return f"{count(r.known)} come from the symmetries below, {rest} from none that is known."


def _null_vectors(d: Diagnosis) -> list[str]:
    if not d.null_vectors:
        return []
    left = d.rank.unexplained
    title = (
        "Null vectors outside of known symmetries:" if left else "Null vectors, the sparsest ones:"
    )
    lines = ["     " + title]
    for v in d.null_vectors:
        lines += wrap(v.text, "         ", first="       - ")
    return lines


def _symmetries(d: Diagnosis) -> list[str]:
    exact = [f for f in d.symmetries if not f.nearly]
    near = [f for f in d.symmetries if f.nearly]
    bad = [f for f in exact if f.pathological]
    if bad:
        verdict = (
            f"{len(bad)} pathological {plural(len(bad), 'finding')}, singular at these parameters"
        )
    elif any(f.pathological for f in near):
        verdict = "none exact, but these parameters are near a fixed point"
    elif exact:
        verdict = "only those that hold for all parameters, which do no harm"
    else:
        verdict = "none found"
    ok = not any(f.pathological for f in d.symmetries)
    lines = _section(ok, "Symmetries (Theorem 2)", verdict)
    groups: dict[tuple[str, bool], list[Finding]] = {}
    for f in [*exact, *near]:
        groups.setdefault((f.kind, f.nearly), []).append(f)
    for group in groups.values():
        lines += _kind(group)
    return lines + _near_twins(d)


def _kind(group: list[Finding]) -> list[str]:
    """One kind of symmetry: what it is, and where."""
    first = group[0]
    mark = "!" if first.pathological else "-"
    head = f"{first.kind.replace('_', ' ')}: {first.text}"
    lines = wrap(head, "       ", first=f"     {mark} ")
    for f in group[:LISTED]:
        lines += _finding(f)
    if len(group) > LISTED:
        rest = sum(f.directions for f in group[LISTED:])
        lines.append(f"         and {len(group) - LISTED} more with {count(rest)} directions")
    return lines


def _finding(f: Finding) -> list[str]:
    units = f"{plural(len(f.units), 'unit')} {listed(f.units)} of " if f.units else ""
    if f.nearly:
        size = f"nearly null, ‖Jv‖/‖v‖ = {f.residual:.0e} of the largest"
        if f.distance:
            size = f"relative distance {f.distance:.1g}; " + size
    else:
        size = f"{count(f.directions)} null {plural(f.directions, 'direction')}"
        if f.adds is not None and 0 < f.adds < f.directions:
            size += f", {count(f.adds)} of them new"
        elif f.adds == 0:
            size += ", none of them new"
    return wrap(f"{units}{f.where}: {size}", "           ", first="         ")


def _near_twins(d: Diagnosis) -> list[str]:
    apart = [p for p in d.closest if p.distance > 1e-12][:3]
    if not apart:
        return []
    told = "; ".join(f"{p.units[0]} and {p.units[1]} of {p.where}, {p.distance:.2g}" for p in apart)
    return wrap(f"Most similar units (relative distance; 0 is a fixed point): {told}", "     ")


def _eigenvalues(d: Diagnosis) -> list[str]:
    e = d.eigenvalues
    if e.condition is None:
        verdict = f"largest between {e.largest:.3g} and {e.largest_upper:.3g}"
    else:
        verdict = f"{e.largest:.3g} … {e.smallest_nonzero:.3g}, condition {e.condition:.1e}"
    lines = _section(None if e.condition is None else True, "Eigenvalues", verdict)
    error = f" ± {e.trace_stderr:.1g}" if e.trace_stderr else ""
    lines += wrap(f"Trace {e.trace:.4g}{error}: the regularizer R of L-MAP, before λ.", "     ")
    if e.decades:
        zeros = d.parameters - sum(number for _, number in e.decades)
        shown = [f"1e{n}:\xa0{count(number)}" for n, number in e.decades]
        shown = shown if len(shown) <= 14 else [*shown[:7], "…", *shown[-6:]]
        shown += [f"zero:\xa0{count(zeros)}"] if zeros else []
        lines += wrap("By decade: " + "  ".join(shown), "     ")
    return lines


def _jitters(d: Diagnosis) -> list[str]:
    rows = {row.name: row for row in d.jitters}
    if "l-map" not in rows:
        return _section(None, "Jitter", "𝒥 is zero, no ε can be recommended")
    told = []
    if "fs-map" in rows:
        told.append(f"ε = {rows['fs-map'].jitter:.0e} for exact FS-MAP")
    told.append(f"ε ≥ {rows['l-map'].jitter:.0e} for L-MAP")
    given = rows.get("given")
    ok = None if given is None else _error(given) <= VALID
    lines = _section(True if given is None else ok, "Jitter", "recommended " + ", ".join(told))
    if given is not None:
        word = "holds" if ok else "does not hold"
        least = "at most " if given.error is None else ""
        lines += wrap(
            f"At the given ε = {given.jitter:.3g} the first-order form of L-MAP {word}: λ_max/ε = "
            f"{given.ratio:.2g}, error {least}{percent(_error(given))}.",
            "     ",
        )
    table = [
        [
            "ε",
            "from",
            "λ_max/ε",
            "effective P",
            "log det(I+𝒥/ε)",
            "first order",
            "error",
            "λ=1/(2εN)",
        ]
    ]
    for row in d.jitters:
        table.append(
            [
                f"{row.jitter:.3g}",
                row.name,
                f"{row.ratio:.2g}",
                number(row.effective, ".1f"),
                number(row.log_det, ".5g"),
                number(row.first_order, ".5g"),
                percent(row.error) if row.error is not None else f"≤ {percent(row.error_bound)}",
                number(row.lam, ".2g"),
            ]
        )
    if all(row.lam is None for row in d.jitters):
        table = [line[:-1] for line in table]
    return lines + columns(table)


def _error(row: JitterRow) -> float:
    return row.error_bound if row.error is None else row.error


def _costs(d: Diagnosis) -> list[str]:
    fits = [c for c in d.costs if c.fits]
    lines = _section(
        bool(fits), "Cost of one value", f"log_det(method='auto') would pick {d.auto!r} here"
    )
    what = {
        "dense": "log det by the P×P matrix",
        "dual": "log det by the S·K×S·K matrix",
        "slq": "log det by Lanczos, estimated",
        "jvp": "trace, one probe (L-MAP)",
        "fd": "trace, one probe, two forward passes",
    }
    table = [["method", "time", "memory", "", "what"]]
    for c in d.costs:
        fit = "" if c.fits else "does not fit"
        table.append([c.method, seconds(c.seconds), size(c.bytes), fit, what[c.method]])
    if all(c.fits for c in d.costs):
        table = [[*line[:3], line[4]] for line in table]
    lines += columns(table)
    return lines + wrap(
        "Predicted, for these points; with the gradient about three times that.", "     "
    )


def _notes(d: Diagnosis) -> list[str]:
    if not d.notes and not d.unfollowed:
        return []
    lines = ["Notes"]
    for text in d.notes:
        lines += wrap(text, "       ", first="     - ")
    for text in d.unfollowed[:LISTED]:
        lines += wrap(f"not analyzed: {text}", "       ", first="     - ")
    if len(d.unfollowed) > LISTED:
        lines.append(f"     - and {len(d.unfollowed) - LISTED} more that were not analyzed")
    return lines
