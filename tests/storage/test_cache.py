"""The disk cache: shared, bounded, verified, and never a reason to fail."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import streamshard as ss
from streamshard.errors import UsageError
from streamshard.storage.cache import PIECE
from streamshard.storage.disk import Disk
from streamshard.storage.local_store import locked
from streamshard.storage.open import CACHE_FOLDER, LEAST_CACHE
from streamshard.testing import faults

_numbers = itertools.count()


@pytest.fixture
def corpus(server, tmp_path):
    """Twelve megabytes in three shards; (url, ids)."""
    name = f"cached-{next(_numbers)}"
    rng = np.random.default_rng(0)
    with ss.DatasetWriter(tmp_path / "ds", shard_bytes=5 << 20) as writer:
        for number in range(3000):
            writer.write({"id": number, "data": rng.bytes(4000)})
    for path in (tmp_path / "ds").rglob("*"):
        if path.is_file():
            server.put(f"{name}/ds/{path.relative_to(tmp_path / 'ds')}", path.read_bytes())
    server.script()
    server.rules()
    return f"s3://{name}/ds"


def open_it(server, corpus, transport, directory, **options):
    settings = {
        "storage_options": server.storage_options,
        "transport": transport,
        "partitions": 4,
        "cache_dir": directory,
    }
    dataset = ss.StreamDataset(corpus, **{**settings, **options})
    assert dataset.manifest
    return dataset


def ids(dataset):
    return [sample["id"] for sample in dataset]


def cached(directory):
    return [path for path in directory.iterdir() if not path.name.startswith(".")]


def drained(dataset):
    """Wait until what is on its way to the disk is there."""
    cache = dataset._store._stack().stack

    async def wait():
        await asyncio.gather(*cache._writes)

    dataset._store._stack().engine.run(wait())


def test_the_second_epoch_asks_the_store_for_nothing(server, corpus, transport, tmp_path):
    dataset = open_it(server, corpus, transport, tmp_path / "cache")
    first = ids(dataset)
    drained(dataset)
    assert dataset.storage_counters().bytes < 1.1 * dataset.manifest.total_bytes + 100_000  # nothing was fetched twice
    server.clear()
    again = open_it(server, corpus, transport, tmp_path / "cache", partitions=2, seed=5)
    server.clear()
    assert sorted(ids(again)) == sorted(first) == list(range(3000))
    assert server.gets() == []
    counters = again.storage_counters()
    assert counters.cache_hits > 0
    assert counters.cache_misses == 0
    assert "Cached(Resilient(" in repr(again._store)


def test_without_a_cache_it_asks_again(server, corpus, transport, tmp_path):
    """The mutation."""
    ids(open_it(server, corpus, transport, None))
    again = open_it(server, corpus, transport, None)
    server.clear()
    ids(again)
    assert server.gets()


def test_a_damaged_file_is_removed_and_fetched_again(server, corpus, transport, tmp_path):
    dataset = open_it(server, corpus, transport, tmp_path / "cache")
    ids(dataset)
    drained(dataset)
    for path in cached(tmp_path / "cache" / CACHE_FOLDER):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    again = open_it(server, corpus, transport, tmp_path / "cache")
    server.clear()
    assert sorted(ids(again)) == list(range(3000))
    asked = sum(int(stop) - int(start) + 1 for start, stop in (e["range"][6:].split("-") for e in server.gets()))
    assert 0.99 * again.manifest.total_bytes < asked < 1.1 * again.manifest.total_bytes


def test_a_rewritten_dataset_does_not_find_the_old_ones_pieces(server, corpus, transport, tmp_path):
    ids(open_it(server, corpus, transport, tmp_path / "cache"))
    with ss.DatasetWriter(tmp_path / "other", shard_bytes=5 << 20) as writer:
        for number in range(100):
            writer.write({"id": -number, "data": bytes(4000)})
    bucket = corpus.removeprefix("s3://")
    for path in (tmp_path / "other").rglob("*"):
        if path.is_file():
            server.put(f"{bucket}/{path.relative_to(tmp_path / 'other')}", path.read_bytes())
    assert sorted(ids(open_it(server, corpus, transport, tmp_path / "cache"))) == list(range(-99, 1))


def _write_many(directory, limit, seed, count):
    disk = Disk(directory, limit)
    rng = np.random.default_rng(seed)
    for number in range(count):
        disk.write(f"{seed}-{number:04d}", rng.bytes(100_000))
        disk.read(f"{seed}-{number // 2:04d}")


def size_of(directory):
    total = 0
    for path in directory.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            pass
    return total


def test_it_stays_within_its_bound_under_concurrent_writers(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_write_many, args=(str(tmp_path / "c"), 3_000_000, seed, 40)) for seed in range(4)
    ]
    for process in processes:
        process.start()
    most = 0
    while any(process.is_alive() for process in processes):
        if (tmp_path / "c").exists():
            with (tmp_path / "c" / ".lock").open(
                "ab"
            ) as lock:  # files are removed, and room for new ones is counted, under it
                fcntl.flock(lock, fcntl.LOCK_EX)
                most = max(most, size_of(tmp_path / "c"))
    assert [process.exitcode for process in processes] == [0] * 4
    assert 2_000_000 < most <= 3_000_000 + 100


def test_what_was_read_longest_ago_goes_first(tmp_path):
    disk = Disk(str(tmp_path), 1_000_000)
    for number in range(9):
        assert disk.write(f"{number}", bytes(100_000))
        os.utime(tmp_path / f"{number}", (number, number))
    assert disk.read("0") is not None
    assert disk.write("9", bytes(100_000))
    assert disk.write("10", bytes(100_000))
    assert disk.read("1") is None
    assert disk.read("0") is not None
    assert disk.read("10") is not None


KILLED = """
import sys, numpy as np
from streamshard.storage.disk import Disk
from streamshard.storage.local_store import locked
disk = Disk(sys.argv[1], 50_000_000)
print("go", flush=True)
number = 0
while True:
    disk.write(f"{sys.argv[2]}-{number}", np.random.default_rng(number).bytes(1_000_000))
    number += 1
"""


def test_a_writer_killed_at_any_moment_leaves_nothing_that_is_read(tmp_path):
    for run in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(run)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.01 * run)  # any moment will do
        process.send_signal(signal.SIGKILL)
        process.wait()
    disk = Disk(str(tmp_path), 50_000_000)
    for path in cached(tmp_path):
        number = int(path.name.partition("-")[2])
        assert bytes(disk.read(path.name)) == np.random.default_rng(number).bytes(1_000_000)
    for path in tmp_path.glob(".tmp-*"):
        os.utime(path, (0, 0))
    small = Disk(str(tmp_path), 1_500_000)  # less than two files: room has to be made, however early the kills came
    assert small.write("new", bytes(1_000_000))
    assert not list(tmp_path.glob(".tmp-*"))
    assert size_of(tmp_path) <= 1_500_000 + 100


FULL = """
import json, resource, signal, sys
import streamshard as ss
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # every larger write fails, as on a full disk
url, options, transport, directory = json.loads(sys.argv[1])
dataset = ss.StreamDataset(url, storage_options=options, transport=transport, partitions=2, cache_dir=directory)
print(sum(1 for _ in dataset))
"""


def test_a_disk_that_refuses_is_survived_by_streaming(server, corpus, transport, tmp_path):
    arguments = json.dumps([corpus, server.storage_options, transport, str(tmp_path / "cache")])
    done = subprocess.run(
        [sys.executable, "-c", FULL, arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "3000\n", done.stderr
    assert done.stderr.count("going on without it") == 1
    assert not list((tmp_path / "cache" / CACHE_FOLDER).glob(".tmp-*"))


def test_readers_and_a_remover_do_not_trip_over_each_other(tmp_path):
    disk, over, wrong = Disk(str(tmp_path), 2_000_000), threading.Event(), []

    def read():
        while not over.is_set():
            for number in range(40):
                data = disk.read(f"{number}")
                if data is not None and bytes(data[:1]) != bytes([number]):
                    wrong.append(number)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        for number in range(40):
            disk.write(f"{number}", bytes([number]) * 100_000)
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("wrong", [0, "1G", LEAST_CACHE - 1, True])
def test_a_cache_that_cannot_hold_anything_is_refused(wrong, tmp_path):
    with pytest.raises(UsageError, match="cache_bytes"):
        ss.StreamDataset("s3://bucket/x", cache_dir=tmp_path, cache_bytes=wrong)


def test_a_cache_of_a_directory_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cache_dir=.*leave it out"):
        ss.StreamDataset(str(tmp_path), cache_dir=tmp_path)


def test_pieces_are_aligned_and_named_by_content_and_not_by_key(server, corpus, transport, tmp_path):
    dataset = open_it(server, corpus, transport, tmp_path / "cache")
    ids(dataset)
    drained(dataset)
    assert max(path.stat().st_size for path in cached(tmp_path / "cache" / CACHE_FOLDER)) <= PIECE + 100
    assert all(len(path.name) == 64 and "part" not in path.name for path in cached(tmp_path / "cache" / CACHE_FOLDER))
    assert (tmp_path / "cache" / CACHE_FOLDER).stat().st_mode & 0o777 == 0o700


def test_a_child_forked_while_the_lock_is_held_does_not_keep_it(tmp_path):
    disk = Disk(str(tmp_path), 1_000_000)
    disk.write("first", bytes(1000))
    with locked(tmp_path / ".lock"):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        writing = threading.Thread(target=disk.write, args=("second", bytes(1000)), daemon=True)
        writing.start()
        writing.join(timeout=20)
        assert not writing.is_alive()
        assert disk.read("second") is not None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_other_files_in_the_cache_directory_are_left_alone(server, corpus, transport, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.txt").write_bytes(bytes(3_000_000))
    ids(open_it(server, corpus, transport, tmp_path / "cache", cache_bytes=LEAST_CACHE))
    assert (tmp_path / "cache" / "thesis.txt").stat().st_size == 3_000_000


def test_a_piece_that_was_wrong_when_it_was_fetched_is_replaced(server, corpus, transport, tmp_path):
    dataset = open_it(server, corpus, transport, tmp_path / "cache")
    server.script(faults.wrong_bytes())  # one: a second could meet the block that is read again
    assert sorted(ids(dataset)) == list(range(3000))
    drained(dataset)
    ids(open_it(server, corpus, transport, tmp_path / "cache"))  # fills what was taken out
    again = open_it(server, corpus, transport, tmp_path / "cache")
    drained(again)
    server.clear()
    assert sorted(ids(again)) == list(range(3000))
    assert server.gets() == []
