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

PARTITIONS = (1, 16)
BUFFERED = (512, 8192)  # samples in all buffers together: the default of one partition, and of sixteen


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
        for frame in next(access.fetch([unit])):
            decompressor.decompress(frame)
    return access.manifest.total_samples


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    directory = token_dataset(args.documents)
    plain = plain_copy(directory)
    sides: dict[str, Callable[[], int]] = {"decompress": lambda: only_decompress(directory)}
    for total in BUFFERED:
        sides[f"baseline, {total} buffered"] = lambda total=total: sum(1 for _ in read_plain(plain, total))
        for parts in PARTITIONS:
            dataset = ss.StreamDataset(directory, partitions=parts, shuffle_buffer=total // parts)
            sides[f"P={parts}, {total} buffered"] = lambda dataset=dataset: consume(dataset)
    rounds = [{name: timed(work) for name, work in sides.items()} for _ in range(args.rounds + 1)][1:]
    result: dict = {"rounds": rounds, "rows": {}}
    for name in sides:
        base = f"baseline, {name.partition(', ')[2]}"
        row = {
            "samples_per_s": statistics.median(r[name]["samples_per_s"] for r in rounds),
            "cpu_us_a_sample": statistics.median(r[name]["cpu_s"] for r in rounds) / args.documents * 1e6,
            "cpu_vs_decompress": statistics.median(r[name]["cpu_s"] / r["decompress"]["cpu_s"] for r in rounds),
        }
        if base in sides:
            row["speed_vs_baseline"] = statistics.median(
                r[name]["samples_per_s"] / r[base]["samples_per_s"] for r in rounds
            )
        result["rows"][name] = row
        line = f"{name:24} {row['samples_per_s']:9,.0f} samples/s, {row['cpu_us_a_sample']:5.2f} us CPU each, "
        line += f"{row['cpu_vs_decompress']:.2f} x the CPU of decompression"
        print(line + (f", {row['speed_vs_baseline']:.2f} x the baseline's speed" if base in sides else ""))
    return save("speed", result)


if __name__ == "__main__":
    main()
