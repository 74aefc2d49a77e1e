"""fsmap's methods for every kind of work; ratios are those of the first entry."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fsmap
from benchmarks.cells import JITTER, PROBES, Cell
from benchmarks.hutchpp import HutchPlusPlus
from fsmap.linalg.jacobian import Site
from fsmap.linalg.slq import Operator, build, by_passes, slq

Work = Callable[[], Tensor]


def log_det(cell: Cell) -> dict[str, Work]:
    f, params = fsmap.functional(cell.module)

    def by(method: str) -> Work:
        return lambda: fsmap.log_det(f, params, cell.x, jitter=JITTER, method=method)

    found = {"fsmap auto": by("auto")}
    if cell.P <= 2_000:
        found |= {f"fsmap {name}": by(name) for name in ("dense", "dual", "svd_clip", "pseudo")}
    return found | {"fsmap first_order": by("first_order")}


def log_det_by_lanczos(cell: Cell) -> dict[str, Work]:
    return {"fsmap slq": _slq(cell, build)}


def log_det_by_products(cell: Cell) -> dict[str, Work]:
    return {"fsmap slq, passes": _slq(cell, by_passes)}


def exact_trace(cell: Cell) -> dict[str, Work]:
    f, params = fsmap.functional(cell.module)
    return {"fsmap exact": lambda: fsmap.trace(f, params, cell.x, method="exact").value}


def trace(cell: Cell) -> dict[str, Work]:
    f, params = fsmap.functional(cell.module)

    def by(method: str, probes: int = PROBES) -> Work:
        return lambda: fsmap.trace(f, params, cell.x, method=method, probes=probes).value

    found = {f"fsmap {name}": by(name) for name in ("jvp", "vjp", "fd", "fd_central")}
    return found | {"hutch++, as many products": by(HutchPlusPlus.name, PROBES // 2)}


def _slq(cell: Cell, products: Callable[[Site], Operator]) -> Work:
    f, params = fsmap.functional(cell.module)
    eps = torch.tensor(JITTER, dtype=torch.float64, device=cell.x.device)
    site = Site(f, params, cell.x)
    return lambda: slq(site, eps, probes=PROBES, operator=products(site)).value
