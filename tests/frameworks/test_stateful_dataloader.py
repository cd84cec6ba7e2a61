"""torchdata's StatefulDataLoader saves a StreamDataset exactly, and its states merge into one that resumes anywhere."""

from __future__ import annotations

import itertools
import multiprocessing

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

import streamshard as ss
from streamshard.testing import assert_exact_epochs
from tests.conftest import write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def as_list(items):
    return [item["id"] for item in items]


def flat(batches):
    return [number for batch in batches for number in batch]


@pytest.fixture(scope="module")
def dataset_150(tmp_path_factory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "ds150", 150, per_shard=31, block_bytes=300)


@pytest.fixture(autouse=True)
def quick_forkserver():
    multiprocessing.get_context("forkserver").set_forkserver_preload(["streamshard", "torchdata", __name__])


def stateful(
    directory, *steps, workers=0, method="fork", persistent=False, every=1, batch_size=4, topology=None, **options
):
    split = {"batch_size": batch_size, "collate_fn": as_list, "num_workers": workers, "snapshot_every_n_steps": every}
    if workers:
        split |= {"multiprocessing_context": method, "persistent_workers": persistent}
    dataset = ss.StreamDataset(directory, *steps, partitions=48, shuffle_buffer=9, seed=5, topology=topology, **options)
    return StatefulDataLoader(dataset, **split)


def set_epoch(loader, epoch):
    loader.dataset.set_epoch(epoch)


QUICK = {
    (1, "fork", False, 1),
    (1, "fork", True, 7),
    (3, "fork", False, 7),
    (3, "fork", True, 1),
    (3, "forkserver", True, 7),
}
COMBINATIONS = [(0, None, False, 1)] + [
    pytest.param(*combination, marks=[] if combination in QUICK else [pytest.mark.slow])
    for combination in itertools.product((1, 3), ("fork", "forkserver", "spawn"), (False, True), (1, 7))
]


@pytest.mark.parametrize(("workers", "method", "persistent", "every"), COMBINATIONS)
def test_every_kind_of_loader_resumes_in_the_middle_at_the_last_batch_and_at_the_end_of_an_epoch(
    dataset_150, workers, method, persistent, every
):
    report = assert_exact_epochs(
        lambda: stateful(dataset_150, workers=workers, method=method, persistent=persistent, every=every),
        epochs=3,
        stops=(3, 17, -1),
        set_epoch=set_epoch,
    )
    assert report.resumes == 15


def test_without_workers_epochs_advance_by_themselves(dataset_150):
    assert_exact_epochs(lambda: stateful(dataset_150))


def test_an_unstarted_second_iterator_of_persistent_workers_is_saved_as_the_start_of_its_epoch(dataset_150):
    loader = stateful(dataset_150, workers=1, persistent=True, every=7)
    first = list(loader)
    set_epoch(loader, 1)
    batches = iter(loader)
    head = [
        next(batches),
        next(batches),
    ]  # the snapshot is that of step 0, from before the workers' second iterators began
    resumed = stateful(dataset_150, workers=1, persistent=True, every=7)
    resumed.load_state_dict(loader.state_dict())
    rest = list(resumed)
    assert sorted(flat(head + rest)) == list(range(150))
    assert head + rest != first


@pytest.mark.parametrize("workers", [1, 3])
def test_states_of_workers_merge_into_one_that_resumes_in_any_topology(dataset_150, workers):
    heads, states = [], []
    for rank in range(2):
        loader = stateful(dataset_150, workers=workers, topology=ss.Topology(rank, 2))
        batches = iter(loader)
        heads += [next(batches) for _ in range(4)]
        states.append(loader.state_dict())
        del batches
    full = ss.merge_states(states)
    assert full["scope"] == "full"
    for ranks, workers_now in ((1, 0), (1, 3), (3, 1), (4, 2)):
        rest = []
        for rank in range(ranks):
            loader = stateful(dataset_150, workers=workers_now, topology=ss.Topology(rank, ranks))
            loader.dataset.load_state_dict(full)
            batches = iter(loader)
            rest += [next(batches), next(batches)]
            resumed = stateful(dataset_150, workers=workers_now, topology=ss.Topology(rank, ranks))
            resumed.load_state_dict(loader.state_dict())
            rest += list(resumed)
        assert sorted(flat(heads + rest)) == list(range(150)), (ranks, workers_now)


def test_a_state_saved_between_snapshots_cannot_be_merged_without_repeating(dataset_150):
    loader = stateful(dataset_150, workers=3, every=7)
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    with pytest.raises(ss.StateError, match="2 batches after its last snapshot.* snapshot_every_n_steps=1"):
        ss.merge_states([loader.state_dict()])
    for _ in range(5):
        next(batches)
    assert ss.merge_states([loader.state_dict()])["scope"] == "full"


def test_the_state_of_a_loader_without_workers_merges_too(dataset_150):
    loader = stateful(dataset_150)
    batches = iter(loader)
    head = [next(batches) for _ in range(5)]
    dataset = ss.StreamDataset(dataset_150, partitions=48, shuffle_buffer=9, seed=5)
    dataset.load_state_dict(ss.merge_states([loader.state_dict()]))
    assert sorted(flat(head) + [sample["id"] for sample in dataset]) == list(range(150))


def test_merged_at_the_end_of_an_epoch_it_resumes_to_the_next(dataset_150):
    loader = stateful(dataset_150, workers=3)
    first = list(loader)
    dataset = ss.StreamDataset(dataset_150, partitions=48, shuffle_buffer=9, seed=5)
    dataset.load_state_dict(ss.merge_states([loader.state_dict()]))
    assert dataset.epoch == 1
    second = [sample["id"] for sample in dataset]
    assert sorted(second) == sorted(flat(first))
