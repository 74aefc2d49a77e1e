"""The page of ``fsmap report``: one file, made from folders of runs, that needs no network.

Everything on the page is computed from ``rows.jsonl`` and ``units.jsonl``: tables, claims and
pictures are made anew, and ``summary.json`` is not read.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import InputError
from fsmap.files import plain, write_whole
from fsmap.paper import rows as records
from fsmap.paper.engine import ROW_ERRORS, Experiment, coverage, registry, section
from fsmap.paper.report.figures import DARK, Interactive, style
from fsmap.paper.report.picture import VARIABLES, picture
from fsmap.paper.report.tables import MINUS, arranged, number, with_error
from fsmap.paper.rows import AGREES, NOT_TESTED, Content, Row, Rows, RunFolder, tally, verdict
from fsmap.progress import duration

TEMPLATE = Path(__file__).with_name("template")
SCRIPTS = ("theme", "page", "chart", "mixture")
TITLE = "Should we learn most likely functions or parameters?"
MADE_BY = "Made by <code>fsmap report</code>"  # at the end of every page
MAKE_ONE = "Make one with: fsmap run fourier --quick"


class Found(NamedTuple):
    """The rows of one run."""

    folder: Path
    id: str
    content: Content
    trouble: str  # why it cannot be shown; "" if it can

    @property
    def damage(self) -> str:
        """Why the run cannot be shown, and what to do."""
        if self.id not in registry():
            return f"{self.folder} is damaged, or of another version: {self.trouble}"
        header = self.content.header  # without it, nothing can be resumed
        again = _command(self.id, self.folder.parent, " --quick" * (header.get("size") == "quick"))
        todo = f"Restore a copy, or measure again with: {again} --{'resume' if header else 'force'}"
        return f"{self.folder} is damaged: {self.trouble}. {todo}"


def build(folders: Sequence[Path], out: Path) -> Path:
    """Write the page of some folders of runs (or of runs) to ``out/index.html``."""
    text = render(find_runs(folders))
    page = out / "index.html"
    try:
        if page.exists() and MADE_BY not in page.read_text("utf-8", "replace"):
            raise InputError(f"{page} is not a page of fsmap report. Choose another --out.")
        out.mkdir(parents=True, exist_ok=True)
        write_whole(page, text)
    except OSError as error:
        raise InputError(
            f"cannot write to {out}: {error.strerror}. Choose another folder with --out."
        ) from error
    return page


def find_runs(folders: Sequence[Path]) -> list[Found]:
    """Runs in some folders, each of which holds runs (``results``) or is one."""
    runs = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}. {MAKE_ONE}")
        names = ("units.jsonl", "summary.json")
        inside = {file.parent for name in names for file in folder.glob(f"*/{name}")}
        here = [folder] if any((folder / name).exists() for name in names) else []
        runs += [_read(path) for path in here + sorted(inside) if not path.name.startswith(".")]
    if not runs:
        raise InputError(f"no run in {', '.join(map(str, folders))}. {MAKE_ONE}")
    return runs


def _read(folder: Path) -> Found:
    try:
        content = RunFolder(folder).content()
    except OSError as error:
        content, trouble = Content({}, {}, [], [], 0), f"it cannot be read ({error.strerror})"
    else:
        trouble = "" if content.units else "no unit is finished"
        if not content.header:
            trouble = "units.jsonl is missing, or its first line does not match its checksum"
        elif content.damaged and not RunFolder(folder).rows_file.exists():
            trouble = "rows.jsonl is missing"
        elif content.damaged:
            units = ", ".join(content.damaged[:3]) + (" …" if len(content.damaged) > 3 else "")
            trouble = f"{len(content.damaged)} of its units do not match their checksum ({units})"
    name = content.header.get("experiment", folder.resolve().name)
    if not trouble and name not in registry():
        trouble = "this version of fsmap has no such experiment"
    return Found(folder, str(name), content, trouble)


def render(runs: Sequence[Found]) -> str:
    """The page's text."""
    place = runs[0].folder.parent
    by_id: dict[str, list[Found]] = {}
    # An intact run comes before a damaged one, full size before quick, then the first folder.
    runs = sorted(runs, key=lambda run: run.content.header.get("size") != "full")
    for run in sorted(runs, key=lambda run: bool(run.trouble)):
        by_id.setdefault(run.id, []).append(run)
    items = [view(e, by_id.pop(e.id, []), place) for e in registry().values()]
    for name, same in by_id.items():
        blank = _blank(name, name, "", "Other runs")
        items.append(blank | {"trouble": same[0].damage, "others": list(map(_other, same[1:]))})
    sections: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        sections.setdefault(item["section"], []).append(item)
    claims = [claim for item in items if not item["quick"] for claim in item["claims"]]
    counts = Counter((claim["source"], claim["verdict"]) for claim in claims)
    template = environment().get_template("page.html.j2")
    return template.render(
        title=TITLE,
        sections=sections,
        totals={s: {name: counts[s, name] for name in records.VERDICTS} for s in ("paper", "ours")},
        uncounted=Counter(filter(None, map(_uncounted, items))),
        live=next((item for item in items if item["live"]), None),
        theme=theme(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    )


def view(experiment: Experiment, runs: Sequence[Found], place: Path) -> dict[str, Any]:
    """Everything the template needs for one experiment; most of it is empty without a run."""
    item = _blank(experiment.id, experiment.label, experiment.title, section(experiment))
    item["departures"] = list(experiment.departures)
    item["command"] = _command(experiment.id, place)
    if not runs:
        return item
    run, *others = runs
    item["others"] = list(map(_other, others))
    if run.trouble:
        return item | {"trouble": run.damage}
    item["units"] = coverage(experiment, run.content.header, run.content.units)
    with style():
        return item | _measured(experiment, run, item["units"])


def _blank(name: str, label: str, title: str, heading: str) -> dict[str, Any]:
    lists = ("claims", "figures", "tables", "facts", "config", "departures", "others")
    texts = ("trouble", "units", "sentence", "finish", "command", "slider", "live", "seeds", "lost")
    return {
        **{"id": name, "label": label or name, "title": title, "section": heading},
        **dict.fromkeys((*texts, "headline", "quick"), ""),
        **{key: [] for key in lists},
        **dict.fromkeys(("verdict", "tally"), NOT_TESTED),
    }


def _uncounted(item: Mapping[str, Any]) -> str:
    """Why no claim of an item is in the totals; "" if they are."""
    if item["trouble"]:
        return "damaged"
    return "quick" if item["quick"] else "" if item["units"] else "not run"


def _command(name: str, out: Path, options: str = "") -> str:
    return f"fsmap run {name}{options} --out {shlex.quote(str(out))}"


def _other(run: Found) -> str:
    return run.damage if run.trouble else f"{run.folder}: {run.content.header['size']}"


def _measured(experiment: Experiment, run: Found, size: str) -> dict[str, Any]:
    """The entries that are computed from rows."""
    header, units, selecting = run.content.header, run.content.units, experiment.selecting
    rows = run.content.rows
    out, lost = run.folder.parent, list[str]()

    def part(name: str, make: Callable[[Rows], Any], empty: Any) -> Any:
        try:
            return make(rows)
        except ROW_ERRORS as error:
            lost.append(f"{name} cannot be made of these rows: {type(error).__name__}: {error}")
            return empty

    claims = [records.claim_entry(claim) for claim in part("claims", experiment.claims, [])]
    counted = records.judged(claims)
    pictures = [
        {"name": name, **picture(figure, f"{experiment.id}-{place}")._asdict()}
        for place, (name, figure) in enumerate(part("figures", experiment.draw, {}).items())
    ]
    slider = part("the slider", experiment.interactive, None)
    quick, command = header["size"] == "quick", _command(experiment.id, out)
    seeds = len({row.seed for row in rows if row.seed is not None})
    return {
        "quick": quick,
        "claims": [_claim(claim, command) for claim in claims],
        "verdict": _overall(counted),
        "tally": tally(counted).replace(" claims", "") if counted else "no claims",
        "headline": next((_claim(claim) for claim in counted), None),
        "seeds": max((c["seeds"] or 0 for c in counted), default=0) or seeds or None,
        "sentence": _sentence(experiment.see, counted),
        "figures": pictures,
        "slider": _slider(slider, experiment.id),
        "live": part("the live figure", experiment.live, None),
        "tables": arranged(part("the table", experiment.table, []), experiment.group),
        "command": _command(experiment.id, out, " --quick" * quick) + " --resume",
        "finish": "" if size == "full" else command + " --resume" * (not quick),
        "facts": _facts(experiment, rows, units, size),
        # without fields of the last --resume alone
        "config": [(k, number(v)) for k, v in header["config"].items() if k not in selecting],
        "departures": list(dict.fromkeys([*experiment.departures, *_departures(rows)])),
        "lost": "; ".join(lost),
    }


def _departures(rows: Sequence[Row]) -> list[str]:
    notes = [note for row in rows for note in row.deviations]
    fixed = [row.config for row in rows if row.method == "l-map" and not row.config.get("reg_nats")]
    strengths = {config["reg_strength"] for config in fixed if "reg_strength" in config}
    if len(strengths) == 1:
        notes.append(f"λ was not searched: L-MAP's is {strengths.pop():g} everywhere")
    return notes


def _overall(claims: Iterable[Mapping[str, Any]]) -> str:
    """One verdict for all claims: the worst; those that agree count if nothing else is there."""
    found = [verdict(claim) for claim in claims]
    order = (records.DIFFERS, "undecided", NOT_TESTED, AGREES)
    return next((v for v in order if v in found), NOT_TESTED)


def _sentence(see: str, claims: Sequence[Mapping[str, Any]]) -> str:
    """``see`` if all claims agree; else ``see`` with the number that agree."""
    if claims and all(verdict(claim) == AGREES for claim in claims):
        return see
    counted = tally(claims) if claims else "no claim was judged"
    return f"What to look for: {see} So far {counted}." if see else ""


def _claim(claim: Mapping[str, Any], command: str = "") -> dict[str, Any]:
    """A claim in texts; ``command`` runs its experiment in the folder of the rows."""
    ours, paper = (None if claim[k] is None else number(claim[k]) for k in ("ours", "paper"))
    ours = ours and re.sub(r"(?<![\w.])-(?=[\d.])", MINUS, re.sub(r"-(0\.0+\b)", r"\1", ours))
    effect = ""
    if claim["effect"] is not None:
        effect = with_error(claim["effect"], claim["stderr"])
        ours = None if claim["ours"] == claim["effect"] else ours
        # shown once; that of a ratio is a logarithm, and ours the factor
        effect = "" if effect in str(ours) or " times" in str(ours) else effect
    reason = claim["reason"]
    if command and reason == "no rows":
        reason = f"{command} --resume"
    elif command:  # in the folder of these rows
        reason = reason.replace(command.partition(" --out")[0] + " --resume", f"{command} --resume")
    texts = {"verdict": verdict(claim), "reason": reason}
    return {**claim, **texts, "ours": ours, "paper": paper, "effect": effect}


def _slider(slider: Interactive | None, name: str) -> dict[str, Any] | None:
    if slider is None:
        return None
    frames = [
        {**frame._asdict(), "curves": [curve._asdict() for curve in frame.curves]}
        for frame in slider.frames
    ]
    data = {"xlabel": slider.xlabel, "ylabel": slider.ylabel, "frames": frames}
    return {**slider._asdict(), "frames": frames, "id": f"{name}-slider", "data": data}


def _facts(
    experiment: Experiment, rows: Sequence[Row], units: Mapping[str, Any], size: str
) -> list[tuple[str, str]]:
    seconds = sum(unit["seconds"] for unit in units.values())
    facts = {"protocol": experiment.protocol, "size": size, "time": duration(seconds)}
    facts |= {name: records.origins(rows, name) for name in ("device", "torch", "commit")}
    facts["commit"] = re.sub(r"\b([0-9a-f]{7})[0-9a-f]+", r"\1", facts["commit"])
    facts["rows"] = number(len(rows))
    return [(name, value) for name, value in facts.items() if value]


def environment() -> Any:
    """The Jinja environment of the page, with autoescape."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters["embedded"] = embedded
    scripts = {name: (TEMPLATE / f"{name}.js").read_text("utf-8") for name in SCRIPTS}
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts.values())
    made.globals["scripts"] = scripts
    # of the Content-Security-Policy: these scripts run, and no others
    made.globals["policy"] = " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
    return made


def embedded(data: Any) -> str:
    """JSON that can stand inside a ``script`` element."""
    text = json.dumps(plain(data), ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def theme() -> dict[str, dict[str, str]]:
    """Colors of the figures as CSS variables, light and dark."""
    light = {VARIABLES[color]: color for color in DARK}
    return {"light": light, "dark": {VARIABLES[color]: dark for color, dark in DARK.items()}}
