"""How well the order mixes, beside a full shuffle. ``python -m benchmarks.displacement``. Pure arithmetic, no data.

Displacement is |place in file order - place in the epoch's order| / N: 1/3 on average for a full shuffle. Neighbours are
samples that lay next to each other in the file: the share that is still within 64 places in the epoch's order. Shards in
a batch: how many distinct shards 256 consecutive samples of the global order come from.
"""

from __future__ import annotations

import numpy as np

from benchmarks.report import save
from streamshard.order.partition import EpochOrder, OrderSpec
from streamshard.order.shuffle import ShuffleBuffer

SHARDS, ROWS = 64, 4000
SETTINGS = {
    "file order": {"partitions": 1, "shuffle": False, "interleave": 1, "buffer": 1},
    "P=1, buffer 512": {"partitions": 1},
    "P=16, buffer 512 (default)": {"partitions": 16},
    "P=16, buffer 4096": {"partitions": 16, "buffer": 4096},
    "P=16, buffer 512, interleave 8": {"partitions": 16, "interleave": 8},
    "P=48, buffer 512": {"partitions": 48},
}


def global_order(settings: dict) -> np.ndarray:
    """File-order indices in the global order of epoch 0."""
    epoch = EpochOrder(OrderSpec(**settings), np.full(SHARDS, ROWS), 0)
    parts = epoch.spec.partitions
    order = np.empty(SHARDS * ROWS, dtype=np.int64)
    for p in range(parts):
        part = epoch.partition(p)
        shards, rows = part.refs(ShuffleBuffer(part).emissions(0, part.size))
        order[p::parts] = shards * ROWS + rows
    return order


def statistics_of(order: np.ndarray) -> dict:
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    batches = (order // ROWS)[: len(order) // 256 * 256].reshape(-1, 256)
    return {
        "mean_displacement": float(np.abs(place - np.arange(len(place))).mean() / len(place)),
        "neighbours_within_64": float((np.abs(np.diff(place)) <= 64).mean()),
        "shards_in_256": float(np.mean([len(np.unique(batch)) for batch in batches])),
    }


def main() -> dict:
    result = {name: statistics_of(global_order(settings)) for name, settings in SETTINGS.items()}
    result["full shuffle"] = statistics_of(np.random.default_rng(0).permutation(SHARDS * ROWS))
    print(f"{'':32} {'displacement':>12} {'neighbours':>11} {'shards in 256':>14}")
    for name, row in result.items():
        print(
            f"{name:32} {row['mean_displacement']:12.3f} {row['neighbours_within_64']:11.4f} {row['shards_in_256']:14.1f}"
        )
    return save("displacement", result)


if __name__ == "__main__":
    main()
