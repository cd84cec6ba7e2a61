"""torchdata.nodes: a dataset or a loader is a source like any other; and both are what DCP calls Stateful."""

from __future__ import annotations

import pytest
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, Prefetcher

import streamshard as ss
from streamshard.testing import assert_exact_epochs
from tests.conftest import write_dataset


@pytest.fixture(scope="module")
def dataset_60(tmp_path_factory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "ds60", 60, per_shard=13, block_bytes=300)


def number(item):
    return item["id"]


def as_list(items):
    return [item["id"] for item in items]


def dataset_of(directory, *steps):
    return ss.StreamDataset(directory, *steps, partitions=12, shuffle_buffer=9, seed=5)


def dataset_node(directory):
    return Batcher(Mapper(IterableWrapper(dataset_of(directory)), number), 4, drop_last=False)


def loader_node(directory):
    return IterableWrapper(ss.StreamLoader(dataset_of(directory), batch_size=4, collate=as_list))


def tracked_node(directory):
    return IterableWrapper(ss.track(DataLoader(dataset_of(directory), batch_size=4, collate_fn=as_list)))


@pytest.mark.parametrize("node", [dataset_node, loader_node, tracked_node])
def test_a_node_over_it_resumes_in_every_epoch(dataset_60, node):
    assert_exact_epochs(lambda: Loader(node(dataset_60), restart_on_stop_iteration=False), stops=(1, 7, -1))


@pytest.mark.parametrize("node", [dataset_node, loader_node])
def test_by_default_the_rest_after_the_last_batch_is_the_next_epoch(dataset_60, node):
    loader = Loader(node(dataset_60))
    epochs, state = [], None
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch)
            state = state or (loader.state_dict() if len(epochs[-1]) == 15 else None)
    resumed = Loader(node(dataset_60))
    resumed.load_state_dict(state)
    assert list(resumed) == epochs[1]


@pytest.mark.parametrize("stop", [1, 7, 14])
def test_behind_a_prefetcher_it_resumes_too(dataset_60, stop):
    def loader(source):
        return Loader(Prefetcher(IterableWrapper(source), prefetch_factor=4, snapshot_frequency=3))

    with loader_node(dataset_60).iterable as source, loader_node(dataset_60).iterable as again:
        whole = loader(source)
        first = []
        for batch in whole:
            first.append(batch)
            if len(first) == stop:
                state = whole.state_dict()
        second = list(whole)
        resumed = loader(again)
        resumed.load_state_dict(state)
        assert list(resumed) == first[stop:]
        assert list(resumed) == second


def test_datasets_and_loaders_are_stateful(dataset_60):
    dataset = dataset_of(dataset_60)
    assert isinstance(dataset, Stateful)
    assert isinstance(ss.StreamLoader(dataset, batch_size=4, collate=as_list), Stateful)
    assert isinstance(ss.track(DataLoader(dataset, batch_size=4, collate_fn=as_list)), Stateful)
    assert isinstance(ss.GatheredState(dataset), Stateful)
