"""Folders of runs → one page that works from a file, without a network."""

from __future__ import annotations

import base64
import datetime
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import CheckpointError, InputError, require
from fsmap.files import write_whole
from fsmap.paper.report.figures import COLORS, DARK, GRID, INK, MUTED, PAPER
from fsmap.paper.report.inline_svg import VARIABLES, Glyphs
from fsmap.paper.report.view import embedded, view
from fsmap.paper.rows import AGREES, DIFFERS, verdict
from fsmap.paper.run_folder import Run, read_run
from fsmap.progress import duration

TEMPLATE = Path(__file__).with_name("template")


class Entry(NamedTuple):
    """An experiment of the catalogue: its place on the page, and its name if it was not run."""

    id: str
    label: str = ""
    title: str = ""
    group: str = ""


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Finished runs in some folders.

    Args:
        folders: Each holds runs (``runs``, ``results``), or is one (``runs/fourier``).
    """
    runs = []
    for folder in folders:
        if not folder.is_dir():
            message = f"there is no folder {folder}. Make one with: fsmap run fourier --quick"
            raise InputError(message)
        inside = sorted(file.parent for file in folder.glob("*/summary.json"))
        here = [folder] if (folder / "summary.json").is_file() else []
        runs += [read_run(path) for path in here + inside if not path.name.startswith(".")]
    if not runs:
        places = ", ".join(map(str, folders))
        message = f"no finished run in {places}. Make one with: fsmap run fourier --quick"
        raise InputError(message)
    return runs


def build(folders: Sequence[Path], out: Path, catalogue: Sequence[Entry] = ()) -> Path:
    """Write the page.

    Returns:
        The page, ``out/index.html``.
    """
    text = render(find_runs(folders), catalogue)
    page = out / "index.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(page, text)
    except OSError as error:
        message = f"cannot write to {out}: {error.strerror}. Choose another folder with --out."
        raise InputError(message) from error
    return page


def render(runs: Sequence[Run], catalogue: Sequence[Entry]) -> str:
    """The page's text."""
    glyphs = Glyphs()
    by_id: dict[str, list[Run]] = {}
    for run in runs:
        by_id.setdefault(run.id, []).append(run)
    # A full-size run is worth more than a quick one; then the folder that was named first counts.
    best = {
        name: sorted(same, key=lambda r: r.summary["size"] != "full")
        for name, same in by_id.items()
    }
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in _ordered(best, catalogue):
        first, *others = best[entry.id]
        try:
            shown = view(first, others, glyphs)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            message = f"{first.folder} cannot be shown ({error!r}). Draw it again with --redraw."
            raise CheckpointError(message) from error
        groups.setdefault(entry.group, []).append(shown)
    text: str = (
        environment()
        .get_template("page.html.j2")
        .render(
            title="fsmap report: most likely functions or parameters?",
            groups=groups,
            totals=_totals([same[0] for same in best.values()]),
            missing=[entry for entry in catalogue if entry.id not in best],
            glyphs=glyphs.markup(),
            theme=theme(),
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        )
    )
    return text


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
    scripts = {name: (TEMPLATE / f"{name}.js").read_text() for name in ("theme", "page", "chart")}
    made.globals["scripts"] = scripts
    made.globals["policy"] = " ".join(map(_allowed, scripts.values()))
    return made


def _allowed(script: str) -> str:
    """The entry of a Content-Security-Policy that lets this script run, and no other."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _ordered(runs: Mapping[str, Sequence[Run]], catalogue: Sequence[Entry]) -> list[Entry]:
    known = [entry for entry in catalogue if entry.id in runs]
    names = {entry.id for entry in known}
    return known + [Entry(name, group="Other runs") for name in runs if name not in names]


def _totals(runs: Sequence[Run]) -> dict[str, Any]:
    failed = [
        {"id": run.id, "label": run.summary.get("label", ""), "claim": claim["claim"]}
        for run in runs
        for claim in run.summary["claims"]
        if verdict(claim) == DIFFERS
    ]

    def distinct(key: str) -> list[str]:
        """Each one once; a run that was made in pieces may name several."""
        named = (str(run.summary[key]).split(", ") for run in runs if run.summary.get(key))
        return list(dict.fromkeys(itertools.chain.from_iterable(named)))

    return {
        "experiments": len(runs),
        "quick": sum(run.summary["size"] == "quick" for run in runs),
        "claims": sum(len(run.summary["claims"]) for run in runs),
        "held": sum(run.verdicts.count(AGREES) for run in runs),
        "failed": failed,
        "time": duration(sum(float(run.summary.get("seconds", 0)) for run in runs)),
        "devices": distinct("device"),
        "torch": distinct("torch"),
        "commits": distinct("commit"),
    }


def theme() -> dict[str, dict[str, str]]:
    """Colors of the figures as CSS variables, light and dark."""
    colors = (INK, MUTED, GRID, PAPER, *(COLORS[m] for m in ("ps-map", "fs-map", "l-map", "bma")))
    light = {VARIABLES[color]: color for color in colors}
    return {"light": light, "dark": {VARIABLES[color]: DARK[color] for color in colors}}
