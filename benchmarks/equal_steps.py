"""What agreeing on equal steps adds to the wait for a batch: ``python -m benchmarks.equal_steps``.

Four gloo processes take 500 batches with ``remainder="keep"`` and 500 with "drop", alternating in pieces of 50, with a step
that sleeps 20 ms and ends with a barrier, as a training step ends with an all-reduce.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

import torch.distributed as dist

import streamshard as ss
from benchmarks.report import save

RANKS, STEPS, PIECE, BATCH, SLEEP_S = 4, 500, 50, 4, 0.02


def measure(url: str, output: str) -> None:
    """In each process; rank 0 writes the medians of all."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    waits: dict[str, list[float]] = {"keep": [], "drop": []}
    loaders = {}
    for policy in waits:
        dataset = ss.StreamDataset(url, partitions=48, topology=ss.Topology(rank, RANKS))
        loaders[policy] = iter(ss.StreamLoader(dataset, batch_size=BATCH, remainder=policy))
    for _ in range(STEPS // PIECE):
        for policy, batches in loaders.items():
            for _ in range(PIECE):
                began = time.perf_counter()
                next(batches)
                waits[policy].append(time.perf_counter() - began)
                time.sleep(SLEEP_S)
                dist.barrier()
    mine = {policy: median(found) for policy, found in waits.items()}
    found: list = [None] * RANKS
    dist.all_gather_object(found, mine)
    if rank == 0:
        with open(output, "w") as file:
            json.dump(found, file)
    for batches in loaders.values():
        batches.close()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url, output = f"{folder}/corpus", f"{folder}/found.json"
        with ss.DatasetWriter(url) as writer:
            for number in range(RANKS * BATCH * (STEPS + 10)):
                writer.write({"id": number})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += ["-m", "benchmarks.equal_steps", url, output]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        with open(output) as file:
            found = json.load(file)
    result = {
        "ranks": RANKS, "steps": STEPS,
        "wait_us": {policy: [round(1e6 * one[policy], 1) for one in found] for policy in found[0]},
        "added_us": [round(1e6 * (one["drop"] - one["keep"]), 1) for one in found],
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    save("equal_steps", result)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        measure(sys.argv[1], sys.argv[2])
    else:
        main()
