"""What two ranks do under torchrun; rank 0 writes the findings to the file that it is given."""

from __future__ import annotations

import gc
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.loops import cells  # noqa: E402

import fsmap  # noqa: E402
from fsmap.errors import FsmapError  # noqa: E402
from fsmap.px import Stream  # noqa: E402

S, B, LAM = 6, 4, 0.1
Found = dict[str, float | str]


class Net(nn.Module):
    """Sizes that do not divide by two, a block that can be checkpointed, maybe BatchNorm."""

    def __init__(self, norm: nn.Module | None = None, checkpointed: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 5), norm or nn.Identity(), nn.Tanh())
        self.head = nn.Linear(5, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return self.head(h)


def network(norm: Callable[[], nn.Module] | None = None, checkpointed: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(norm() if norm else None, checkpointed)


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    n = dist.get_world_size() * B
    return torch.randn(n, 2, generator=g), torch.randint(0, 3, (n,), generator=g)


def own(t: Tensor) -> Tensor:
    rank = dist.get_rank()
    return t[rank * B : (rank + 1) * B]


def worst(got: nn.Module, wanted: nn.Module) -> float:
    """Largest error of a gradient, relative to the largest entry of its tensor.

    A bias before BatchNorm has none but rounding: no tensor counts as smaller than 1e-3 of all.
    """
    floor = 1e-3 * max(float(p.grad.abs().max()) for p in wanted.parameters())
    errors = []
    for a, b in zip(got.parameters(), wanted.parameters(), strict=True):
        grad = a.grad.full_tensor() if hasattr(a.grad, "full_tensor") else a.grad
        errors.append(float((grad - b.grad).abs().max() / b.grad.abs().max().clamp_min(floor)))
    return max(errors)


def joined(
    model: nn.Module, step: int, micros: int = 1, by_name: bool = False, **options: object
) -> None:
    """One process, the points of all ranks at once, the same ψ: gradients in ``model``."""
    px = fsmap.px.Normal(shape=(2,))
    ranks = range(dist.get_world_size())
    x, y = data()
    for micro in range(micros):
        points = torch.cat([px.sample(S, Stream(0, step, r, micro).points()) for r in ranks])
        lm = fsmap.LMAP(model, lambda n, g, p=points: p, num_points=len(points), **options)
        lm.step = step
        drawn = lm.draw(x)
        if by_name:  # as sharded parameters draw it
            named = model.named_parameters()
            num = options.get("probes", 1)
            psi = [Stream(0, step).psi_of(name, p, num).reshape(num, -1) for name, p in named]
            drawn = drawn._replace(probes=torch.cat(psi, 1))
        out, R = lm(x, drawn=drawn)
        ((F.cross_entropy(out, y) + LAM * R) / micros).backward()


def ddp(norm: Callable[[], nn.Module] | None = None, **options: object) -> Found:
    """DDP(LMAP) against the joined batch, on the second step."""
    model, twin = network(norm), network(norm and (lambda: nn.BatchNorm1d(5)))
    x, y = data()
    lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(2,)), num_points=S, **options)
    wrapped = lm if norm is sync else DistributedDataParallel(lm)
    for _ in range(2):
        wrapped.zero_grad()
        twin.load_state_dict(model.state_dict())
        out, R = wrapped(own(x))
        (F.cross_entropy(out, own(y)) + LAM * R).backward()
    if norm is sync:  # DDP takes SyncBatchNorm on GPUs only: average as it does
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    joined(twin, 1, **options)
    buffers = zip(model.buffers(), twin.buffers(), strict=True)
    moved = max((float((a - b).abs().max()) for a, b in buffers), default=0.0)
    return {"worst": worst(model, twin), "R": float(R), "step": lm.step, "buffers": moved}


def in_place(model: nn.Module, inner: nn.Module, micros: int = 1, **options: object) -> Found:
    """InPlacePenalty on two steps of a wrapped model, against the unwrapped definition."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    penalty = fsmap.InPlacePenalty(model, fsmap.px.Normal(shape=(2,)), num_points=S, **options)
    penalty.attach(optimizer)
    before = [local(t).clone() for t in inner.state_dict().values()]
    x, y = data()
    for _ in range(2):
        optimizer.zero_grad()
        for micro in range(micros):
            if micros > 1:
                model.set_requires_gradient_sync(micro == micros - 1)
            (F.cross_entropy(model(own(x)), own(y)) / micros).backward()
            R = penalty.backward(LAM / micros)
        optimizer.step()
    after = inner.state_dict().values()
    same = all(torch.equal(a, local(b)) for a, b in zip(before, after, strict=True))
    twin = network()
    sharded = any(hasattr(p, "placements") for p in inner.parameters())
    joined(twin, 1, micros, sharded, batchnorm="frozen", estimator="fd", **options)
    return {"worst": worst(inner, twin), "R": float(R), "same": float(same), "step": penalty.step}


def local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def fsdp(reshard: bool = True, checkpointed: bool = False, **options: object) -> Found:
    """Sharded parameters."""
    model = network(checkpointed=checkpointed)
    fully_shard(model.body, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return in_place(model, model, **options)


def fsdp_bf16() -> Found:
    """Half precision with a larger β, against float64 with the same: errors of R and gradient."""
    found = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = network()
        fully_shard(model, mp_policy=policy)
        penalty = fsmap.InPlacePenalty(model, fsmap.px.Normal(shape=(2,)), num_points=S, beta=1e-2)
        value = penalty.backward(LAM)
        grads = [p.grad.full_tensor().flatten() for p in model.parameters()]
        found.append((value, torch.cat(grads)))
    (value, grad), (half, rough) = found
    return {
        "R": float(abs(half / value - 1)),
        "gradient": float((rough - grad).norm() / grad.norm()),
    }


def in_place_ddp() -> Found:
    """DistributedDataParallel, where each backward pass averages its own part."""
    inner = network()
    return in_place(DistributedDataParallel(inner), inner)


def zero() -> Found:
    """λ = 0 under DDP: how far from training the model in DDP, after three steps."""
    x, y = data()
    trained = []
    for wrapped in (False, True):
        model = network(lambda: nn.BatchNorm1d(5))
        lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(2,)), num_points=S, batchnorm="frozen")
        spread = DistributedDataParallel(lm if wrapped else model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            out, term = spread(own(x), reg_strength=0.0) if wrapped else (spread(own(x)), 0.0)
            optimizer.zero_grad()
            (F.cross_entropy(out, own(y)) + term).backward()
            optimizer.step()
        trained.append(list(model.state_dict().values()))
    return {"same": float(all(map(torch.equal, *trained)))}


def fsdp1(use_orig_params: bool) -> nn.Module:
    lm = fsmap.LMAP(network(), fsmap.px.Normal(shape=(2,)), num_points=S)
    return FSDP1(lm, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def refusals() -> Found:
    """What cannot work gets told."""
    px, x = fsmap.px.Normal(shape=(2,)), own(data()[0])
    model = network()
    fully_shard(model)
    half = network()
    fully_shard(half, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    penalty = fsmap.InPlacePenalty(half, px, num_points=S)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    tp = [parallelize_module(network(), mesh["tp"], {"head": ColwiseParallel()}) for _ in range(2)]
    fully_shard(tp[1], mesh=mesh["dp"])
    tries: dict[str, Callable[[], object]] = {
        "LMAP": lambda: fsmap.LMAP(model, px, num_points=S)(x),
        "LaplacianPenalty": lambda: fsmap.LaplacianPenalty(model, px, num_points=S)(),
        "FSDP1, own parameters": lambda: fsdp1(use_orig_params=True)(x),
        "FSDP1, flat parameters": lambda: fsdp1(use_orig_params=False)(x),
        "half": lambda: penalty.backward(1.0),
        "tensor parallel": lambda: fsmap.InPlacePenalty(tp[0], px, num_points=S),
        "tensor parallel, FSDP2": lambda: fsmap.InPlacePenalty(tp[1], px, num_points=S),
        "exact": lambda: fsmap.LMAP(network(sync), px, num_points=S, estimator="exact")(x),
    }
    said: Found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            said[name] = "nothing"
        except FsmapError as error:
            said[name] = str(error)
    return said


def matrix() -> Found:
    """Errors of every cell for two processes."""
    found: Found = {}
    for cell in cells.cells(dist.get_world_size()):
        got = cells.run(cell, dist.get_rank())
        dist.all_reduce(got["R"])
        got["R"] /= dist.get_world_size()
        if dist.get_rank() == 0:
            found[f"{cell}: R"], found[f"{cell}: gradient"] = cells.error(
                got, cells.definition(cell)
            )
    return found


def sync() -> nn.Module:
    return nn.SyncBatchNorm(5)


CASES: dict[str, Callable[[], Found]] = {
    "matrix": matrix,
    "ddp joint jvp": lambda: ddp(),
    "ddp frozen jvp": lambda: ddp(batchnorm="frozen"),
    "ddp joint fd": lambda: ddp(estimator="fd"),
    "ddp sampled outputs": lambda: ddp(batchnorm="frozen", outputs=2),
    "sync joint jvp": lambda: ddp(sync),
    "sync joint fd_central": lambda: ddp(sync, estimator="fd_central"),
    "fsdp": fsdp,
    "fsdp, parameters kept": lambda: fsdp(reshard=False),
    "fsdp, checkpointing": lambda: fsdp(checkpointed=True),
    "fsdp, two probes": lambda: fsdp(probes=2),
    "fsdp, two micro-batches": lambda: fsdp(micros=2),
    "in place, ddp": in_place_ddp,
    "fsdp, bf16": fsdp_bf16,
    "zero": zero,
    "refusals": refusals,
    "examples": lambda: examples(),
}


def examples() -> Found:
    """The scripts in examples/ that are for torchrun, in the group that is there already."""
    folder = Path(__file__).parents[2] / "examples"
    torch.set_default_dtype(torch.float32)
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        losses = {n: runpy.run_path(str(folder / f"{n}.py"))["main"]() for n in ("ddp", "fsdp")}
    torch.set_default_dtype(torch.float64)
    return losses


def main(out: Path) -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    found = {name: case() for name, case in CASES.items()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    gc.collect()  # before the group goes: a DDP that outlives it aborts at exit
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
