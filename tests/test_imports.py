"""Imports point one way, the core stands on torch, numpy and safetensors alone, and stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import fsmap

ROOT = Path(fsmap.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A part may import itself and what stands to its left.
CHAIN = (
    *("errors", "types", "files", "progress", "functional", "linalg", "px", "objective"),
    *("lmap", "metrics"),
    *("train", "images", "assess", "paper", "cli"),
)
FOUNDATION = {"errors", "types", "files"}
BESIDE_THE_CHAIN = {"data": FOUNDATION, "models": FOUNDATION}
CORE = {*CHAIN[: CHAIN.index("assess") + 1], "doctor"}
ALLOWED = {part: set(CHAIN[: place + 1]) for place, part in enumerate(CHAIN)}
for part in ("train", "images", "assess", "paper", "cli"):
    ALLOWED[part] |= {"data", "models"}
ALLOWED |= {part: below | {part} for part, below in BESIDE_THE_CHAIN.items()}
ALLOWED["tables"] = ALLOWED["assess"] | {"tables"}
ALLOWED["paper"] |= {"tables"}  # the page of `fsmap fit`
ALLOWED["integrations"] = ALLOWED["train"] | {"integrations", "tables"}  # sklearn
ALLOWED["doctor"] = ALLOWED["linalg"] | {"doctor"}
ALLOWED["cli"] |= {"doctor", "tables"}
# Aliased to the top level: `fsmap.metric`.
ALLOWED["metric"] = ALLOWED["linalg"]
ALLOWED["__main__"] = {"cli"}
ALLOWED["__init__"] = CORE | {"data", "models", "px", "metric"}

HARD_DEPENDENCIES = {"torch", "numpy", "safetensors"}
# Used where they are there, with a twin that needs nothing.
WHERE_INSTALLED = {"progress.py": {"rich"}}
OPTIONAL = {
    *("rich", "sklearn", "matplotlib", "pandas", "scipy", "pyro", "PIL", "jinja2"),
    *("lightning", "transformers", "accelerate"),
}


def part_of(file: Path) -> str:
    """The part of the package a file belongs to: its folder, or its name at the top level."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST, file: Path) -> Iterator[str]:
    """Every module imported anywhere in the tree; ``from fsmap import x`` counts as ``fsmap.x``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert not node.level, f"{file} has a relative import"
            if module == "fsmap":
                yield from (f"fsmap.{alias.name}" for alias in node.names)
            else:
                yield module


def on_import(node: ast.AST) -> Iterator[ast.stmt]:
    """The import statements that run on import: not in functions, not under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from on_import(child)


def third_party(modules: Iterator[str]) -> set[str]:
    tops = {module.partition(".")[0] for module in modules}
    return tops - set(sys.stdlib_module_names) - {"fsmap", "__future__"}


def wrong_imports(source: str, file: Path) -> set[str]:
    """The parts of fsmap that this file imports and should not."""
    names = imports(ast.parse(source), file)
    parts = {name.split(".")[1] for name in names if name.startswith("fsmap.")}
    return {p for p in parts if p != "__version__"} - ALLOWED[part_of(file)]


def foreign(tree: ast.AST, file: Path) -> set[str]:
    """What is imported in the tree and is neither ours, nor a hard dependency, nor excused."""
    excuses = [names for place, names in WHERE_INSTALLED.items() if file.match(place)]
    return third_party(imports(tree, file)) - HARD_DEPENDENCIES.union(*excuses)


def offenders(find: Callable[[Path], set[str]], files: Iterable[Path]) -> dict[str, list[str]]:
    """What ``find`` finds in each file, by the file's name; files without findings are left out."""
    found = {file.relative_to(ROOT).as_posix(): sorted(find(file)) for file in files}
    return {name: findings for name, findings in found.items() if findings}


def test_every_part_has_its_place():
    """A new part needs a place here and in docs/develop/design.md."""
    assert {part_of(file) for file in FILES} <= set(ALLOWED)


def test_imports_point_one_way():
    assert offenders(lambda file: wrong_imports(file.read_text(), file), FILES) == {}


def test_the_core_imports_only_its_hard_dependencies():
    core = [file for file in FILES if part_of(file) in CORE]
    assert offenders(lambda file: foreign(ast.parse(file.read_text()), file), core) == {}


def test_extras_are_imported_where_they_are_used():
    """Inside the function, by fsmap.errors.require; only facades subclass what is foreign."""
    files = [file for file in FILES if part_of(file) != "integrations"]

    def find(file: Path) -> set[str]:
        return foreign(ast.Module([*on_import(ast.parse(file.read_text()))], []), file)

    assert offenders(find, files) == {}


@pytest.mark.parametrize(
    ("source", "where", "wrong"),
    [
        ("def late():\n    import fsmap.cli", "paper/report/page.py", {"cli"}),
        ("from fsmap.linalg import logdet", "objective/geometry.py", set()),
    ],
)
def test_the_rule_itself(source: str, where: str, wrong: set[str]):
    assert wrong_imports(source, ROOT / where) == wrong


def loaded_after(statement: str) -> set[str]:
    """Names of the modules in a fresh interpreter after a statement."""
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    run = [sys.executable, "-c", code]
    answer = subprocess.run(run, capture_output=True, text=True, check=True, timeout=100)
    return {name.partition(".")[0] for name in json.loads(answer.stdout.splitlines()[-1])}


def test_importing_fsmap_imports_nothing_optional():
    """Whatever torch, numpy and safetensors pull in by themselves is not ours to count."""
    ours = loaded_after("import fsmap")
    theirs = loaded_after("import torch, numpy, safetensors.torch")
    extra = ours - theirs - set(sys.stdlib_module_names) - {"fsmap"}
    assert not {name for name in extra if not name.startswith(("_", "fsmap"))}
    assert not (ours - theirs) & OPTIONAL
