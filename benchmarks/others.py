"""The same computations without fsmap: torch.func, curvlinops, linear_operator.

The Jacobian by ``torch.func`` is the fast way, one reverse pass per point and output under
``vmap``; log-determinants are taken of the smaller of JJᵀ and JᵀJ. All run in the dtype of the
model. Methods that need a Jacobian of more than a gigabyte are left out. A name that
ends in ``(reference)`` is shown but not compared: it is a call that our method makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap

from benchmarks.cells import JITTER, PROBES, Cell

Work = Callable[[], Tensor]
LARGEST_JACOBIAN = 2**30  # bytes
INSTALL = (
    "pip install einops linear_operator opt_einsum scipy tqdm && pip install --no-deps "
    "curvlinops-for-pytorch==3.0.1 backpack-for-pytorch==1.7.1 unfoldnd==0.2.3 einconv==0.1.0"
)


def missing() -> list[str]:
    """Which of the two libraries are not installed."""
    return [name for name in ("curvlinops", "linear_operator") if find_spec(name) is None]


def jacobian(cell: Cell) -> Tensor:
    """J/√S by ``vmap(jacrev)``: [SK, P]."""
    params = dict(cell.module.named_parameters())

    def one(p: dict[str, Tensor], point: Tensor) -> Tensor:
        return functional_call(cell.module, p, (point[None],))[0]

    blocks = vmap(jacrev(one), in_dims=(None, 0))(params, cell.x)
    rows = torch.cat([b.flatten(2) for b in blocks.values()], dim=-1).flatten(0, 1)
    return rows / math.sqrt(len(cell.x))


def slogdet(rows: Tensor) -> Tensor:
    """Log det(JᵀJ/S + εI) from the smaller matrix."""
    Q, P = rows.shape
    if P <= Q:
        return torch.linalg.slogdet(rows.mT @ rows + JITTER * torch.eye(P).to(rows)).logabsdet
    inner = torch.linalg.slogdet(rows @ rows.mT + JITTER * torch.eye(Q).to(rows)).logabsdet
    return (P - Q) * math.log(JITTER) + inner


def fits(cell: Cell) -> bool:
    """Whether a dense Jacobian is small enough to be tried."""
    return cell.rows * cell.P * cell.x.element_size() <= LARGEST_JACOBIAN


def log_det(cell: Cell) -> dict[str, Work]:
    if not fits(cell):
        return {}
    found: dict[str, Work] = {"torch.func jacrev + slogdet": lambda: slogdet(jacobian(cell))}
    if find_spec("curvlinops") and not torch.is_grad_enabled() and cell.rows <= 256:
        transposed = _curvlinops_jacobian(cell).adjoint()
        eye = torch.eye(cell.rows).to(cell.x)
        found["curvlinops Jacobian + slogdet"] = lambda: slogdet(
            (transposed @ eye).mT / math.sqrt(len(cell.x))
        )
    return found


def log_det_by_lanczos(cell: Cell) -> dict[str, Work]:
    if not find_spec("linear_operator") or not fits(cell):
        return {}
    from linear_operator import settings
    from linear_operator.operators import RootLinearOperator

    def work() -> Tensor:
        rows = jacobian(cell)
        Q, P = rows.shape
        root = RootLinearOperator(rows if Q < P else rows.mT)
        with settings.max_cholesky_size(0), settings.num_trace_samples(PROBES):
            value = root.add_jitter(JITTER).logdet()
        return value + (P - min(P, Q)) * math.log(JITTER)

    return {"linear_operator SLQ on jacrev": work}


def log_det_by_products(cell: Cell) -> dict[str, Work]:
    if missing() or torch.is_grad_enabled():
        return {}
    from linear_operator import settings

    operator = _gram_operator(cell)

    def work() -> Tensor:
        with settings.max_cholesky_size(0), settings.num_trace_samples(PROBES):
            value = operator.logdet()
        return value + (cell.P - min(cell.P, cell.rows)) * math.log(JITTER)

    return {"linear_operator SLQ on curvlinops": work}


def exact_trace(cell: Cell) -> dict[str, Work]:
    return {"torch.func jacrev": lambda: jacobian(cell).square().sum()} if fits(cell) else {}


def trace(cell: Cell) -> dict[str, Work]:
    found = {"torch.func jvp (reference)": lambda: _hutchinson(cell)}
    if find_spec("curvlinops") and not torch.is_grad_enabled():
        from curvlinops import GGNLinearOperator, hutchinson_trace, xtrace

        loss = nn.MSELoss(reduction="sum")  # its GGN is 2JᵀJ
        data = [(cell.x, cell.module(cell.x).detach())]
        params = list(cell.module.parameters())
        ggn = GGNLinearOperator(cell.module, loss, params, data, check_deterministic=False)
        scale = 1 / (2 * len(cell.x))
        found["curvlinops GGN, hutchinson"] = lambda: scale * hutchinson_trace(ggn, PROBES)
        found["curvlinops GGN, xtrace"] = lambda: scale * xtrace(ggn, PROBES)
    return found


def _hutchinson(cell: Cell) -> Tensor:
    params = dict(cell.module.named_parameters())
    psi = {n: torch.randn(PROBES, *p.shape).to(p) for n, p in params.items()}

    def square(probe: dict[str, Tensor]) -> Tensor:
        moved = jvp(lambda p: functional_call(cell.module, p, (cell.x,)), (params,), (probe,))[1]
        return moved.square().sum()

    return vmap(square)(psi).mean() / len(cell.x)


def _curvlinops_jacobian(cell: Cell) -> object:
    from curvlinops import JacobianLinearOperator

    data = [(cell.x, cell.module(cell.x).detach())]
    params = list(cell.module.parameters())
    return JacobianLinearOperator(cell.module, params, data, check_deterministic=False)


def _gram_operator(cell: Cell) -> object:
    """The smaller of JJᵀ/S + εI and JᵀJ/S + εI by products, as a linear_operator."""
    from linear_operator import LinearOperator

    J = _curvlinops_jacobian(cell)
    left, right = (J, J.adjoint()) if cell.rows < cell.P else (J.adjoint(), J)
    size, S = min(cell.rows, cell.P), len(cell.x)

    class Gram(LinearOperator):
        def _matmul(self, rhs: Tensor) -> Tensor:
            flat = rhs if rhs.ndim == 2 else rhs[:, None]
            return (left @ (right @ flat) / S + JITTER * flat).reshape(rhs.shape)

        def _size(self) -> torch.Size:
            return torch.Size([size, size])

        def _transpose_nonbatch(self) -> LinearOperator:
            return self

    return Gram(torch.zeros(1).to(cell.x))
