"""Sharded parameters (FSDP2): InPlacePenalty after the loss's backward pass.

    torchrun --nproc-per-node=2 examples/fsdp.py

A functional pass cannot replace sharded parameters, so LMAP raises an error for such a model.
InPlacePenalty moves the shards themselves by βψ, makes its passes, and puts them back to the last
bit. It works with activation checkpointing, too. Without torchrun this runs as one process.
"""

import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsmap


def main() -> float:
    """Train on this rank's share of the data; returns the last loss, averaged over ranks."""
    alone = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = (x[:, 0] * x[:, 1] > 0).long()
    x, y = (t[dist.get_rank() :: dist.get_world_size()] for t in (x, y))
    x, y = (t.cuda() if cuda else t for t in (x, y))

    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8 if i == 0 else 64, 64), nn.GELU()) for i in range(3)),
        nn.Linear(64, 2),
    )
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    px = fsmap.px.Normal(shape=(8,))
    penalty = fsmap.InPlacePenalty(model, px, num_points=64).attach(optimizer)  # new
    for _ in range(60):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        R = penalty.backward(1e-4)  # new: adds λ∇R to the gradients
        optimizer.step()
        optimizer.zero_grad()
    last = torch.stack([loss.detach(), R])
    dist.all_reduce(last)
    last /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"loss {last[0]:.3f}, R {last[1]:.1f} on {dist.get_world_size()} ranks")
    del model, block, optimizer, penalty, loss
    gc.collect()  # what is sharded must be gone before its process group
    dist.barrier()
    dist.destroy_process_group()
    return last[0].item()


if __name__ == "__main__":
    main()
