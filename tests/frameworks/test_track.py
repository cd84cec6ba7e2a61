"""`track`: a torch DataLoader with the exact state of what it has yielded."""

from __future__ import annotations

import logging
import multiprocessing

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import streamshard as ss
from streamshard.testing import assert_exact_resume
from tests.conftest import write_dataset


def flat(batches):
    return [number for batch in batches for number in batch]


def as_list(items):
    return [item["id"] for item in items]


def small(item):
    return {"id": item["id"], "pair": np.array([item["id"], 1], np.int64)}


def even(item):
    return item["id"] % 2 == 0


def none_to_two(item):
    return [{"id": item["id"]} for _ in range(item["id"] % 3)]


@pytest.fixture(scope="module")
def dataset_61(tmp_path_factory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "ds61", 61, per_shard=11, block_bytes=200)


@pytest.fixture(autouse=True)
def quick_forkserver():
    multiprocessing.get_context("forkserver").set_forkserver_preload(["streamshard", __name__])


def tracked(
    directory, *steps, workers=0, method="fork", persistent=False, batch_size=4, parts=12, drop_last=False, **options
):
    split = {"batch_size": batch_size, "collate_fn": as_list, "num_workers": workers, "drop_last": drop_last}
    if workers:
        split |= {"multiprocessing_context": method, "persistent_workers": persistent}
    dataset = ss.StreamDataset(directory, *steps, partitions=parts, shuffle_buffer=7, seed=5, **options)
    return ss.track(DataLoader(dataset, **split))


COMBINATIONS = [(0, None, False)] + [
    pytest.param(workers, method, persistent, marks=[pytest.mark.slow] if method == "spawn" and not persistent else [])
    for workers in (1, 2, 3)
    for method in ("fork", "forkserver", "spawn")
    for persistent in (False, True)
    if method == "fork" or workers == 2
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "method", "persistent"), COMBINATIONS)
@pytest.mark.parametrize("epoch", [0, 1])
def test_the_state_is_that_of_what_was_yielded(dataset_61, workers, method, persistent, epoch):
    def loader():
        return tracked(dataset_61, ss.Map(small), workers=workers, method=method, persistent=persistent)

    whole = loader()
    epochs, states = [], {}
    for number in range(3):
        states[number, 0] = whole.state_dict()
        epochs.append([])
        for batch in whole:
            epochs[-1].append(batch)
            states[number, len(epochs[-1])] = whole.state_dict()
    assert all(sorted(flat(found)) == list(range(61)) for found in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    last = len(epochs[epoch])
    stops = [0, 1, 5, last] if method in (None, "fork") else [5]
    for stop in stops:
        resumed = loader()
        resumed.load_state_dict(states[epoch, stop])
        assert list(resumed) == epochs[epoch][stop:]
        if stop == 5:
            assert list(resumed) == epochs[epoch + 1]
    finished = loader()
    finished.load_state_dict(states[epoch + 1, 0])
    assert list(finished) == epochs[epoch + 1]
    for each in (whole, resumed, finished):
        each.close()


PIPELINES = {
    "filter": ((ss.Filter(even),), {}),
    "flat map": ((ss.FlatMap(none_to_two), ss.Map(small)), {}),
    "batch step": ((ss.Map(small), ss.Batch(3, collate_fn=as_list)), {"batch_size": None}),
    "drop last": ((ss.Map(small),), {"drop_last": True}),
    "few samples": ((ss.Map(small),), {"batch_size": 64}),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_any_pipeline_resumes_at_every_batch(dataset_61, name, workers):
    steps, options = PIPELINES[name]
    if options.get("batch_size", 4) is None:
        options = {**options, "parts": 4}
    assert_exact_resume(lambda: _plain(tracked(dataset_61, *steps, workers=workers, **options)), chain=1)


def _plain(loader):
    """Without the user's collate function where items are batches already."""
    if loader._loader.batch_size is None:
        loader._loader.collate_fn._collate = _itself
    return loader


def _itself(item):
    return item


def test_contents_are_in_the_state_without_workers(dataset_61):
    loader = tracked(dataset_61, ss.Map(small), snapshot="contents")
    batches = iter(loader)
    head = [next(batches), next(batches)]
    state = loader.state_dict()
    assert state["contents"]
    resumed = tracked(dataset_61, ss.Map(small), snapshot="contents")
    resumed.load_state_dict(state)
    assert sorted(flat(head + list(resumed))) == list(range(61))


def test_a_state_resumes_on_other_workers_each_sample_once(dataset_61):
    loader = tracked(dataset_61, workers=3)
    batches = iter(loader)
    head = [next(batches) for _ in range(7)]
    state = loader.state_dict()
    batches.close()
    for workers in (0, 1, 2, 4):
        resumed = tracked(dataset_61, workers=workers)
        resumed.load_state_dict(state)
        assert sorted(flat(head + list(resumed))) == list(range(61)), workers


def test_a_state_loaded_while_persistent_workers_run_reaches_new_ones(dataset_61):
    loader = tracked(dataset_61, workers=2, persistent=True)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    rest = list(batches)
    loader.load_state_dict(state)
    assert list(loader) == rest
    loader.close()


def test_without_a_state_an_abandoned_pass_begins_again_and_says_so(dataset_61, caplog):
    loader = tracked(dataset_61, workers=1)
    batches = iter(loader)
    first = next(batches)
    batches.close()
    with caplog.at_level(logging.WARNING, "streamshard"):
        assert next(iter(loader)) == first
    assert "left in the middle" in caplog.text


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 61, None])
def test_the_length_is_the_number_of_batches(dataset_61, workers, drop_last, batch_size):
    if batch_size is None and drop_last:
        pytest.skip("torch refuses drop_last without a batch size")
    loader = tracked(dataset_61, workers=workers, batch_size=batch_size, drop_last=drop_last)
    if batch_size is None:
        loader._loader.collate_fn._collate = _itself
    expected = len(loader)
    batches = iter(loader)
    got = [batch for _, batch in zip(range(3), batches, strict=False)]
    assert len(loader) == expected
    state = loader.state_dict()
    got += list(batches)
    assert len(got) == expected
    resumed = tracked(dataset_61, workers=workers, batch_size=batch_size, drop_last=drop_last)
    resumed.load_state_dict(state)
    assert len(resumed) == expected  # as other loaders count: with what an earlier life had


def test_an_unknown_length_says_why(dataset_61):
    with pytest.raises(TypeError, match=r"what leaves Filter\(even\) is known only after reading"):
        len(tracked(dataset_61, ss.Filter(even)))
    with pytest.raises(TypeError, match="repeat=True has no end"):
        len(tracked(dataset_61, repeat=True))


def test_pinned_batches_keep_their_stamp():
    from streamshard.frameworks.track import _Stamped

    class Batch:
        def __init__(self):
            self.pinned = False

        def pin_memory(self):
            self.pinned = True
            return self

    from torch.utils.data._utils.pin_memory import pin_memory

    marks = {0: (1, False, (0, 1))}
    found = pin_memory(_Stamped(Batch(), marks, 1))
    assert found.batch.pinned
    assert found.marks == marks
    assert isinstance(found.marks[0], tuple)


def test_the_caller_s_own_loader_is_left_as_it_is(dataset_61):
    dataset = ss.StreamDataset(dataset_61, partitions=4)
    loader = DataLoader(dataset, batch_size=4, collate_fn=as_list)
    before = dict(loader.__dict__)
    list(ss.track(loader))
    assert loader.__dict__ == before


def test_batches_confirmed_by_call_are_the_state(dataset_61):
    loader = tracked(dataset_61, workers=2)
    loader.confirm_by_call()
    batches = iter(loader)
    got = [next(batches) for _ in range(5)]
    loader.confirm()
    loader.confirm()
    state = loader.state_dict()
    resumed = tracked(dataset_61, workers=2)
    resumed.load_state_dict(state)
    assert list(resumed) == got[2:] + list(batches)
    for _ in range(14):
        loader.confirm()
    assert loader.state_dict()["ended"] == 0
    loader.confirm_end()
    assert loader.state_dict()["ended"] == 1
    with pytest.raises(ss.UsageError, match="more often than batches were handed out"):
        loader.confirm()


class Wrapped(torch.utils.data.IterableDataset):
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


def test_what_cannot_be_tracked_is_refused_with_a_cure(dataset_61):
    dataset = ss.StreamDataset(dataset_61)
    with pytest.raises(ss.UsageError, match="a StreamLoader has its own exact state"):
        ss.track(ss.StreamLoader(dataset))
    with pytest.raises(ss.UsageError, match="reads a Wrapped; put what it does into steps"):
        ss.track(DataLoader(Wrapped(dataset)))
    contents = ss.StreamDataset(dataset_61, snapshot="contents")
    with pytest.raises(ss.UsageError, match=r"StreamLoader\(dataset, workers=2\)"):
        ss.track(DataLoader(contents, num_workers=2))
    with pytest.raises(ss.UsageError, match="partitions=4 cannot be divided among 1 ranks x 3 workers"):
        ss.track(DataLoader(ss.StreamDataset(dataset_61, partitions=4), num_workers=3))


def test_a_pass_handed_out_to_its_end_and_not_confirmed_is_in_the_middle(dataset_61):
    loader = tracked(dataset_61)
    loader.confirm_by_call()
    batches = list(loader)
    for _ in batches[:-1]:
        loader.confirm()
    assert loader.in_the_middle
    resumed = tracked(dataset_61)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == batches[-1:]
    loader.confirm()
    assert not loader.in_the_middle


def test_an_epoch_begun_before_the_last_is_confirmed_is_refused(dataset_61):
    loader = tracked(dataset_61)
    loader.confirm_by_call()
    list(loader)
    with pytest.raises(ss.UsageError, match="the last 16 batches of the one before are not confirmed: call confirm"):
        next(iter(loader))


def test_another_epoch_set_after_the_end_is_in_the_state(dataset_61):
    dataset = ss.StreamDataset(dataset_61, partitions=4)
    first = [sample["id"] for sample in dataset]
    dataset.set_epoch(0)
    resumed = ss.StreamDataset(dataset_61, partitions=4)
    resumed.load_state_dict(dataset.state_dict())
    assert [sample["id"] for sample in resumed] == first == [sample["id"] for sample in dataset]


def test_a_rank_s_state_is_not_gathered_without_the_others(dataset_61):
    dataset = ss.StreamDataset(dataset_61, partitions=4, topology=ss.Topology(0, 2))
    next(iter(dataset))
    with pytest.raises(ss.UsageError, match="that of rank 0/2, and there is no process group"):
        ss.gather_state(dataset.state_dict())
