"""Hutch++ beside plain probes at equal cost: ``python -m benchmarks.hutchpp``.

Cost is counted in products with J or Jᵀ: R probes of ``jvp`` are R, R of Hutch++ are 2R (each takes
one, and half of them two more). Errors are root mean squares of R/Tr 𝒥 − 1 over seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import fsmap
from benchmarks import cells
from fsmap.functional import ravel, unravel
from fsmap.linalg.estimators import Jvp, Probes, register
from fsmap.linalg.jacobian import Site, jvp, vjp
from fsmap.linalg.probes import Source
from fsmap.types import Estimate

RESULTS = Path(__file__).parent / "results" / "hutchpp.jsonl"
COSTS = (4, 8, 16, 32)


@register
@dataclass(frozen=True)
class HutchPlusPlus(Jvp):
    """Half the probes span the largest part of 𝒥, whose trace is exact; half estimate the rest."""

    name: ClassVar[str] = "hutch++"
    adaptive: ClassVar[bool] = True

    def draw(self, source: Source, site: Site, num: int) -> Probes:
        """Scaled so that the mean of ‖Jψ‖² over the probes is the estimate."""
        psi = source.psi(site.params, num)
        flat = torch.cat([p.flatten(1) for p in psi.values()], dim=1)  # [R, P]
        k = num // 2
        if k == 0:
            return psi
        Q = torch.linalg.qr(products(site, flat[:k]).mT).Q  # [P, k]
        rest = flat[k:] - (flat[k:] @ Q) @ Q.mT
        scaled = torch.cat([math.sqrt(num) * Q.mT, math.sqrt(num / (num - k)) * rest])
        return unravel(scaled, site.params)

    def combine(self, values: Tensor) -> Estimate:
        """Only the second half has an error."""
        random = values[len(values) // 2 :]
        return Estimate(values.mean(), super().combine(random).stderr * len(random) / len(values))


@torch.no_grad()
def products(site: Site, vectors: Tensor) -> Tensor:
    """𝒥v = JᵀgJv of several vectors ``[k, P]``: two products with J each."""
    f, params, x, _ = site
    out, transpose, _ = vjp(f, params, x)
    whiten = site.resolve(out)
    rows = [whiten.rows(jvp(f, params, x, unravel(v, params))[1]) for v in vectors]
    return torch.stack([ravel(transpose(whiten.adjoint(u))) for u in rows])


def trained(K: int, width: int = 64, steps: int = 600) -> tuple[nn.Module, Tensor]:
    """A ReLU classifier of K Gaussian clusters in 20 dimensions, and 64 of its training points."""
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, K, (1000,), generator=generator)
    centers = 2 * torch.randn(K, 20, generator=generator, dtype=torch.float64)
    x = centers[y] + torch.randn(1000, 20, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    body = (nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    net = nn.Sequential(*body, nn.Linear(width, K)).double()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(steps):
        rows = torch.randint(0, 1000, (128,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    return net, x[:64]


def networks() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Networks at initial parameters, and trained ones with few and many outputs."""
    for name in ("mlp-1e3", "mlp-1e5", "cnn"):
        cell = cells.cell(name, 256, dtype=torch.float64)
        yield name, cell.module, cell.x
    for K in (2, 10, 50):
        yield f"trained-{K}", *trained(K)


@torch.no_grad()
def errors(
    module: nn.Module, x: Tensor, costs: tuple[int, ...] = COSTS, seeds: int = 40
) -> Iterator[dict[str, float]]:
    """Relative errors of both at each cost."""
    f, params = fsmap.functional(module)
    exact = fsmap.trace(f, params, x, method="exact").value

    def error(method: str, probes: int) -> float:
        total = 0.0
        for seed in range(seeds):
            source = torch.Generator().manual_seed(seed)
            found = fsmap.trace(f, params, x, method=method, probes=probes, generator=source)
            total += float(found.value / exact - 1) ** 2
        return math.sqrt(total / seeds)

    for cost in costs:
        yield {"products": cost, "jvp": error("jvp", cost), "hutch++": error("hutch++", cost // 2)}


def main() -> None:
    """Measure, print and write."""
    print(f"{'network':12} {'K':>3} {'products':>8} {'jvp':>8} {'hutch++':>8}")
    rows = []
    for name, module, x in networks():
        K = module(x[:1]).numel()
        for row in errors(module, x):
            rows.append({"network": name, "K": K, **row})
            numbers = f"{row['products']:8} {row['jvp']:8.4f} {row['hutch++']:8.4f}"
            print(f"{name:12} {K:3} {numbers}", flush=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
