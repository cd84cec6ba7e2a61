"""What a state at every batch costs under torch's loaders. ``python -m benchmarks.tracking``.

Time per batch of 32, shuffle buffer 512, of a plain DataLoader, of one that is tracked, and of a StatefulDataLoader with a
snapshot at every and at every hundredth batch. Where it says "asked", the loader is asked for its state as often, too. All
alternate; the figures are medians of the rounds' ratios to the plain one.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import streamshard as ss
from benchmarks.corpora import SCRATCH
from benchmarks.report import save

BATCH, BUFFER = 32, 512


def records(count: int) -> str:
    """Records of 2 KB, as the figures of other libraries' state costs were measured with."""
    directory = SCRATCH / f"records-2k-{count}"
    if not (directory / "manifest.json").exists():
        shutil.rmtree(directory, ignore_errors=True)
        rng = np.random.default_rng(0)
        with ss.DatasetWriter(str(directory)) as writer:
            for number in range(count):
                writer.write({"id": number, "values": rng.integers(0, 50_000, 1000, dtype=np.uint16)})
    return str(directory)


def per_batch(loader: Iterable[Any], state: Callable[[], object] | None, skip: int = 100, every: int = 1) -> float:
    """Milliseconds a batch, without the first ones and what starts workers."""
    count, begun = 0, 0.0
    for _ in loader:
        count += 1
        if state is not None and count % every == 0:
            state()
        if count == skip:
            begun = time.perf_counter()
    return (time.perf_counter() - begun) / (count - skip) * 1e3


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    directory = records(args.records)
    result: dict = {}
    for workers in (0, 2):
        options: dict[str, Any] = {"batch_size": BATCH, "num_workers": workers, "collate_fn": ss.collate}
        if workers:
            options["multiprocessing_context"] = "fork"

        def dataset() -> ss.StreamDataset:
            return ss.StreamDataset(directory, shuffle_buffer=BUFFER, partitions=16)

        def plain(options: dict = options) -> float:
            return per_batch(DataLoader(dataset(), **options), None)

        def tracked(options: dict = options) -> float:
            loader = ss.track(DataLoader(dataset(), **options))
            return per_batch(loader, loader.state_dict)

        def stateful(every: int, *, asked: bool, options: dict = options) -> float:
            loader = StatefulDataLoader(dataset(), snapshot_every_n_steps=every, **options)
            return per_batch(loader, loader.state_dict if asked else None, every=every)

        sides = {
            "plain": plain,
            "tracked, asked": tracked,
            "stateful, 1": lambda: stateful(1, asked=False),
            "stateful, 1, asked": lambda: stateful(1, asked=True),
            "stateful, 100, asked": lambda: stateful(100, asked=True),
        }
        rounds = [{name: side() for name, side in sides.items()} for _ in range(args.rounds + 1)][1:]
        rows = {
            name: {
                "ms_a_batch": statistics.median(r[name] for r in rounds),
                "times_plain": statistics.median(r[name] / r["plain"] for r in rounds),
            }
            for name in sides
        }
        result[f"workers {workers}"] = {"rounds": rounds, "rows": rows}
        for name, row in rows.items():
            print(f"workers {workers}  {name:20}  {row['ms_a_batch']:.3f} ms a batch  {row['times_plain']:.2f} x plain")
    return save("tracking", result)


if __name__ == "__main__":
    main()
