"""Two processes under DistributedDataParallel equal one process on the joined batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import gc, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import fsmap
from fsmap.linalg.probes import Stream

torch.set_default_dtype(torch.float64)
mode, estimator = sys.argv[1:]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
S, B = 6, 4


def network():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5).eval() if mode == "frozen" else nn.Identity()
    return nn.Sequential(nn.Linear(2, 5), norm, nn.Tanh(), nn.Linear(5, 3))


def loss_of(out, y, R):
    return nn.functional.cross_entropy(out, y) + 0.1 * R


g = torch.Generator().manual_seed(1)
x, y = torch.randn(size * B, 2, generator=g), torch.randint(0, 3, (size * B,), generator=g)
px = fsmap.px.Normal(shape=(2,))

model = network()
lm = fsmap.LMAP(model, px, num_points=S, batchnorm=mode, estimator=estimator)
ddp = DistributedDataParallel(lm)
if mode == "frozen":
    model[1].eval()
for step in range(2):  # the second step has another psi
    ddp.zero_grad()
    part = slice(rank * B, (rank + 1) * B)
    out, R = ddp(x[part])
    loss_of(out, y[part], R).backward()

# One process, all points of both ranks at once, the same psi.
joined = network()
joined.load_state_dict(model.state_dict())
points = torch.cat([px.sample(S, Stream(0, 1, r).points()).double() for r in range(size)])
whole = fsmap.LMAP(joined, lambda n, generator: points, num_points=size * S, batchnorm=mode,
                   estimator=estimator)
if mode == "frozen":
    joined[1].eval()
whole.regularizer.step = 1
out, R = whole(x)
loss_of(out, y, R).backward()
worst = max(
    float((a.grad - b.grad).abs().max() / b.grad.abs().max().clamp_min(1e-300))
    for a, b in zip(model.parameters(), joined.parameters())
)
size_of_term = float(R.detach())
if rank == 0:
    print(f"worst={worst:.3e} R={size_of_term:.6f} step={lm.step}")
del ddp
gc.collect()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("mode", "estimator"), [("joint", "jvp"), ("frozen", "jvp"), ("joint", "fd")]
)
def test_gradients_equal_those_of_the_joined_batch(
    tmp_path: Path, mode: str, estimator: str
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(script), mode, estimator),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("worst="))
    found = dict(item.split("=") for item in line.split())
    assert float(found["worst"]) < 1e-10
    assert float(found["R"]) > 0
    assert found["step"] == "2"
