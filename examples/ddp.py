"""Data-parallel training that can be stopped and started again on another number of processes.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py
    torchrun --standalone --nproc-per-node 4 examples/ddp.py      # goes on where the two stopped

Every process reads its own samples; one file has the model and the state of all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import streamshard as ss

GLOBAL_BATCH = 32


def write_corpus(directory: Path) -> None:
    """Points on a noisy line, if they are not there yet."""
    if (directory / "manifest.json").exists():
        return
    rng = np.random.default_rng(0)
    with ss.DatasetWriter(str(directory), shard_bytes=1 << 16) as writer:
        for number in range(4000):
            x = rng.normal(size=8).astype(np.float32)
            writer.write({"id": number, "x": x, "y": np.float32(x.sum() + rng.normal() / 10)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("ddp-output"))
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of this run")
    args = parser.parse_args()

    dist.init_process_group("gloo")  # "nccl" with GPUs
    train(args.folder, args.steps)
    # The model is gone by now. Were it the last to hold the process group, torch could wait for ever: for gloo's threads, one
    # of which may need the interpreter lock to let go of a tensor, and that lock is held while a model is taken apart.
    dist.destroy_process_group()


def train(folder: Path, steps: int) -> None:
    """So many steps from the checkpoint on, if there is one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_corpus(folder / "corpus")
    dist.barrier()

    # 48 partitions can be read by 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48 processes, and each batch of the whole job is the same.
    dataset = ss.StreamDataset(
        str(folder / "corpus"), seed=17, partitions=48, repeat=True, topology=ss.Topology(rank, ranks)
    )
    loader = ss.StreamLoader(dataset, batch_size=GLOBAL_BATCH // ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    done, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        loader.load_state_dict(saved["data"])
        done = saved["step"]

    for step, batch in enumerate(loader, done + 1):
        loss = nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == done + steps:
            break
    data = ss.gather_state(loader.state_dict())  # every rank takes part; every rank gets the whole
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "data": data, "step": step}, checkpoint)
        print(f"step {step} on {ranks} processes: loss {loss.item():.4f}; saved {checkpoint}", flush=True)
    loader.close()


if __name__ == "__main__":
    main()
