"""Peers get the batches that one of them reads, with the state, and hear of its end."""

from __future__ import annotations

import shutil
import threading

import pytest

import streamshard as ss
from streamshard.errors import StorageError, UsageError
from streamshard.loading import broadcast
from streamshard.loading.formed import Formed
from tests.conftest import write_dataset
from tests.distributed.launch import launch, start

COUNT = 203


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A dataset, and a copy of it that has a manifest only: who reads there fails."""
    folder = tmp_path_factory.mktemp("broadcast")
    url = write_dataset(folder / "ds", COUNT)
    shutil.copytree(url, folder / "bare", ignore=shutil.ignore_patterns("shards"))
    return url, str(folder / "bare"), folder


@pytest.fixture(scope="module")
def shared(places):
    url, bare, folder = places
    return launch("scenarios_broadcast.shared", 4, folder / "answers", url, bare, str(folder))


@pytest.mark.parametrize("name", ["lists", "tensors", "workers", "whole", "objects"])
def test_peers_get_what_the_reader_would_have_read_alone(shared, name):
    for reader, peer in (shared[:2], shared[2:]):
        assert reader["alone"] == reader[name] == peer[name]
    assert sorted(i for found in shared[::2] for batch in found[name] for i in batch) == list(range(COUNT))


def test_the_state_is_the_reader_s_on_all_after_every_batch(shared):
    for reader, peer in (shared[:2], shared[2:]):
        assert len(reader["states"]) == len(reader["lists"])
        assert reader["states"] == peer["states"]


def test_the_next_epoch_is_shared_too(shared):
    for reader, peer in (shared[:2], shared[2:]):
        assert reader["next epoch"] == peer["next epoch"] != reader["lists"]
    assert sorted(i for found in shared[::2] for batch in found["next epoch"] for i in batch) == list(range(COUNT))


def test_iterations_that_are_left_begin_again_together(shared):
    for found in shared:
        assert found["parts"] == [found["lists"][:3], found["lists"][:1]]


def test_all_go_on_from_the_state_of_a_peer(shared):
    for found in shared:
        assert found["rest"] == found["lists"][5:]


def test_peers_hear_what_the_reader_failed_with(shared):
    failed = [(reader, peer) for reader, peer in (shared[:2], shared[2:]) if reader["failure"]]
    assert len(failed) == 1  # the other data-parallel rank does not have the sample
    reader, peer = failed[0]
    assert "a hundred" in reader["failure"]
    assert "which reads the batches of the group" in peer["failure"]
    assert "a hundred" in peer["failure"]


def test_peers_of_a_killed_reader_are_told_at_once(places, tmp_path):
    url, bare, _ = places
    done = start("scenarios_broadcast.killed", 4, tmp_path, url, bare, str(tmp_path))
    assert done.returncode != 0
    for rank in (1, 2, 3):
        seconds, _, message = (tmp_path / f"told-{rank}").read_text().partition(" ")
        assert float(seconds) < 10
        assert message.startswith("global rank 0, which reads the batches of the group [0, 1, 2, 3], is gone")


def test_a_batch_that_does_not_arrive_is_the_peer_s_error_and_nobody_hangs(shared):
    assert [found["arrived"] for found in shared] == ["", "it does not arrive"] * 2


def test_a_reader_that_leaves_alone_is_no_end_of_an_epoch_to_its_peers(shared):
    assert all("has left this iteration" in found["leaves"] for found in shared[1::2])


def test_processes_that_are_no_peers_cannot_share_batches(shared):
    for found in shared[2:]:  # shared[:2] are the first of their data-parallel groups, and read
        assert "would read data-parallel rank 1 of 2, epoch 0" in found["not peers"]
        assert "reads data-parallel rank 0 of 2" in found["not peers"]


def test_batches_cannot_be_shared_without_a_process_group_or_without_reading_ahead(places):
    dataset = ss.StreamDataset(places[0])
    with pytest.raises(UsageError, match="init_process_group"):
        ss.broadcast_batches(ss.StreamLoader(dataset, batch_size=2, collate=list), None)
    with pytest.raises(UsageError, match="prefetch=1 or more"):
        ss.broadcast_batches(ss.StreamLoader(dataset, batch_size=2, collate=list, prefetch=0), None)


class Recorder:
    """A channel that keeps the kinds of messages."""

    def __init__(self):
        self.ranks, self.sends, self.lock, self.kinds = [0, 1], True, threading.Lock(), []

    def send(self, kind, *_):
        self.kinds.append(kind)


class Waiting:
    """A source that waits for its store after one batch, until it is interrupted."""

    def __init__(self):
        self.interrupted = False

    def batches(self):
        yield Formed([1], {})
        raise StorageError("the iteration was closed" if self.interrupted else "the store is gone")

    def interrupt(self):
        self.interrupted = True

    def close(self):
        pass


@pytest.mark.parametrize(("leaves", "last"), [(True, broadcast._LEFT), (False, broadcast._FAILED)])
def test_a_reader_that_leaves_while_it_waits_for_the_store_has_not_failed(leaves, last):
    channel, waiting = Recorder(), Waiting()
    sent = broadcast.SentSource(waiting, channel, "here")
    batches = sent.batches()
    next(batches)
    if leaves:
        sent.interrupt()
    with pytest.raises(StorageError):
        next(batches)
    sent.close()
    assert channel.kinds == [broadcast._BEGIN, broadcast._BATCH, last]
