"""Blocks that another thread decompresses are the blocks that the consumer would have decompressed."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamshard as ss
from streamshard.errors import DataError
from streamshard.prefetch import inflate
from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.inflate import Block, Inflater
from streamshard.prefetch.plan import BlockPiece
from streamshard.shard.compression import compress, decompress_many
from streamshard.storage.open import open_store

BLOCK = 64 << 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    """2000 rows of tokens in 38 blocks of 64 KB."""
    path = str(tmp_path_factory.mktemp("data") / "tokens")
    rng = np.random.default_rng(0)
    with ss.DatasetWriter(path, block_bytes=BLOCK) as writer:
        for number in range(2000):
            writer.write({"id": number, "tokens": rng.integers(0, 300, 600, dtype=np.uint16)})
    return path


@pytest.fixture
def blocks(directory) -> list[Block]:
    manifest = ss.open_manifest(directory)
    store = open_store(directory)
    index = ShardAccess(store, manifest).index(0)
    pieces = [BlockPiece(0, number, index) for number in range(len(index.samples))]
    data = memoryview(store.read(manifest.key(0)))
    return [Block(p, data[int(index.offsets[p.block]) : int(index.offsets[p.block + 1])]) for p in pieces]


@pytest.fixture
def inflater() -> Inflater:
    return Inflater()


@given(st.lists(st.binary(min_size=1, max_size=5000), max_size=8))
@settings(deadline=None)
def test_many_frames_come_back_as_they_were(contents):
    frames = [memoryview(compress(content)) for content in contents]
    assert list(map(bytes, decompress_many(frames, list(map(len, contents))))) == contents


def test_a_frame_that_does_not_fit_or_is_damaged_is_refused():
    frame = memoryview(compress(bytes(range(200)) * 50))
    broken = bytearray(frame)
    broken[len(broken) // 2] ^= 1
    for frames, sizes, message in (
        ([frame], [9_999], "the zstd header declares 10000 bytes where the index says 9999"),
        ([frame, memoryview(broken)], [10_000, 10_000], "one of 2 zstd frames does not decode"),
        ([frame], [1 << 40], "above the limit"),
    ):
        with pytest.raises(DataError, match=message):
            decompress_many(frames, sizes)


def test_a_block_that_was_offered_is_decompressed_once_and_taken_as_it_is(blocks, inflater):
    for block in blocks[:-1]:  # the last one is too small to be worth it
        inflater.offer(block)
        inflater.offer(block)
    for block in blocks[:-1]:
        assert block.done.wait(10)
        assert len(inflater.take(block)) == block.size
        assert not block.claim()


def test_a_block_that_nobody_began_is_left_to_the_consumer(blocks, inflater):
    assert blocks[0].claim()  # as the consumer does when it comes first
    inflater.offer(blocks[0])
    inflater.offer(blocks[1])
    assert blocks[1].done.wait(10)
    assert not blocks[0].done.is_set()
    assert inflater.take(blocks[2]) is None


def test_a_damaged_block_is_left_to_the_consumer_with_those_of_its_call(blocks, inflater):
    blocks[0].frame = memoryview(bytes(len(blocks[0].frame)))
    inflater.offer(blocks[0])
    assert blocks[0].done.wait(10)
    assert inflater.take(blocks[0]) is None


def test_what_is_held_decompressed_is_bounded(blocks, inflater, monkeypatch):
    monkeypatch.setattr(inflate, "_MOST", 2 * BLOCK + BLOCK // 2)
    for block in blocks[:5]:
        inflater.offer(block)
    assert [block.done is not None for block in blocks[:5]] == [True, True, False, False, False]
    inflater.take(blocks[0])
    inflater.offer(blocks[2])
    assert blocks[2].done is not None


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("provenance", [False, True])
def test_the_samples_are_the_same_with_and_without_it(directory, monkeypatch, partitions, provenance):
    def read():
        dataset = ss.StreamDataset(directory, partitions=partitions, seed=3, provenance=provenance)
        return [(s["id"], s["tokens"].tobytes(), s.get("__ref__")) for s in dataset]

    monkeypatch.setattr(Inflater, "helps", staticmethod(lambda: True))
    ahead = read()
    monkeypatch.setattr(Inflater, "helps", staticmethod(lambda: False))
    assert read() == ahead
    assert sorted(number for number, *_ in ahead) == list(range(2000))


def damaged(directory, copy) -> str:
    """A copy with one wrong byte in the middle of its shard."""
    shutil.copytree(directory, copy)
    (shard,) = (copy / "shards").iterdir()
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return str(copy)


@pytest.mark.parametrize("helps", [True, False])
def test_a_damaged_block_is_the_same_error_with_and_without_it(directory, tmp_path, monkeypatch, helps):
    monkeypatch.setattr(Inflater, "helps", staticmethod(lambda: helps))
    copy = damaged(directory, tmp_path / "copy")
    with pytest.raises(ss.CorruptError, match=r"block \d+ .*the object is damaged or was replaced"):
        list(ss.StreamDataset(copy, partitions=1, shuffle=False))


def inflating_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("streamshard-inflate")


def test_all_iterations_share_one_thread_and_a_forked_child_has_its_own(directory, monkeypatch):
    monkeypatch.setattr(Inflater, "helps", staticmethod(lambda: True))
    first, second = (iter(ss.StreamDataset(directory, partitions=1, seed=seed)) for seed in range(2))
    for _ in range(100):
        next(first), next(second)
    assert inflating_threads() == 1
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            status = len(list(ss.StreamDataset(directory, partitions=2))) != 2000 or inflating_threads() != 1
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_it_is_used_where_there_is_another_core():
    assert Inflater.helps() == (len(os.sched_getaffinity(0)) > 1)
