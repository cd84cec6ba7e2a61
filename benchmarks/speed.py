"""Samples/s and CPU against a hand-written baseline, both alternating in one run. ``python -m benchmarks.speed``."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import zstandard

import streamshard as ss
from benchmarks.baseline import read_plain
from benchmarks.corpora import plain_copy, token_dataset
from benchmarks.report import save
from streamshard.catalog import load_manifest
from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.plan import plan_blocks, plan_units
from streamshard.storage.open import open_store


def timed(work: Callable[[], int]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    count = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"samples_per_s": count / wall, "cpu_s": cpu}


def consume(dataset: ss.StreamDataset) -> int:
    count = 0
    for _ in dataset:
        count += 1
    return count


def only_decompress(directory: str) -> int:
    """Read and decompress every block, nothing else."""
    access = ShardAccess(open_store(directory), load_manifest(open_store(directory)))
    decompressor = zstandard.ZstdDecompressor()
    segments = [(shard, 0, int(rows)) for shard, rows in enumerate(access.manifest.samples)]
    for unit in plan_units(plan_blocks(segments, access.index), lambda: 8 << 20):
        for frame in access.fetch(unit):
            decompressor.decompress(frame)
    return access.manifest.total_samples


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--buffer", type=int, default=8192, help="buffered samples in all partitions together")
    args = parser.parse_args()
    directory = token_dataset(args.documents)
    plain = plain_copy(directory)
    sides: dict[str, Callable[[], int]] = {
        "baseline": lambda: sum(1 for _ in read_plain(plain, args.buffer)),
        "decompress": lambda: only_decompress(directory),
    }
    for parts in (1, 16):
        dataset = ss.StreamDataset(directory, partitions=parts, shuffle_buffer=args.buffer // parts)
        sides[f"P={parts}"] = lambda dataset=dataset: consume(dataset)
    rounds = [{name: timed(work) for name, work in sides.items()} for _ in range(args.rounds + 1)][1:]
    result = {"rounds": rounds}
    for parts in (1, 16):
        ratio = [r[f"P={parts}"]["samples_per_s"] / r["baseline"]["samples_per_s"] for r in rounds]
        cpu = [r[f"P={parts}"]["cpu_s"] / r["decompress"]["cpu_s"] for r in rounds]
        result[f"P={parts}"] = {
            "speed_vs_baseline": statistics.median(ratio),
            "cpu_vs_decompress": statistics.median(cpu),
        }
        print(f"P={parts}: {statistics.median(ratio):.2f} x the baseline's samples/s, "
              f"{statistics.median(cpu):.2f} x the CPU of decompression alone")  # fmt: skip
    for name in sides:
        print(f"{name:>12}: {statistics.median(r[name]['samples_per_s'] for r in rounds):12,.0f} samples/s "
              f"{statistics.median(r[name]['cpu_s'] for r in rounds):8.3f} s CPU")  # fmt: skip
    return save("speed", result)


if __name__ == "__main__":
    main()
