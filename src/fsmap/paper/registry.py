"""Which experiments there are.

A module of this package that defines a subclass of :class:`Experiment` with an ``id`` is found by
itself. Everything an experiment needs to be written can be imported from here.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from types import MappingProxyType, ModuleType

from fsmap.errors import InputError, did_you_mean
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report.interactive import Curve, Frame, Interactive
from fsmap.paper.report.records import Claim, Row

__all__ = [
    # what an experiment is made of
    "Context",
    "Experiment",
    "Measured",
    # what it hands to the report
    "Claim",
    "Curve",
    "Frame",
    "Interactive",
    "Row",
    # which there are
    "GROUPS",
    "get",
    "registry",
]

GROUPS = {
    "closed-form": "Models with a closed form",
    "theory": "Statements without a figure",
    "networks": "Small networks",
    "uci": "UCI regression",
    "images": "Images",
}
"""Groups of experiments, in the order of the report."""

ORDER = """
    mixture-posterior mixture-bma fourier fourier-points fourier-pX fourier-noise reparam
    theory-metric theory-any-parameter theory-symmetry theory-flat theory-large-data
    logdet-mc laplacian-vs-logdet moons-eigs moons-solutions moons-pathology
    uci-table image-table image-S label-noise landscape laplacian-trace shift transfer
""".split()
"""Order within a group: that of the paper. An id that is not here comes last."""


def _modules() -> Iterable[ModuleType]:
    import fsmap.paper as package

    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def _classes(module: ModuleType) -> Iterable[type[Experiment]]:
    for item in vars(module).values():
        is_class = isinstance(item, type) and issubclass(item, Experiment)
        if is_class and item.id and item.__module__ == module.__name__:
            yield item


def _place(experiment: Experiment) -> tuple[int, int, str]:
    group = list(GROUPS).index(experiment.group)
    place = ORDER.index(experiment.id) if experiment.id in ORDER else len(ORDER)
    return group, place, experiment.id


@functools.cache
def registry() -> Mapping[str, Experiment]:
    """Find every experiment.

    Returns:
        Experiments by id, in the order of the report.

    Raises:
        InputError: If two experiments share an id.
    """
    found: dict[str, Experiment] = {}
    for module in _modules():
        for cls in _classes(module):
            if cls.id in found:
                other = type(found[cls.id]).__qualname__
                message = (
                    f"two experiments have the id {cls.id!r}: {other} and {cls.__qualname__}. "
                    "Rename one of them."
                )
                raise InputError(message)
            found[cls.id] = cls()
    return MappingProxyType({e.id: e for e in sorted(found.values(), key=_place)})


def get(name: str) -> Experiment:
    """Look an experiment up.

    Args:
        name: Its id.

    Returns:
        The experiment.

    Raises:
        InputError: If there is none of that name.
    """
    known = registry()
    if name in known:
        return known[name]
    lowered = {key.lower(): key for key in known}
    hint = did_you_mean(name.lower(), lowered, meaning=lowered)
    message = f"there is no experiment {name!r}.{hint} Known: {', '.join(known)}."
    raise InputError(message)
