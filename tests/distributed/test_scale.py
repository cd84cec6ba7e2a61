"""A thousand ranks and a million shards cost each process little before its first sample."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, resource, sys, time
import numpy as np
from streamshard.order.partition import EpochOrder, OrderSpec
from streamshard.order.rotation import Reader, owned
from streamshard.order.shuffle import ShuffleBuffer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

parts, ranks, shards = 4096, int(sys.argv[1]), 1_000_000
samples = np.random.default_rng(0).integers(900, 1100, shards)
before, began = peak(), time.perf_counter()
epoch = EpochOrder(OrderSpec(partitions=parts, seed=3, repeat=True), samples, 2, 2 * int(samples.sum()))
held, _ = owned(dict.fromkeys(range(parts), 0), (), parts, Reader(ranks - 1, ranks))
first = [epoch.partition(p) for p in held[:1]]
epoch.refs(np.array([first[0].start]))
ready = time.perf_counter() - began
began = time.perf_counter()
for p in held:
    part = epoch.partition(p)
    part.refs(ShuffleBuffer(part).contents(0))
each = (time.perf_counter() - began) / len(held)
print(json.dumps({"ready": ready, "each": each, "held": len(held), "bytes": peak() - before}))
"""


def measured(ranks: int) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ranks)], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


def test_4096_partitions_of_a_million_shards_are_ready_in_two_seconds_and_200_mb_on_any_number_of_ranks():
    found = {ranks: measured(ranks) for ranks in (1, 16, 1024)}
    print(found)
    for ranks, one in found.items():
        assert one["held"] == 4096 // ranks
        assert one["ready"] < 2
        assert one["bytes"] < 200e6
        assert one["each"] < 20 * found[1]["each"] + 0.001  # four partitions are few to take a mean of
