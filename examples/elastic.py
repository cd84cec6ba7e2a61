"""Start on four processes, kill them all, go on with two, kill those, finish with eight: and the proof that nothing changed.

    python examples/elastic.py

Each life trains under torchrun and saves every five steps with torch.distributed.checkpoint; kill -9 comes at a moment of its
own. Steps after the last checkpoint are done again by the next life, as in any training. The proof compares what was trained on
in the end, step by step, with one process that was never disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import streamshard as ss

GLOBAL_BATCH, SAMPLES, EVERY = 48, 960, 5
LIVES = [(4, 13), (2, 27), (8, None)]  # processes, and the step after which they are killed


def open_loader(folder: Path, rank: int, ranks: int) -> ss.StreamLoader:
    """48 partitions: any number of processes that divides 48 reads the same batches."""
    dataset = ss.StreamDataset(
        str(folder / "corpus"),
        seed=17,
        partitions=48,
        shuffle_buffer=16,
        repeat=True,
        topology=ss.Topology(rank, ranks),
    )
    return ss.StreamLoader(dataset, batch_size=GLOBAL_BATCH // ranks)


def train_process(folder: Path, steps: int) -> None:
    """One process of one life."""
    dist.init_process_group("gloo")
    train(folder, steps)
    # The model is gone by now. Were it the last to hold the process group, torch could wait for ever: for gloo's threads, one
    # of which may need the interpreter lock to let go of a tensor, and that lock is held while a model is taken apart.
    dist.destroy_process_group()


def train(folder: Path, steps: int) -> None:
    """From the last checkpoint on, up to so many steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loader = open_loader(folder, rank, ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    done = int(newest.name) if (newest := last_checkpoint(folder)) else 0
    if newest:
        weights = model.module.state_dict()
        dcp.load({"model": weights, "data": ss.ShardedState(loader)}, checkpoint_id=newest)
        model.module.load_state_dict(weights)

    with (folder / f"log-{ranks}-{rank}.jsonl").open("a") as log:
        print(json.dumps({"pid": os.getpid()}), file=log, flush=True)
        for step, batch in zip(range(done + 1, steps + 1), loader, strict=False):
            loss = nn.functional.mse_loss(model(batch["x"])[:, 0], batch["x"].sum(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(json.dumps({"step": step, "ids": batch["id"].tolist()}), file=log, flush=True)
            if step % EVERY == 0:
                data = ss.ShardedState(loader)
                dcp.save(
                    {"model": model.module.state_dict(), "data": data}, checkpoint_id=folder / "checkpoints" / f"{step}"
                )
    loader.close()
    dist.barrier()


def last_checkpoint(folder: Path) -> Path | None:
    """The newest that is whole: DCP writes its .metadata last."""
    whole = [path.parent for path in (folder / "checkpoints").glob("*/.metadata")]
    return max(whole, key=lambda path: int(path.name), default=None)


def live(folder: Path, processes: int, kill_after: int | None, steps: int) -> None:
    """One life, killed as soon as any of its processes has logged step `kill_after`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [__file__, "--train", "--folder", str(folder), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, env=environment)
    while run.poll() is None and (kill_after is None or last_step(folder, processes) < kill_after):
        time.sleep(0.01)
    if kill_after is not None:
        run.kill()
        for pid in pids(folder, processes):  # torchrun's children are no group of its own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if run.wait() and kill_after is None:
        raise SystemExit(f"torchrun ended with exit code {run.returncode}")


def lines(folder: Path, processes: int) -> list[list[dict[str, Any]]]:
    """What each process has logged; the last line may have been cut by the kill."""
    found = []
    for path in sorted(folder.glob(f"log-{processes}-*.jsonl")):
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found.append([json.loads(line) for line in whole])
    return found


def pids(folder: Path, processes: int) -> list[int]:
    return [entries[0]["pid"] for entries in lines(folder, processes)]


def logged(folder: Path, processes: int) -> list[list[dict[str, Any]]]:
    """The steps of each process."""
    return [entries[1:] for entries in lines(folder, processes)]


def last_step(folder: Path, processes: int) -> int:
    return max((entries[-1]["step"] for entries in logged(folder, processes) if entries), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where everything goes; default a temporary directory")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train_process(args.folder, args.steps)
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="elastic-"))
    rng = np.random.default_rng(0)
    with ss.DatasetWriter(str(folder / "corpus"), shard_bytes=1 << 13) as writer:
        for number in range(SAMPLES):
            writer.write({"id": number, "x": rng.normal(size=4).astype(np.float32)})

    trained: dict[int, list[int]] = {}  # what counts of each step: what was done last
    for processes, kill_after in LIVES:
        resumed = last_checkpoint(folder)
        live(folder, processes, kill_after, args.steps)
        logs = logged(folder, processes)
        complete = min(len(entries) for entries in logs)  # steps that all processes have finished
        for entries in zip(*(entries[:complete] for entries in logs), strict=True):
            trained[entries[0]["step"]] = [i for entry in entries for i in entry["ids"]]
        first, last = logs[0][0]["step"], logs[0][complete - 1]["step"]
        end = "killed" if kill_after else "finished"
        print(
            f"{processes} processes, from checkpoint {resumed.name if resumed else 'none'}: steps {first} to {last}, {end}"
        )

    alone = open_loader(folder, 0, 1)
    undisturbed = {step: batch["id"].tolist() for step, batch in zip(range(1, args.steps + 1), alone, strict=False)}
    alone.close()
    same = sum(sorted(trained[step]) == sorted(undisturbed[step]) for step in undisturbed)
    print(f"{same} of {args.steps} steps trained on the same {GLOBAL_BATCH} samples as an undisturbed run")
    counts = Counter(i for step in sorted(trained)[: SAMPLES // GLOBAL_BATCH] for i in trained[step])
    print(f"first epoch: {len(counts)} of {SAMPLES} samples, each {'once' if set(counts.values()) == {1} else counts}")
    if same != args.steps or set(counts.values()) != {1} or len(counts) != SAMPLES:
        raise SystemExit("the runs differ")


if __name__ == "__main__":
    main()
