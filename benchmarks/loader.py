"""What a loader costs and hides. ``python -m benchmarks.loader [delivery] [bookkeeping] [waiting] [first] [gil]``.

delivery: process time of delivering tensors beside iterating the dataset alone, rows of 2048 uint16 tokens, batch 32.
bookkeeping: what the positions that travel with batches cost, and `state_dict()`.
waiting: an uneven race of a producer of 8 ms a batch and a consumer of 10 ms.
first: the first batch from S3 with 50 ms of latency added, beside what it cannot do without.
gil: what the loader's thread costs a training loop that is all Python, and what worker processes cost instead.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

import streamshard as ss
from benchmarks.corpora import SCRATCH
from benchmarks.report import save
from benchmarks.storage import upload
from streamshard.loading.local import LocalSource
from streamshard.storage.remote_store import RemoteStore
from streamshard.testing.faults import fault_server

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


def in_one_thread(form: Callable) -> Iterator:
    """The loader's own source, without its thread."""
    source = dataset()
    iteration = source.open_share(source.shares(0)[0], lent=True)
    yield from LocalSource(iteration, BATCH, form, lambda: None).batches()
    iteration.close()


def touched(source: ss.StreamDataset) -> Iterator:
    """The dataset with every row's tokens copied once, row by row, to one place: what batching cannot do without."""
    target = np.empty(TOKENS, np.uint16)
    for sample in source:
        target[:] = sample["tokens"]
        yield sample


def delivery(rounds: int = 7) -> dict:
    sides = {
        "dataset": dataset,
        "dataset, rows copied": lambda: touched(dataset()),
        "batches, one thread": lambda: in_one_thread(lambda items, _: ss.collate(items)),
        "loader, batch_size=32": lambda: ss.StreamLoader(dataset(), batch_size=BATCH),
        "loader over Batch(32)": lambda: ss.StreamLoader(
            ss.StreamDataset(row_dataset(), ss.Batch(BATCH), partitions=PARTITIONS)
        ),
        "loader, device='cpu'": lambda: ss.StreamLoader(dataset(), batch_size=BATCH, device="cpu"),
        "loader, 1 worker": lambda: ss.StreamLoader(dataset(), batch_size=BATCH, workers=1),
    }
    measured = [{name: cpu(make()) for name, make in sides.items()} for _ in range(rounds + 1)][1:]
    result = {}
    for name in sides:
        result[name] = statistics.median(r[name] for r in measured)
        ratio = statistics.median(r[name] / r["dataset"] for r in measured)
        result[f"{name}, ratio"] = ratio
        print(f"{name:22} {result[name]:6.2f} us of process time a row, {ratio:.2f} x the dataset's")
    reading = dataset()
    for _ in reading:
        pass
    result["decoding"] = reading.storage_counters().decoding_s / ROWS * 1e6
    print(f"of the dataset's time {result['decoding']:.2f} us a row is decompression and unpacking")
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


LATENCY = 0.05
SETTINGS = {"P=1, interleave=1": {"partitions": 1, "interleave": 1}, "defaults": {}}


def first(rounds: int = 9) -> dict:
    result = {}
    with fault_server() as server:
        upload(server, row_dataset(), "rows")
        server.rules(delay=LATENCY)
        for name, settings in SETTINGS.items():
            runs = [first_batch(server.storage_options, settings) for _ in range(rounds)]
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            row["ratio"] = statistics.median(run["seconds"] / run["bound"] for run in runs)
            result[name] = row
            trips = -(-row["requests"] // 8) * LATENCY
            print(
                f"first batch, {name}: {row['seconds'] * 1e3:.0f} ms, {row['ratio']:.2f} x (manifest "
                f"{row['manifest'] * 1e3:.0f} + one trip {row['trip'] * 1e3:.0f} + decoding {row['decoding'] * 1e3:.0f} ms); "
                f"{row['requests']:.0f} requests for data, {trips * 1e3:.0f} ms of round trips eight at a time"
            )
    return result


def first_batch(options: dict, settings: dict) -> dict:
    url = "s3://bench/rows"
    began = time.perf_counter()
    loader = ss.StreamLoader(ss.StreamDataset(url, storage_options=options, **settings), batch_size=BATCH)
    next(iter(loader))
    seconds = time.perf_counter() - began
    counters = loader.storage_counters()
    loader.close()
    began = time.perf_counter()
    again = ss.StreamDataset(url, storage_options=options)
    manifest = again.manifest
    read = time.perf_counter() - began
    began = time.perf_counter()
    open_store_of(again).get(manifest.key(0), 0, 1 << 20)
    trip = time.perf_counter() - began
    return {
        "seconds": seconds, "manifest": read, "trip": trip, "decoding": counters.decoding_s,
        "bound": read + trip + counters.decoding_s, "requests": counters.requests - 1,
    }  # fmt: skip


def open_store_of(dataset: ss.StreamDataset) -> RemoteStore:
    return dataset._store  # type: ignore[return-value]  # noqa: SLF001  (the same client, so a warm connection)


def python_loop(batches: object, seconds: float = 4.0) -> tuple[float, float]:
    """(steps/s of a training loop in pure Python of some 10 ms a step, seconds of a step's own work)."""
    stream, done, working = iter(batches), 0, 0.0  # type: ignore[call-overload]
    next(stream)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        at = time.perf_counter()
        sum(i * i for i in range(100_000))
        working += time.perf_counter() - at
        next(stream)
        done += 1
    return done / (time.perf_counter() - began), working / done


def gil(rounds: int = 3) -> dict:
    sides = {
        "no loader": lambda: iter(lambda: 0, 1),
        "thread": lambda: ss.StreamLoader(dataset(repeat=True), batch_size=BATCH),
        "1 worker": lambda: ss.StreamLoader(dataset(repeat=True), batch_size=BATCH, workers=1),
        "2 workers": lambda: ss.StreamLoader(dataset(repeat=True), batch_size=BATCH, workers=2),
    }
    runs = []
    for _ in range(rounds):
        run = {}
        for name, make in sides.items():
            batches = make()
            run[name] = python_loop(batches)
            if isinstance(batches, ss.StreamLoader):
                batches.close()
        runs.append(run)
    result = {}
    for name in sides:
        result[name] = statistics.median(run[name][0] / run["no loader"][0] for run in runs)
        work = statistics.median(run[name][1] for run in runs)
        print(f"a loop of pure Python, {name:10} {result[name]:.2f} x the steps/s, {work * 1e3:.1f} ms of work a step")
    return result


PARTS = {"delivery": delivery, "bookkeeping": bookkeeping, "waiting": waiting, "first": first, "gil": gil}


def main(names: list[str] | None = None) -> dict:
    result = {name: PARTS[name]() for name in names or PARTS}
    return save("loader" if not names else f"loader-{'-'.join(names)}", result)


if __name__ == "__main__":
    main(sys.argv[1:])
