"""Two data-parallel ranks of two tensor-parallel peers each: peers get the same batch, and one of them reads it.

torchrun --standalone --nproc-per-node 4 examples/mesh.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import streamshard as ss

STEPS = 20


def write_corpus() -> str:
    """Written by rank 0, its path known to all."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    directory = str(Path(path[0]) / "corpus")
    if dist.get_rank() == 0:
        rng = torch.Generator().manual_seed(0)
        with ss.DatasetWriter(directory, shard_bytes=1 << 14) as writer:
            for number in range(1000):
                writer.write({"id": number, "x": torch.randn(8, generator=rng).numpy()})
    dist.barrier()
    return directory


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" with GPUs
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    directory = write_corpus()

    dataset = ss.StreamDataset(
        directory, seed=17, partitions=48, repeat=True, topology=ss.Topology.from_mesh(mesh, dims=("dp",))
    )
    loader = ss.StreamLoader(dataset, batch_size=16)
    loader = ss.broadcast_batches(loader, mesh.get_group("tp"))  # leave this out, and each process reads for itself

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = nn.functional.mse_loss(model(batch["x"])[:, 0], batch["x"].sum(1))
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # what FSDP or DDP do
            gradient = parameter.grad.to_local()
            dist.all_reduce(gradient, group=mesh.get_group("dp"))
            gradient /= mesh["dp"].size()
        optimizer.step()

    ss.verify_replicas(batch, mesh.get_group("tp"))
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (mesh.get_coordinate(), batch["id"][:4].tolist(), round(loss.item(), 4)))
    if dist.get_rank() == 0:
        for coordinate, ids, loss_there in found:
            print(f"(dp, tp) = {tuple(coordinate)}: the last batch begins with {ids}, loss {loss_there}")
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
