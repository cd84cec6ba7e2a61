"""What a loader costs and hides. ``python -m benchmarks.loader [delivery] [bookkeeping] [waiting]``.

delivery: process time of delivering tensors beside iterating the dataset alone, rows of 2048 uint16 tokens, batch 32.
bookkeeping: what the positions that travel with batches cost, and `state_dict()`.
waiting: an uneven race of a producer of 8 ms a batch and a consumer of 10 ms.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

import streamshard as ss
from benchmarks.corpora import SCRATCH
from benchmarks.report import save

ROWS, TOKENS, BATCH, PARTITIONS = 48_000, 2048, 32, 16


def row_dataset() -> str:
    """Rows of 2048 uint16 tokens, as a packed corpus has them."""
    directory = SCRATCH / f"rows-{ROWS}"
    if not (directory / "manifest.json").exists():
        rng = np.random.default_rng(0)
        with ss.DatasetWriter(str(directory)) as writer:
            for number in range(ROWS):
                tokens = np.minimum(rng.zipf(1.2, TOKENS), 50_000).astype(np.uint16)
                writer.write({"id": number, "tokens": tokens})
    return str(directory)


def dataset(**options: object) -> ss.StreamDataset:
    return ss.StreamDataset(row_dataset(), partitions=PARTITIONS, **options)  # type: ignore[arg-type]


def cpu(work: object) -> float:
    """Process time in us a row of iterating `work`, its threads included."""
    began = time.process_time()
    for _ in work:  # type: ignore[attr-defined]
        pass
    return (time.process_time() - began) / ROWS * 1e6


def delivery(rounds: int = 7) -> dict:
    sides = {
        "dataset": dataset,
        "loader, batch_size=32": lambda: ss.StreamLoader(dataset(), batch_size=BATCH),
        "loader over Batch(32)": lambda: ss.StreamLoader(
            ss.StreamDataset(row_dataset(), ss.Batch(BATCH), partitions=PARTITIONS)
        ),
    }
    measured = [{name: cpu(make()) for name, make in sides.items()} for _ in range(rounds + 1)][1:]
    result = {}
    for name in sides:
        result[name] = statistics.median(r[name] for r in measured)
        ratio = statistics.median(r[name] / r["dataset"] for r in measured)
        result[f"{name}, ratio"] = ratio
        print(f"{name:24} {result[name]:6.2f} us of process time a row, {ratio:.2f} x the dataset's")
    return result


def bookkeeping() -> dict:
    loader = ss.StreamLoader(dataset(repeat=True), batch_size=BATCH)
    batches = iter(loader)
    for _ in range(50):
        next(batches)
    began = time.process_time()
    for _ in range(500):
        next(batches)
    per_batch = (time.process_time() - began) / 500
    iteration, position = loader._run._source._iteration, loader._run.position  # noqa: SLF001
    calls = 20_000
    runs = list(iteration.runs) * (BATCH // PARTITIONS)
    began = time.process_time()
    for _ in range(calls):
        marks = {run.p: run.mark() for run in dict.fromkeys(runs)}
        iteration.acknowledge(position.advance(marks))
    cost = (time.process_time() - began) / calls
    states = []
    for _ in range(200):
        began = time.perf_counter()
        state = loader.state_dict()
        states.append(time.perf_counter() - began)
    loader.close()
    result = {
        "batch_us": per_batch * 1e6, "bookkeeping_us": cost * 1e6, "share": cost / per_batch,
        "state_dict_ms": statistics.median(states) * 1e3,
        "state_bytes": sum(len(str(k)) + len(str(v)) for k, v in state.items()),
    }  # fmt: skip
    print(
        f"bookkeeping {cost * 1e6:.1f} us of {per_batch * 1e6:.0f} us a batch: {cost / per_batch:.1%}; state_dict() "
        f"{result['state_dict_ms']:.2f} ms, {result['state_bytes']} bytes"
    )
    return result


def slow_batch(items: list) -> dict:
    time.sleep(0.008)
    return ss.collate(items)


def waiting(batches: int = 500) -> dict:
    loader = ss.StreamLoader(dataset(repeat=True), batch_size=BATCH, collate=slow_batch)
    stream = iter(loader)
    next(stream)
    began, waited = time.perf_counter(), 0.0
    for _ in range(batches):
        time.sleep(0.010)
        asked = time.perf_counter()
        next(stream)
        waited += time.perf_counter() - asked
    total = time.perf_counter() - began
    loader.close()
    result = {"share": waited / total}
    print(f"a producer of 8 ms and a consumer of 10 ms: {waited / total:.2%} of {batches} batches' time spent waiting")
    return result


PARTS = {"delivery": delivery, "bookkeeping": bookkeeping, "waiting": waiting}


def main(names: list[str] | None = None) -> dict:
    result = {name: PARTS[name]() for name in names or PARTS}
    return save("loader" if not names else f"loader-{'-'.join(names)}", result)


if __name__ == "__main__":
    main(sys.argv[1:])
