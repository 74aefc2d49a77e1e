"""The matrix {precision} × {BatchNorm} × {accumulation} × {processes}, and its slow definition.

With BatchNorm the definition is per micro-batch: what is averaged over micro-batches and ranks is
each one's own loss + λR, normalized by its own joint batch. Without it R is that of the
evaluation points alone.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fsmap
from fsmap.px import Stream

B, S, LAM, SEED = 4, 3, 0.05, 5
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16 autocast": torch.float32}


class Cell(NamedTuple):
    """One place of the matrix."""

    precision: str
    bn: bool
    accumulation: int
    processes: int

    def __str__(self) -> str:
        norm = "BatchNorm" if self.bn else "no BatchNorm"
        return f"{self.precision}, {norm}, {self.accumulation} micro, {self.processes} processes"


def cells(processes: int) -> list[Cell]:
    """All cells for so many processes."""
    return [
        Cell(precision, bn, accumulation, processes)
        for precision in DTYPES
        for bn in (False, True)
        for accumulation in (1, 4)
    ]


def network(bn: bool) -> nn.Sequential:
    """A small network with parameters of order one, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4) if bn else nn.Identity()
        net = nn.Sequential(nn.Linear(2, 4), norm, nn.GELU(), nn.Linear(4, 3)).double()
        if bn:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)
    return net


def px(n: int, generator: torch.Generator) -> Tensor:
    """Evaluation points that are the same numbers in every precision."""
    return torch.randn(n, 2, generator=generator, dtype=torch.float64)


def micro_batch(rank: int, micro: int) -> tuple[Tensor, Tensor]:
    """Training points of one micro-batch of one rank."""
    g = torch.Generator().manual_seed(100 + 10 * rank + micro)
    x = torch.randn(B, 2, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 3, (B,), generator=g)


def run(cell: Cell, rank: int = 0) -> dict[str, Tensor]:
    """What the library gives: gradients of the second optimizer step, and the mean of R."""
    dtype = DTYPES[cell.precision]
    net = network(cell.bn).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    lm = fsmap.LMAP(net, px, num_points=S, seed=SEED).attach(optimizer)
    model = DistributedDataParallel(lm) if cell.processes > 1 else lm
    values = []
    for _ in range(2):
        optimizer.zero_grad()
        values.clear()
        for micro in range(cell.accumulation):
            x, y = micro_batch(rank, micro)
            last = micro == cell.accumulation - 1
            with contextlib.nullcontext() if last or model is lm else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, "autocast" in cell.precision):
                    out, R = model(x.to(dtype))
                    loss = F.cross_entropy(out.to(dtype), y) + LAM * R
                (loss / cell.accumulation).backward()
            values.append(R.detach())
        optimizer.step()
    grads = {n: p.grad.double() for n, p in net.named_parameters()}
    return {**grads, "R": torch.stack(values).double().mean()}


def forward_slow(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network written out, BatchNorm by its formula."""
    h = x @ params["0.weight"].mT + params["0.bias"]
    if "1.weight" in params:
        mean = h.mean(0)
        variance = ((h - mean) ** 2).mean(0)
        h = (h - mean) / (variance + 1e-5).sqrt() * params["1.weight"] + params["1.bias"]
    h = 0.5 * h * (1 + torch.erf(h / 2**0.5))
    return h @ params["3.weight"].mT + params["3.bias"]


def objective_slow(params: dict[str, Tensor], cell: Cell) -> tuple[Tensor, Tensor]:
    """Loss + λR and R, averaged over ranks and micro-batches; J by one backward pass a number."""
    from tests.oracles import laplacian_slow

    losses, values = [], []
    psi = {n: p[0] for n, p in Stream(SEED, 1).psi(params).items()}
    for rank in range(cell.processes):
        for micro in range(cell.accumulation):
            x, y = micro_batch(rank, micro)
            points = px(S, Stream(SEED, 1, rank, micro).points())
            both = torch.cat([x, points])
            value = laplacian_slow(forward_slow, params, both if cell.bn else points, psi)
            losses.append(F.cross_entropy(forward_slow(params, both)[:B], y) + LAM * value)
            values.append(value)
    return torch.stack(losses).mean(), torch.stack(values).mean()


def definition(cell: Cell) -> dict[str, Tensor]:
    """Gradients and R of the definition, in float64."""
    params = {n: p.detach().requires_grad_() for n, p in network(cell.bn).named_parameters()}
    loss, value = objective_slow(params, cell)
    grads = torch.autograd.grad(loss, params.values())
    return {**dict(zip(params, grads, strict=True)), "R": value.detach()}


def error(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, float]:
    """Relative error of R, and of the gradient as one vector."""
    names = [n for n in wanted if n != "R"]
    a, b = (torch.cat([d[n].reshape(-1) for n in names]) for d in (got, wanted))
    return float(abs(got["R"] - wanted["R"]) / abs(wanted["R"])), float((a - b).norm() / b.norm())
