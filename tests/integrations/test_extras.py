"""An integration whose package is not installed says which command installs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fsmap.integrations

OPTIONAL = (
    *("sklearn", "pandas", "PIL", "scipy", "matplotlib", "jinja2", "rich", "pyro"),
    *("lightning", "transformers", "accelerate"),
)
EXPECTED = {  # the package that is named, and the extra that brings it
    "lightning": ("lightning", "lightning"),
    "sklearn": ("sklearn", "data"),
    "transformers": ("accelerate", "transformers"),
}
SCRIPT = """
import importlib, json, sys
from fsmap.errors import MissingExtraError
optional, modules = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(optional))  # None: cannot be imported
said = {}
for name in modules:
    try:
        importlib.import_module(f"fsmap.integrations.{name}")
        said[name] = None
    except MissingExtraError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def test_every_module_names_its_extra():
    folder = Path(fsmap.integrations.__file__).parent
    modules = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    command = [sys.executable, "-c", SCRIPT, json.dumps([OPTIONAL, modules])]
    said = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert said == {
        name: wanted
        and f"this needs {wanted[0]!r}, which is not installed. "
        f"Install it with: pip install 'fsmap[{wanted[1]}]'"
        for name, wanted in EXPECTED.items()
    }
