"""Clients belong to one process; leaving is prompt: forks, Ctrl-C, exceptions, the end of the interpreter."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from torch.utils.data import DataLoader

import streamshard as ss
from streamshard.prefetch.scheduler import ReadAhead
from streamshard.storage import engine, obstore_store
from streamshard.storage.open import open_store
from streamshard.testing import faults
from tests.conftest import _requests_left
from tests.storage.conftest import fast

SAMPLES = 400


def record(number):
    data = np.random.default_rng(number).bytes(5000)
    return {"id": number, "data": data, "digest": hashlib.sha256(data).hexdigest()}


@pytest.fixture(scope="module")
def corpus(server, tmp_path_factory):
    """Samples that carry the digest of their own payload, on the scripted server (plain HTTP)."""
    directory = tmp_path_factory.mktemp("payloads")
    with ss.DatasetWriter(directory, shard_bytes=300_000, block_bytes=50_000) as writer:
        for number in range(SAMPLES):
            writer.write(record(number))
    for path in directory.rglob("*"):
        if path.is_file():
            server.put(f"payloads/ds/{path.relative_to(directory)}", path.read_bytes())
    return "s3://payloads/ds"


@pytest.fixture(autouse=True)
def good_weather(server):
    server.script()
    server.rules()
    server.clear()
    yield
    server.rules()


def as_is(batch):
    return batch


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_every_start_method_get_right_payloads_after_the_parent_has_read(server, corpus, transport, method):
    dataset = ss.StreamDataset(
        corpus, partitions=4, storage_options=server.storage_options, transport=transport, repeat=False
    )
    for sample in dataset:  # the parent's client has open connections now
        assert hashlib.sha256(sample["data"]).hexdigest() == sample["digest"]
        if sample["id"] % 50 == 0:
            break
    dataset = ss.StreamDataset(corpus, partitions=4, storage_options=server.storage_options, transport=transport)
    assert dataset.manifest.total_samples == SAMPLES
    loader = DataLoader(
        dataset, batch_size=10, num_workers=4, multiprocessing_context=method, collate_fn=as_is, timeout=60
    )
    got = [sample for batch in loader for sample in batch]
    assert sorted(sample["id"] for sample in got) == list(range(SAMPLES))
    assert all(hashlib.sha256(sample["data"]).hexdigest() == sample["digest"] for sample in got)


def _forked(work):
    """Run `work` in a forked child; returns its exit code, or None if it hangs."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    for _ in range(600):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)  # a child has no event to wait for
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def test_a_forked_child_reads_through_fsspec_where_obstore_would_hang(server, corpus):
    dataset = ss.StreamDataset(corpus, storage_options=server.storage_options, transport="obstore")
    assert next(iter(dataset))

    def work():
        assert obstore_store.unusable_here()
        again = ss.StreamDataset(corpus, storage_options=server.storage_options, transport="obstore")
        assert sum(1 for _ in again) == SAMPLES
        assert "S3fsTransport" in repr(again._store)

    assert _forked(work) == 0


def test_without_the_guard_the_forked_child_hangs(server, corpus, monkeypatch):
    """The mutation: obstore in the child of a process that has used it."""
    dataset = ss.StreamDataset(corpus, storage_options=server.storage_options, transport="obstore")
    assert next(iter(dataset))
    pid = os.fork()
    if pid == 0:
        obstore_store._process["forked_after_use"] = False
        policy = fast(deadline_s=2.0, first_byte_s=1.0, attempts=2)
        again = ss.StreamDataset(
            corpus, storage_options=server.storage_options, transport="obstore", storage_policy=policy
        )
        try:
            next(iter(again))
        except ss.StorageError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


LEAVE = """
import json, sys, time, threading, os, signal
import streamshard as ss
url, options, transport, how = json.loads(sys.argv[1])
dataset = ss.StreamDataset(url, storage_options=options, transport=transport, partitions=4)
iterator = iter(dataset)
next(iterator)
print("reading", flush=True)
sys.stdin.readline()  # the server answers nothing from now on
began = time.monotonic()
try:
    if how == "interrupt":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        for sample in iterator:
            pass
    elif how == "exception":
        raise ValueError("in the training loop")
    elif how == "close":
        iterator.close()
    # how == "exit": the interpreter ends with requests in flight
except KeyboardInterrupt:
    print("interrupted", flush=True)
except ValueError:
    print("raised", flush=True)
print(f"left after {time.monotonic() - began:.2f}", flush=True)
"""


@pytest.mark.parametrize("how", ["interrupt", "exception", "close", "exit"])
def test_leaving_takes_less_than_two_seconds_whatever_is_in_flight(server, corpus, transport, how):
    server.rules(delay=0.02)
    arguments = json.dumps([corpus, server.storage_options, transport, how])
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVE, arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "reading\n"
    server.rules(delay=3600)
    began = time.monotonic()
    out, err = process.communicate("go\n", timeout=30)
    assert process.returncode == 0, err
    assert time.monotonic() - began < 2.0 + 0.3 + 1.0  # the timer of the interrupt, and a loaded machine's slack
    assert "Traceback" not in err
    assert "left after" in out


def test_two_hundred_abandoned_datasets_leave_no_thread_no_descriptor_and_no_request(server, corpus, transport):
    options = {"storage_options": server.storage_options, "transport": transport, "partitions": 2}
    shared = ss.StreamDataset(corpus, **options)

    def cycle(dataset):
        iterator = iter(dataset)
        next(iterator)
        next(iterator)
        iterator.close()

    cycle(shared)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        cycle(shared)
    for _ in range(5):  # and with a client each
        cycle(ss.StreamDataset(corpus, **options))
    assert threading.active_count() <= threads
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > descriptors + 16 and time.monotonic() < deadline:
        time.sleep(0.05)  # connections are closed by the loop, and idle ones are kept for the next request
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 16


def test_wrong_bytes_are_read_again_and_then_called_corrupt(server, corpus, transport):
    options = {"storage_options": server.storage_options, "transport": transport, "partitions": 1}
    dataset = ss.StreamDataset(corpus, **options)
    assert dataset.manifest
    server.script(faults.wrong_bytes(), faults.wrong_bytes())
    assert sorted(sample["id"] for sample in dataset) == list(range(SAMPLES))
    server.script(*[faults.wrong_bytes()] * 1000)
    with pytest.raises(ss.CorruptError, match="corrupt") as caught:
        list(dataset)
    assert caught.value.kind == "corrupt"
    assert isinstance(caught.value, ss.DataError)
    server.script()


def test_a_manifest_of_wrong_bytes_is_read_again(server, corpus, transport):
    server.script(faults.wrong_bytes())
    assert ss.StreamDataset(corpus, storage_options=server.storage_options, transport=transport).manifest.total_samples


def test_a_shard_replaced_in_the_middle_of_a_run_is_an_error_that_names_both_versions(server, tmp_path, transport):
    with ss.DatasetWriter(tmp_path / "ds", shard_bytes=4 << 20, block_bytes=100_000) as writer:
        for number in range(800):
            writer.write(record(number))
    for path in (tmp_path / "ds").rglob("*"):
        if path.is_file():
            server.put(f"changing/ds/{path.relative_to(tmp_path / 'ds')}", path.read_bytes())
    options = {"storage_options": server.storage_options, "transport": transport, "partitions": 1, "interleave": 1}
    dataset = ss.StreamDataset("s3://changing/ds", prefetch_bytes=1 << 20, shuffle_buffer=8, **options)
    iterator = iter(dataset)
    next(iterator)
    key = f"changing/ds/{dataset.manifest.key(0)}"
    server.put(key, bytes(int(dataset.manifest.bytes[0])))
    with pytest.raises(ss.StorageError, match=r"was replaced while.*it was version .* and is now") as caught:
        list(iterator)
    assert caught.value.kind == "changed"


def test_counters_say_what_was_asked_and_what_was_waited_for(server, corpus, transport):
    records = []
    server.rules(delay=0.05)
    dataset = ss.StreamDataset(
        corpus, partitions=2, storage_options=server.storage_options, transport=transport, on_event=records.append
    )
    assert dataset.manifest
    server.clear()
    before = dataset.storage_counters()
    assert sum(1 for _ in dataset) == SAMPLES
    counters = dataset.storage_counters()
    assert counters.requests - before.requests == len(server.gets())
    assert counters.bytes - before.bytes >= dataset.manifest.total_bytes * 0.99
    assert counters.stalls > 0
    assert counters.waiting_storage_s > 0.05
    assert counters.decoding_s > 0
    assert counters.lookahead_bytes == 0
    assert 0 < counters.lookahead_peak <= 2 * dataset.manifest.total_bytes  # a small shard on a border comes twice
    assert records[-1].requests == counters.requests


def test_counters_travel_to_other_processes_and_into_json(server, corpus, transport):
    dataset = ss.StreamDataset(corpus, storage_options=server.storage_options, transport=transport)
    assert dataset.manifest
    counters = dataset.storage_counters()
    assert pickle.loads(pickle.dumps(counters)) == counters  # noqa: S301  (our own bytes)
    assert json.loads(json.dumps(dataclasses.asdict(counters)))["requests"] == 2


def test_a_hook_that_reads_is_told_not_to_and_hangs_nothing(server, corpus, transport, caplog):
    name = f"hooked-{transport}"
    server.put(f"{name}/key", b"0123456789")
    options = {"transport": transport, "policy": fast()}
    store = open_store(f"s3://{name}", server.storage_options, hook=lambda event: store.stat("key"), **options)
    server.script(faults.status(503))
    assert store.get("key", 0, 10) == b"0123456789"
    assert "a storage hook may not read from a store" in caplog.text


def test_a_store_whose_hook_knows_it_is_collected_all_the_same(server, corpus, transport):
    class Trainer:
        def __init__(self):
            self.dataset = ss.StreamDataset(
                corpus, storage_options=server.storage_options, transport=transport, on_event=self.on_event
            )

        def on_event(self, event):
            pass

    trainer = Trainer()
    assert next(iter(trainer.dataset))
    store = weakref.ref(trainer.dataset._store)
    del trainer
    gc.collect()  # closes the iterator, whose requests end on the loop
    assert not engine.current_engine().run(_requests_left())
    gc.collect()
    assert store() is None


def test_closing_an_iteration_on_the_thread_that_holds_its_lock_does_not_hang():
    """What the collector does when it finds an abandoned iterator while a request is being planned."""
    ahead = ReadAhead(1 << 20, 2)

    def close():
        with ahead._lock:
            ahead.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(timeout=10)
    assert not closing.is_alive()


def test_more_partitions_than_rows_are_passed_over(server, corpus, transport):
    options = {"storage_options": server.storage_options, "transport": transport}
    assert sum(1 for _ in ss.StreamDataset(corpus, partitions=2000, **options)) == SAMPLES


def test_before_the_first_item_no_more_is_asked_for_than_the_budget_and_a_block_for_each_stripe(
    server, tmp_path, transport
):
    with ss.DatasetWriter(tmp_path / "ds", shard_bytes=20 << 20, block_bytes=100_000) as writer:
        for number in range(6000):
            writer.write(record(number % 50) | {"id": number})
    for path in (tmp_path / "ds").rglob("*"):
        if path.is_file():
            server.put(f"large/ds/{path.relative_to(tmp_path / 'ds')}", path.read_bytes())
    options = {
        "storage_options": server.storage_options,
        "transport": transport,
        "partitions": 4,
        "shuffle_buffer": 1000,
    }
    dataset = ss.StreamDataset("s3://large/ds", prefetch_bytes=2 << 20, **options)
    iterator = iter(dataset)
    for _ in range(5000):
        next(iterator)
    state = dataset.state_dict()
    iterator.close()
    resumed = ss.StreamDataset("s3://large/ds", prefetch_bytes=2 << 20, **options)
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    next(iterator)
    assert resumed.storage_counters().lookahead_peak <= (2 << 20) + 4 * 2 * (110_000 + (512 << 10))
    iterator.close()
