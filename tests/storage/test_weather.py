"""Throttling and late answers over seconds, with real threads, processes and sockets, through both transports."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import threading
import time
from collections import Counter

import pytest

from streamshard.observe.events import ThrottlingBegan, ThrottlingEnded
from streamshard.storage.open import open_store
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.store import Range
from streamshard.testing import faults

DATA = os.urandom(100_000)


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def bucket(server):
    """A bucket of its own for each test: what throttles as one endpoint is remembered by the process."""
    name = f"weather-{next(_numbers)}"
    server.script()
    server.rules(delay=0.02)
    server.put(f"{name}/key", DATA)
    server.clear()
    yield name
    server.rules()


@pytest.fixture
def open_it(server, bucket, transport):
    def open_it(**options):
        return open_store(f"s3://{bucket}", server.storage_options, transport=transport, **options)

    return open_it


def read_until(store, over, errors):
    """Read over and over, until the event `over` is set."""
    while not over.is_set():
        try:
            assert store.get("key", 0, 1000) == DATA[:1000]
        except Exception as error:  # noqa: BLE001  (counted by the test)
            errors.append(error)
            return


def outage(server, store, seconds, *, before=2.0):
    """32 reader threads, a store that answers 503 for `seconds`, and the limit sampled all the while."""
    over, errors, limits = threading.Event(), [], []
    threads = [threading.Thread(target=read_until, args=(store, over, errors)) for _ in range(32)]
    for thread in threads:
        thread.start()
    over.wait(before)
    earlier, began = store.allowance(), time.time()
    server.rules(delay=0.02, outage_s=seconds)
    recovered = None
    while recovered is None and time.time() < began + seconds + 60:
        over.wait(0.05)
        limits.append((time.time(), store.allowance()))
        good = next((e["time"] for e in server.gets() if e["do"] == "ok" and e["time"] > began + 0.1), None)
        recovered = good and next((at for at, limit in limits if at > good and limit >= earlier / 2), None)
    over.wait(0.5)
    over.set()
    for thread in threads:
        thread.join()
    rates = Counter(int(entry["time"] - began + 1000) - 1000 for entry in server.gets())
    return errors, rates, good, recovered


@pytest.mark.parametrize("seconds", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_an_outage_of_throttling_is_sat_out_politely(server, open_it, seconds):
    errors, rates, good, recovered = outage(server, open_it(), seconds)
    assert not errors
    assert max(rates[second] for second in range(1, seconds)) <= 0.2 * rates[-1]
    assert sum(rates[second] for second in range(seconds)) < 60
    assert recovered - good <= 10.0


def test_without_pauses_the_same_outage_is_a_storm(server, open_it):
    """The mutation."""
    policy = StoragePolicy(throttle_backoff_s=0.0, hidden_retry_after_s=0.0, retry_after_cap_s=0.0)
    _, rates, _, _ = outage(server, open_it(policy=policy), 3)
    assert sum(rates[second] for second in range(3)) > 60


def test_throttling_is_told_to_the_hook_and_logged_once_when_it_begins_and_once_when_it_ends(
    server, bucket, open_it, caplog, monkeypatch
):
    monkeypatch.setattr("streamshard.storage.limiter._QUIET_S", 1.0)
    events = []
    with caplog.at_level(logging.WARNING, "streamshard"):
        store = open_it(hook=events.append)
        server.script(*[faults.status(503)] * 3)
        store.get("key", 0, 1000)
        deadline = time.monotonic() + 20
        while len(events) < 2 and time.monotonic() < deadline:
            store.get("key", 0, 1000)
    assert [type(event) for event in events] == [ThrottlingBegan, ThrottlingEnded]
    assert events[0].endpoint == f"{server.endpoint}/{bucket}"
    assert events[1].answers == 3
    said = [record.message for record in caplog.records if "throttl" in record.message]
    assert len(said) == 2
    assert "SlowDown" in said[0]
    assert "3 throttled answers" in said[1]


def test_a_hook_that_fails_fails_no_read(server, open_it, caplog):
    def broken(event):
        raise ValueError(event)

    store = open_it(hook=broken)
    server.script(faults.status(503))
    assert store.get("key", 0, 1000) == DATA[:1000]
    assert "hook" in caplog.text


def _share(url, options, transport, ready, go, seconds, results):
    store = open_store(url, options, transport=transport)
    for _ in range(5):
        store.get("key", 0, 10)
    ready.release()
    go.wait()
    over, errors, counts = threading.Event(), [], Counter()

    def read():
        while not over.is_set():
            try:
                store.get("key", 0, 1000)
            except Exception as error:  # noqa: BLE001
                errors.append(str(error))
                return
            counts["good"] += 1

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in threads:
        thread.join()
    results.put((counts["good"], errors))


@pytest.mark.slow
def test_eight_processes_share_what_a_store_has(server, bucket, transport):
    """100 answers a second, 20 ms each, 503 beyond, for 30 s: 80 % used, nobody starved, nothing failed."""
    context, seconds = multiprocessing.get_context("spawn"), 30
    ready, go, results = context.Semaphore(0), context.Event(), context.Queue()
    arguments = (f"s3://{bucket}", server.storage_options, transport, ready, go, seconds, results)
    processes = [context.Process(target=_share, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire(timeout=60)
    server.clear()
    server.rules(rate=100, delay=0.02)
    began = time.time()
    go.set()
    got = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    good = sum(entry["do"] == "ok" and entry["time"] < began + seconds for entry in server.gets())
    counts = [count for count, _ in got]
    print(f"{transport}: {good / seconds:.1f}/s, slowest / mean {8 * min(counts) / sum(counts):.2f}, {sorted(counts)}")
    assert [errors for _, errors in got] == [[]] * 8
    assert good >= 0.8 * 100 * seconds
    assert min(counts) >= 0.5 * sum(counts) / 8


def latencies(store, count):
    """Seconds of `count` requests, four at a time."""
    times, pending = [], []

    def begin():
        started = time.monotonic()
        future = store.fetch(Range("key", 0, 1000))
        future.add_done_callback(lambda done: times.append(time.monotonic() - started))
        pending.append(future)

    for _ in range(count):
        while len(pending) >= 4:
            pending.pop(0).result()
        begin()
    for future in pending:
        future.result()
    return sorted(times)


HEDGING = {"hedge_after_s": 0.1, "limit_start": 16}


def test_hedging_halves_the_p99_where_every_fortieth_answer_is_late(server, open_it):
    server.rules(delay=0.005, every=40, late=1.0)
    plain, hedged = open_it(policy=StoragePolicy(**HEDGING)), open_it(policy=StoragePolicy(hedge=True, **HEDGING))
    latencies(hedged, 60)  # it needs to have seen what is usual
    server.clear()
    slow, fast = latencies(plain, 240), latencies(hedged, 240)
    counters = hedged.counters()
    assert fast[int(0.99 * 240)] <= slow[int(0.99 * 240)] / 2
    assert counters.hedge_wins > 0
    assert counters.hedges <= 0.05 * counters.requests + 3


def test_hedges_stay_within_their_budget_when_all_answers_are_slow(server, open_it):
    server.rules(delay=0.04)
    store = open_it(policy=StoragePolicy(hedge=True, hedge_after_s=0.05, limit_start=16))
    latencies(store, 60)
    server.rules(delay=0.2)
    latencies(store, 100)
    counters = store.counters()
    assert 0 < counters.hedges <= 0.05 * counters.requests + 4  # a few are there to begin with
