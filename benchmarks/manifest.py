"""A made-up manifest of a million shards and 10^9 samples: time and memory to the first refs.

``python -m benchmarks.manifest``
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.report import save

SHARDS, SAMPLES = 1_000_000, 10**9

READ = """
import json, sys, time
import torch, numpy, streamshard as ss
from streamshard.order.partition import EpochOrder, OrderSpec
from streamshard.order.shuffle import ShuffleBuffer
def memory(name):  # VmRSS now, VmHWM at its highest
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts here, not at the imports' own peak
before, start = memory("VmRSS"), time.perf_counter()
manifest = ss.open_manifest(sys.argv[1])
order = EpochOrder(OrderSpec(partitions=16), manifest.sample_counts, 0)
part = order.partition(3)
shards, rows = part.refs(ShuffleBuffer(part).emissions(0, 32))
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "megabytes": (memory("VmHWM") - before) / 1e6, "samples": manifest.total_samples,
                  "first": [int(shards[0]), int(rows[0])]}))
"""


def write_manifest(directory: Path) -> None:
    """A manifest as a writer would make it, without the shards."""
    rng = np.random.default_rng(0)
    samples = rng.multinomial(SAMPLES - SHARDS, np.full(SHARDS, 1 / SHARDS)) + 1
    from streamshard.shard.manifest import Manifest, ShardGroup, column  # noqa: PLC0415  (the parent reads nothing)

    manifest = Manifest(
        groups=(ShardGroup("shards/part-{index:06d}-{digest:016x}.msgpack.zst", 0, SHARDS),),
        samples=column(samples),
        bytes=column(rng.integers(60 << 20, 64 << 20, SHARDS)),
        index_bytes=column(rng.integers(2000, 6000, SHARDS)),
        index_digests=rng.integers(0, 2**63, SHARDS, dtype=np.uint64),
        lengths=column(samples * 800),
        schema={"tokens": "array[uint16, 1]"},
        length_field="tokens",
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").write_bytes(manifest.encode(created=""))


def main() -> dict:
    from benchmarks.corpora import SCRATCH  # noqa: PLC0415

    directory = SCRATCH / "million"
    if not (directory / "manifest.json").exists():
        write_manifest(directory)
    runs = []
    for _ in range(5):
        out = subprocess.run([sys.executable, "-c", READ, str(directory)], capture_output=True, text=True, check=True)
        runs.append(json.loads(out.stdout))
    result = {
        "seconds": sorted(run["seconds"] for run in runs)[2],
        "megabytes": sorted(run["megabytes"] for run in runs)[2],
        "manifest_megabytes": (directory / "manifest.json").stat().st_size / 1e6,
        "runs": runs,
    }
    print(f"{SHARDS:,} shards, {SAMPLES:,} samples: first refs after {result['seconds']:.2f} s and "
          f"{result['megabytes']:.0f} MB beyond the imports ({result['manifest_megabytes']:.0f} MB manifest)")  # fmt: skip
    return save("manifest", result)


if __name__ == "__main__":
    main()
