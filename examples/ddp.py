"""Many GPUs or machines with DistributedDataParallel: wrap LMAP, not the model.

    torchrun --nproc-per-node=2 examples/ddp.py                                  one machine
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29500 examples/ddp.py                               two of them

All ranks draw the same ψ, each draws evaluation points of its own, and one backward pass averages
the gradients of the loss and of R. Without torchrun it runs as one process.
"""

import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsmap


def main() -> float:
    """Train on this rank's share of the data; returns the last loss, averaged over ranks."""
    alone = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = (x[:, 0] * x[:, 1] > 0).long()
    sampler = DistributedSampler(TensorDataset(x, y), seed=0)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, sampler=sampler)

    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 2))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if cuda else model  # any p_X
    lm = fsmap.LMAP(model.to(device), fsmap.px.Normal(shape=(8,)), num_points=32)  # new
    ddp = DistributedDataParallel(lm)  # instead of DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    lm.attach(optimizer)  # new
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for a, b in loader:
            out, R = ddp(a.to(device))  # new
            loss = F.cross_entropy(out, b.to(device)) + 1e-4 * R  # new: + λR
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    last = loss.detach()
    dist.all_reduce(last)
    last /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"loss {last.item():.3f} on {dist.get_world_size()} ranks, {lm.step} steps")
    del ddp
    gc.collect()  # the wrapper must be gone before its process group
    dist.barrier()
    dist.destroy_process_group()
    return last.item()


if __name__ == "__main__":
    main()
