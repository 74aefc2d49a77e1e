"""Folders of runs → one page that works from a file, without a network.

Everything on the page is computed from ``rows.jsonl`` and ``units.jsonl``: tables, claims and
pictures are made anew, and ``summary.json`` is not read.
"""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import FsmapError, InputError, require
from fsmap.files import write_whole
from fsmap.paper.experiment import Experiment, coverage, registry, section
from fsmap.paper.report.figures import COLORS, DARK, GRID, INK, MUTED, PAPER, Interactive, style
from fsmap.paper.report.picture import METHODS, VARIABLES, Glyphs, picture
from fsmap.paper.report.tables import Layout, arranged, number, with_error
from fsmap.paper.rows import (
    AGREES,
    DIFFERS,
    NOT_TESTED,
    VERDICTS,
    Content,
    Row,
    claim_entry,
    plain,
    read_content,
    tally,
    verdict,
)
from fsmap.progress import duration

TEMPLATE = Path(__file__).with_name("template")
SCRIPTS = ("theme", "page", "chart", "mixture")
TITLE = "Should we learn most likely functions or parameters?"

LONG_TABLE = 12
"""Lines; a longer table is folded, unless it is a table of the paper's."""

TROUBLE = (FsmapError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What drawing and judging may raise if rows are missing or of an older version."""


class Found(NamedTuple):
    """The rows of one run."""

    folder: Path
    id: str
    content: Content
    trouble: str  # why it cannot be shown; "" if it can

    @property
    def full(self) -> bool:
        """Whether it is of full size; parts of it may be missing."""
        return self.content.header.get("size") == "full"


def build(folders: Sequence[Path], out: Path) -> Path:
    """Write the page of some folders of runs (or of runs) to ``out/index.html``."""
    text = render(find_runs(folders))
    page = out / "index.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(page, text)
    except OSError as error:
        message = f"cannot write to {out}: {error.strerror}. Choose another folder with --out."
        raise InputError(message) from error
    return page


def find_runs(folders: Sequence[Path]) -> list[Found]:
    """Runs in some folders, each of which holds runs (``results``) or is one."""
    runs = []
    for folder in folders:
        if not folder.is_dir():
            message = f"there is no folder {folder}. Make one with: fsmap run fourier --quick"
            raise InputError(message)
        names = ("units.jsonl", "summary.json")
        inside = {file.parent for name in names for file in folder.glob(f"*/{name}")}
        here = [folder] if any((folder / name).exists() for name in names) else []
        runs += [_read(path) for path in here + sorted(inside) if not path.name.startswith(".")]
    if not runs:
        places = ", ".join(map(str, folders))
        message = f"no run in {places}. Make one with: fsmap run fourier --quick"
        raise InputError(message)
    return runs


def _read(folder: Path) -> Found:
    try:
        content = read_content(folder)
    except OSError as error:
        content, trouble = Content({}, {}, [], [], 0), f"it cannot be read ({error.strerror})"
    else:
        trouble = ""
        if not content.header:
            trouble = "units.jsonl is missing, or its first line does not match its checksum"
        elif content.damaged:
            units = ", ".join(content.damaged[:3]) + (" …" if len(content.damaged) > 3 else "")
            trouble = f"{len(content.damaged)} units do not match their checksum ({units})"
        elif not content.units:
            trouble = "no unit is finished"
    name = content.header.get("experiment", folder.resolve().name)
    if not trouble and name not in registry():
        trouble = "this version of fsmap has no such experiment"
    return Found(folder, str(name), content, trouble)


def render(runs: Sequence[Found]) -> str:
    """The page's text."""
    glyphs = Glyphs()
    by_id: dict[str, list[Found]] = {}
    # An intact run comes before a damaged one, full size before quick, then the first folder.
    for run in sorted(runs, key=lambda run: (bool(run.trouble), not run.full)):
        by_id.setdefault(run.id, []).append(run)
    items = [view(e, by_id.pop(e.id, []), glyphs) for e in registry().values()]
    items += [unknown(name, same) for name, same in by_id.items()]
    sections: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        sections.setdefault(item["section"], []).append(item)
    shown = [item for item in items if not item["trouble"] and item["units"]]
    text: str = (
        environment()
        .get_template("page.html.j2")
        .render(
            title=TITLE,
            sections=sections,
            totals=totals(shown),
            live=next((item for item in shown if item["live"]), None),
            glyphs=glyphs.markup(),
            theme=theme(),
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        )
    )
    return text


def view(experiment: Experiment, runs: Sequence[Found], glyphs: Glyphs) -> dict[str, Any]:
    """Everything the template needs for one experiment; most of it is empty without a run."""
    item = _blank(experiment.id, experiment.label, experiment.title, section(experiment))
    item["departures"] = list(experiment.departures)
    item["command"] = f"fsmap run {experiment.id}"
    if not runs:
        return item
    run, *others = runs
    item["others"] = [_other(other) for other in others]
    if run.trouble:
        return {**item, "trouble": _damaged(run)}
    rows = [line.row for line in run.content.lines]
    header = run.content.header
    size = coverage(experiment, header, run.content.units)
    item["units"] = size
    try:
        with style():
            return item | _measured(experiment, rows, run, glyphs)
    except TROUBLE as error:
        reason = f"its rows ({size}) cannot be drawn: {type(error).__name__}: {error}"
        return {**item, "trouble": f"{run.folder}: {reason}"}


def _blank(name: str, label: str, title: str, heading: str) -> dict[str, Any]:
    lists = ("claims", "checks", "figures", "tables", "facts", "config", "departures", "others")
    about = {"id": name, "label": label or name, "title": title, "section": heading}
    texts = dict.fromkeys(("trouble", "units", "sentence", "finish", "command"), "")
    return {
        **about,
        **texts,
        **{key: [] for key in lists},
        **{"slider": None, "live": None, "seeds": None, "headline": None, "quick": False},
        "verdict": NOT_TESTED,
        "tally": NOT_TESTED,
    }


def unknown(name: str, runs: Sequence[Found]) -> dict[str, Any]:
    """A run of which nothing can be shown but its name."""
    item = _blank(name, name, "", "Other runs")
    return {**item, "trouble": _damaged(runs[0]), "others": [_other(run) for run in runs[1:]]}


def _damaged(run: Found) -> str:
    again = f"fsmap run {run.id} --out {shlex.quote(str(run.folder.parent))} --resume"
    return f"{run.folder} is damaged: {run.trouble}. Restore a copy, or measure again with: {again}"


def _other(run: Found) -> str:
    return _damaged(run) if run.trouble else f"{run.folder}: {run.content.header['size']}"


def _measured(
    experiment: Experiment, rows: Sequence[Row], run: Found, glyphs: Glyphs
) -> dict[str, Any]:
    """What is computed from rows."""
    header, units = run.content.header, run.content.units
    size = coverage(experiment, header, units)
    claims = [claim_entry(claim) for claim in experiment.claims(rows)]
    stated = [c for c in claims if c["source"] != "check"]
    judged = [c for c in stated if c["source"] == "paper"] or stated
    pictures = [
        {"name": name, **picture(figure, f"{experiment.id}-{place}", glyphs)._asdict()}
        for place, (name, figure) in enumerate(experiment.draw(rows).items())
    ]
    out = shlex.quote(str(run.folder.parent))
    again = f"fsmap run {experiment.id}{' --quick' * (header['size'] == 'quick')} --out {out}"
    seeds = len({row.seed for row in rows if row.seed is not None})
    tables = arranged(experiment.table(rows), experiment.group)
    said = [note for row in rows for note in row.deviations]
    strengths = {r.value for r in rows if r.metric == "reg_strength" and r.method == "l-map"}
    if len(strengths) == 1:
        said.append(f"λ was not searched: L-MAP's is {strengths.pop():g} everywhere")
    return {
        "quick": header["size"] == "quick",
        "claims": [_claim(claim) for claim in stated],
        "checks": [_claim(c) for c in claims if c["source"] == "check"],
        "verdict": _overall(judged),
        "tally": tally(judged).replace(" claims", "") if judged else "no claims",
        "headline": _claim(judged[0]) if judged else None,
        "seeds": max((c["seeds"] or 0 for c in judged), default=0) or seeds or None,
        "sentence": _sentence(experiment.see, judged),
        "figures": pictures,
        "slider": _slider(experiment.interactive(rows), experiment.id, glyphs),
        "live": experiment.live(rows),
        "tables": [_folded(t, experiment.label) for t in tables if t.lines],
        "command": again,
        "finish": "" if size == "full" else _finish(experiment, header, out),
        "facts": _facts(experiment, rows, units, size),
        "config": [(key, number(value)) for key, value in (header["config"] or {}).items()],
        "departures": list(dict.fromkeys([*experiment.departures, *said])),
    }


def _finish(experiment: Experiment, header: Mapping[str, Any], out: str) -> str:
    """The command that measures what is missing of the paper's protocol."""
    full = header["size"] == "full"
    return f"fsmap run {experiment.id}" + (f" --out {out} --resume" if full else "")


def _overall(claims: Iterable[Mapping[str, Any]]) -> str:
    """One verdict for all claims: the worst; those that agree count if nothing else is there."""
    found = [verdict(claim) for claim in claims]
    return next((v for v in (DIFFERS, "undecided", NOT_TESTED, AGREES) if v in found), NOT_TESTED)


def _sentence(see: str, claims: Sequence[Mapping[str, Any]]) -> str:
    """What to see, if the rows show it; else how much of it they show."""
    if claims and all(verdict(claim) == AGREES for claim in claims):
        return see
    counted = tally(claims) if claims else "no claim was judged"
    return f"These rows do not show all of the following ({counted}): {see}" if see else ""


def _claim(claim: Mapping[str, Any]) -> dict[str, Any]:
    ours, paper = (None if claim[k] is None else number(claim[k]) for k in ("ours", "paper"))
    effect = ""
    if claim["effect"] is not None:
        effect = with_error(claim["effect"], claim["stderr"])
        ours = None if claim["ours"] == claim["effect"] else ours
        effect = "" if effect in str(ours) else effect  # said once
    texts = {"claim": claim["claim"], "reason": claim["reason"], "source": claim["source"]}
    return {
        **texts,
        "seeds": claim["seeds"],
        "verdict": verdict(claim),
        "ours": ours,
        "paper": paper,
        "effect": effect,
    }


def _slider(slider: Interactive | None, name: str, glyphs: Glyphs) -> dict[str, Any] | None:
    if slider is None:
        return None
    frames = []
    for place, frame in enumerate(slider.frames):
        curves = [curve._asdict() for curve in frame.curves]
        shown: dict[str, Any] = {"label": frame.label, "note": frame.note, "curves": curves}
        if frame.figure is not None:
            shown |= picture(frame.figure, f"{name}-slider-{place}", glyphs)._asdict()
        frames.append(shown)
    about = {**slider._asdict(), "frames": frames, "id": f"{name}-slider"}
    drawn = any(frame["curves"] for frame in frames)
    data = {key: about[key] for key in ("xlabel", "ylabel", "frames")}
    return {**about, "data": data if drawn else None}


def _folded(layout: Layout, label: str) -> dict[str, Any]:
    long = len(layout.lines) > LONG_TABLE and not label.startswith("Table")
    return {**layout._asdict(), "fold": long or bool(layout.name)}


def _facts(
    experiment: Experiment, rows: Sequence[Row], units: Mapping[str, Any], size: str
) -> list[tuple[str, str]]:
    def distinct(name: str) -> str:
        return ", ".join(dict.fromkeys(getattr(row, name) for row in rows))

    facts = {
        "protocol": experiment.protocol,
        "size": size,
        "device": distinct("device"),
        "time": duration(sum(unit["seconds"] for unit in units.values())),
        "torch": distinct("torch"),
        "commit": distinct("commit"),
        "rows": number(len(rows)),
    }
    return [(name, value) for name, value in facts.items() if value]


def totals(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many experiments, and verdicts of the paper's claims and of ours."""

    def count(source: str) -> dict[str, int]:
        claims = [c for item in items for c in item["claims"] if c["source"] == source]
        found = Counter(claim["verdict"] for claim in claims)
        return {name: found[name] for name in VERDICTS}

    sizes = Counter(
        "quick" if i["quick"] else "full" if i["units"] == "full" else "part" for i in items
    )
    return {
        "experiments": len(items),
        "sizes": sizes,
        "paper": count("paper"),
        "ours": count("ours"),
    }


@functools.cache
def _scripts() -> dict[str, str]:
    return {name: (TEMPLATE / f"{name}.js").read_text() for name in SCRIPTS}


def environment() -> Any:
    """Where the page's templates are, with everything escaped."""
    jinja2 = require("jinja2", extra="report")
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters["embedded"] = embedded
    made.globals["scripts"] = _scripts()
    made.globals["policy"] = " ".join(map(_allowed, _scripts().values()))
    return made


def _allowed(script: str) -> str:
    """The entry of a Content-Security-Policy that lets this script run, and no other."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def embedded(data: Any) -> str:
    """JSON that can stand inside a ``script`` element."""
    text = json.dumps(plain(data), ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def theme() -> dict[str, dict[str, str]]:
    """Colors of the figures as CSS variables, light and dark."""
    colors = (INK, MUTED, GRID, PAPER, *(COLORS[method] for method in METHODS))
    light = {VARIABLES[color]: color for color in colors}
    return {"light": light, "dark": {VARIABLES[color]: DARK[color] for color in colors}}
