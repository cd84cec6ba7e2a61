"""One run of one contender, in a process of its own; prints a line of JSON. ``python -m benchmarks.peers.measure
'{...}'``.

kind "write": the corpus in the contender's format. "epoch": one epoch, timed. "check": one epoch, each sample's id
and payload compared with what was written. "save": to the middle of an epoch, then the state to a file. "resume":
from that file to the first batch. What is imported, and what a worker process imports when it is forked, is not in
the times.
"""

from __future__ import annotations

import importlib
import json
import pickle
import resource
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.peers.corpora import CORPORA, Corpus
from benchmarks.peers.place import Place


def cpu_seconds() -> float:
    """Of this process and of all children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def epoch(contender: Any, place: Place, corpus: Corpus, workers: int, seed: int) -> dict:
    cpu, begun = cpu_seconds(), time.perf_counter()
    loader = contender.load(place, corpus, workers, seed)
    first, count, payload = 0.0, 0, 0
    for batch in loader:
        first = first or time.perf_counter() - begun
        count += len(batch)
        for sample in batch:
            payload += len(sample[corpus.payload])
    seconds = time.perf_counter() - begun
    if hasattr(loader, "close"):
        loader.close()
    del loader
    payload *= 2 if corpus.name == "tokens" else 1
    return {
        "samples": count, "payload": payload, "seconds": seconds, "first_batch": first, "cpu": cpu_seconds() - cpu
    }  # fmt: skip


def check(contender: Any, place: Place, corpus: Corpus, workers: int, *, count: int) -> dict:
    """Whether each sample comes once, as it was written."""
    expected = {sample["id"]: zlib.crc32(sample[corpus.payload]) for sample in corpus.samples(count)}
    seen: Counter[str] = Counter()
    wrong = 0
    for batch in contender.load(place, corpus, workers, 1):
        for sample in batch:
            seen[str(sample["id"])] += 1
            wrong += expected.get(str(sample["id"])) != zlib.crc32(sample[corpus.payload])
    return {"missing": len(expected) - len(seen), "repeated": sum(n - 1 for n in seen.values()), "wrong": wrong}


def save(contender: Any, place: Place, corpus: Corpus, workers: int, *, batches: int, path: Path) -> dict:
    loader = contender.load(place, corpus, workers, 1)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state = pickle.dumps(contender.state(loader, iterator))
    path.write_bytes(state)
    return {"state_bytes": len(state)}


def resume(contender: Any, place: Place, corpus: Corpus, workers: int, *, path: Path) -> dict:
    state = pickle.loads(path.read_bytes())  # noqa: S301  (written by `save` above)
    begun = time.perf_counter()
    iterator = contender.resume(contender.load(place, corpus, workers, 1), state)
    next(iterator)
    return {"resume": time.perf_counter() - begun}


def main() -> None:
    asked = json.loads(sys.argv[1])
    contender = importlib.import_module(f"benchmarks.peers.{asked['contender']}")
    corpus = CORPORA[asked["corpus"]]
    place = Place(**asked["place"])
    workers = asked.get("workers", 0)
    if asked["kind"] == "write":
        contender.write(corpus.samples(asked["count"]), Path(place.url), corpus)
        found: dict = {}
    elif asked["kind"] == "epoch":
        found = epoch(contender, place, corpus, workers, asked["seed"])
    elif asked["kind"] == "check":
        found = check(contender, place, corpus, workers, count=asked["count"])
    elif asked["kind"] == "save":
        found = save(contender, place, corpus, workers, batches=asked["batches"], path=Path(asked["state"]))
    else:
        found = resume(contender, place, corpus, workers, path=Path(asked["state"]))
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
