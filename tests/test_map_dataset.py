"""Random access by index, and a sampler that resumes like everything else."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import streamshard as ss
from streamshard.order.permutation import IndexPermutation
from streamshard.testing import assert_exact_resume
from tests.conftest import sample


@given(st.integers(1, 3000), st.integers(0, 2**64))
@settings(max_examples=100, deadline=None)
def test_the_index_permutation_is_a_bijection(size, key):
    assert sorted(IndexPermutation(key, size)(np.arange(size)).tolist()) == list(range(size))


def test_the_index_permutation_never_changes():
    assert IndexPermutation(17, 10)(np.arange(10)).tolist() == [1, 9, 6, 2, 8, 3, 5, 0, 7, 4]


def test_it_has_a_length_and_items_from_either_end(dataset_203):
    dataset = ss.MapDataset(dataset_203)
    assert len(dataset) == 203
    assert [dataset[i]["id"] for i in (0, 5, 202, -1, -203, np.int64(7))] == [0, 5, 202, 202, 0, 7]
    assert dataset[41]["tokens"].tolist() == sample(41)["tokens"].tolist()


def test_slices_and_lists_come_in_the_order_asked_for_with_repeats(dataset_203):
    dataset = ss.MapDataset(dataset_203)
    assert [item["id"] for item in dataset[190:230:3]] == list(range(203))[190:230:3]
    assert [item["id"] for item in dataset[::-50]] == list(range(203))[::-50]
    assert [item["id"] for item in dataset[[7, 200, 7, -1]]] == [7, 200, 7, 202]
    assert dataset[5:5] == []


def test_a_list_reads_each_block_once_and_neighbours_together(dataset_1000):
    dataset = ss.MapDataset(dataset_1000)
    dataset[0]
    access = dataset._opened()
    before = access.requests
    dataset[list(range(77))]
    assert access.requests - before == 1


def test_samples_of_a_cached_block_are_not_shared(dataset_203):
    dataset = ss.MapDataset(dataset_203)
    first = dataset[3]
    first["id"] = "changed"
    first["tokens"][:] = 0
    assert dataset[3]["id"] == 3
    assert dataset[3]["tokens"].tolist() == sample(3)["tokens"].tolist()


@pytest.mark.parametrize("index", [203, -204])
def test_an_index_outside_is_an_index_error_that_says_the_size(dataset_203, index):
    with pytest.raises(IndexError, match=rf"index {index} is outside of a dataset of 203 samples"):
        ss.MapDataset(dataset_203)[index]


def test_an_index_that_is_no_number_is_refused(dataset_203):
    with pytest.raises(ss.UsageError, match="index 'x' of type str must be an int"):
        ss.MapDataset(dataset_203)["x"]


def test_it_travels_to_workers(dataset_203):
    dataset = ss.MapDataset(dataset_203)
    dataset[0]
    assert pickle.loads(pickle.dumps(dataset))[9]["id"] == 9  # noqa: S301
    strip = DataLoader(dataset, batch_size=7, num_workers=2, collate_fn=lambda items: [item["id"] for item in items])
    assert sorted(itertools.chain.from_iterable(strip)) == list(range(203))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("repeat", [True, False])
def test_the_sampler_resumes_at_every_index(dataset_203, shuffle, repeat):
    dataset = ss.MapDataset(dataset_203)
    assert_exact_resume(
        lambda: dataset.sampler(seed=3, shuffle=shuffle, repeat=repeat, partitions=4),
        items=450 if repeat else None, stops=range(0, 203, 7),
    )  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 3), (3, 12), (12, 1), (2, 6)])
def test_ranks_share_each_epoch_and_resume_on_other_numbers(dataset_203, before, after):
    dataset = ss.MapDataset(dataset_203)

    def sampler(rank, ranks, state=None):
        made = dataset.sampler(seed=3, partitions=12, topology=ss.Topology(rank, ranks))
        if state is not None:
            made.load_state_dict(state)
        return made

    whole = list(sampler(0, 1))
    assert sorted(whole) == list(range(203))
    samplers = [sampler(rank, before) for rank in range(before)]
    heads = [list(itertools.islice(iter(s), 24 // before)) for s in samplers]
    assert [index for group in zip(*heads, strict=True) for index in group] == whole[:24]
    state = ss.merge_states([s.state_dict() for s in samplers])
    tails = [list(sampler(rank, after, state)) for rank in range(after)]
    assert [i for group in itertools.zip_longest(*tails) for i in group if i is not None] == whole[24:]


def test_the_samplers_epochs_differ_and_follow_set_epoch(dataset_203):
    sampler = ss.MapDataset(dataset_203).sampler(seed=3)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert len(sampler) == 203


def test_a_sampler_of_another_seed_refuses_the_state(dataset_203):
    dataset = ss.MapDataset(dataset_203)
    with pytest.raises(ss.StateError, match="seed=1, and this dataset has seed=2"):
        dataset.sampler(seed=2).load_state_dict(dataset.sampler(seed=1).state_dict())


def test_a_sampler_set_to_the_next_epoch_saves_the_one_it_has_read(dataset_203):
    dataset = ss.MapDataset(dataset_203)
    sampler = dataset.sampler(seed=3)
    list(sampler)
    sampler.set_epoch(1)
    resumed = dataset.sampler(seed=3)
    resumed.load_state_dict(sampler.state_dict())
    state = sampler.state_dict()
    assert list(resumed) == list(sampler)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert list(resumed) == []


def test_a_sampler_refuses_a_state_that_it_cannot_place_every_time(dataset_203, dataset_1000):
    dataset = ss.MapDataset(dataset_203)
    part = dataset.sampler(partitions=4, topology=ss.Topology(1, 2))
    next(iter(part))
    whole = dataset.sampler(partitions=4)
    whole.load_state_dict(part.state_dict())
    for _ in range(2):
        with pytest.raises(ss.StateError, match="rank 1/2"):
            next(iter(whole))
    other = ss.MapDataset(dataset_1000).sampler(partitions=4, topology=ss.Topology(1, 2))
    with pytest.raises(ss.StateError, match="a permutation of other samples cannot go on"):
        other.load_state_dict(part.state_dict(), allow={"dataset"})
