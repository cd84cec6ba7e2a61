"""A resumed run is exactly the rest of the uninterrupted one: at every item, whatever the settings."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import streamshard as ss
from streamshard.testing import assert_exact_resume
from streamshard.testing.resume import digest
from tests import naive
from tests.conftest import sample, write_dataset


def ids(dataset, count=None):
    return [item["id"] for item in itertools.islice(iter(dataset), count)]


def even(item):
    return item["id"] % 2 == 0


def low(item):
    """Empties partitions that hold high ids only."""
    return item["id"] < 60


def zero_to_three(item):
    return [{"id": item["id"], "part": part} for part in range(item["id"] % 4)]


def noisy(item, rng):
    return {**item, "noise": int(rng.integers(1 << 40))}


def both(items):
    total = sum(item["id"] for item in items)
    return [{**item, "group": total} for item in items]


PIPELINES = {
    "plain": (),
    "map": (ss.Map(noisy, rng=True),),
    "filter": (ss.Filter(even),),
    "emptying filter": (ss.Filter(low),),
    "flat map": (ss.FlatMap(zero_to_three),),
    "filter, flat map, noise": (ss.Filter(even), ss.FlatMap(zero_to_three), ss.Map(noisy, rng=True)),
    "flat map, flat map": (ss.FlatMap(zero_to_three), ss.FlatMap(zero_to_three)),
    "batched map": (ss.Map(both, batch=5),),
    "flat map, batched map, filter": (ss.FlatMap(zero_to_three), ss.Map(both, batch=3), ss.Filter(even)),
    "threaded map": (ss.Map(noisy, rng=True, threads=3),),
    "filter, threaded map, flat map": (ss.Filter(even), ss.Map(noisy, rng=True, threads=2), ss.FlatMap(zero_to_three)),
    "batch": (ss.Map(lambda item: {"id": item["id"]}), ss.Batch(4)),
    "batch, drop last": (ss.Filter(even), ss.Map(lambda item: {"id": item["id"]}), ss.Batch(4, drop_last=True)),
}  # fmt: skip


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_resumes_at_every_item(tmp_path, name, snapshot):
    directory = write_dataset(tmp_path / "ds", 47, per_shard=11, block_bytes=200)
    report = assert_exact_resume(
        lambda: ss.StreamDataset(directory, *PIPELINES[name], partitions=4, shuffle_buffer=7, seed=5, snapshot=snapshot)
    )
    assert report.items >= 4


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
@pytest.mark.parametrize("parts", [1, 4, 12])
@pytest.mark.parametrize(("buffer", "interleave"), [(1, 1), (7, 4), (512, 2)])
def test_every_shape_of_the_order_resumes_at_every_item(tmp_path, parts, buffer, interleave, snapshot):
    directory = write_dataset(tmp_path / "ds", 47, per_shard=11, block_bytes=200)
    assert_exact_resume(
        lambda: ss.StreamDataset(
            directory, partitions=parts, shuffle_buffer=buffer, interleave=interleave, snapshot=snapshot
        ),
        chain=3 if parts == 4 else 1,
    )


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
def test_file_order_resumes_at_every_item(tmp_path, snapshot):
    directory = write_dataset(tmp_path / "ds", 47, per_shard=11, block_bytes=200)
    dataset = ss.StreamDataset(directory, shuffle=False)
    assert ids(dataset) == list(range(47))
    assert_exact_resume(lambda: ss.StreamDataset(directory, shuffle=False, snapshot=snapshot))


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
@pytest.mark.parametrize("name", ["plain", "flat map, batched map, filter", "batch"])
def test_an_endless_run_resumes_at_every_item_of_three_epochs(tmp_path, name, snapshot):
    directory = write_dataset(tmp_path / "ds", 31, per_shard=9, block_bytes=200)
    assert_exact_resume(
        lambda: ss.StreamDataset(
            directory, *PIPELINES[name], partitions=4, shuffle_buffer=7, repeat=True, snapshot=snapshot
        ),
        items=64 if name != "batch" else 24,
    )


@pytest.mark.parametrize("total", [3, 7, 13])
def test_fewer_samples_than_partitions_still_come_exactly_once_an_epoch(tmp_path, total):
    directory = write_dataset(tmp_path / "ds", total, per_shard=4)
    dataset = ss.StreamDataset(directory, partitions=12, repeat=True, shuffle_buffer=4)
    got = ids(dataset, 5 * total)
    for epoch in range(5):
        assert sorted(got[epoch * total : (epoch + 1) * total]) == list(range(total))
    assert_exact_resume(
        lambda: ss.StreamDataset(directory, partitions=12, repeat=True, shuffle_buffer=4), items=3 * total
    )


@pytest.mark.parametrize("parts", [1, 4, 12])
def test_the_sequence_is_that_of_the_naive_model(dataset_203, parts):
    manifest = ss.open_manifest(dataset_203)
    starts = np.cumsum([0, *manifest.samples.tolist()])
    for epoch in range(3):
        dataset = ss.StreamDataset(dataset_203, partitions=parts, shuffle_buffer=20, seed=9)
        dataset.set_epoch(epoch)
        orders = naive.partition_orders(manifest.samples.tolist(), seed=9, epoch=epoch, parts=parts, buffer=20)
        assert ids(dataset) == [int(starts[shard]) + row for shard, row in naive.in_slot_order(orders)]


def test_epochs_after_a_resume_are_complete_and_differ(dataset_203):
    dataset = ss.StreamDataset(dataset_203, partitions=4)
    first, second = ids(dataset), ids(dataset)
    iterator = iter(dataset)
    head = [next(iterator)["id"] for _ in range(50)]
    resumed = ss.StreamDataset(dataset_203, partitions=4)
    resumed.load_state_dict(dataset.state_dict())
    third, fourth = head + ids(resumed), ids(resumed)
    for epoch in (first, second, third, fourth):
        assert sorted(epoch) == list(range(203))
    assert len({tuple(epoch) for epoch in (first, second, third, fourth)}) == 4


def test_a_state_saved_at_the_end_resumes_to_the_next_epoch_as_the_finished_run_goes_on(dataset_203):
    dataset = ss.StreamDataset(dataset_203, partitions=4)
    first = ids(dataset)
    resumed = ss.StreamDataset(dataset_203, partitions=4)
    resumed.load_state_dict(dataset.state_dict())
    assert resumed.epoch == 1
    second = ids(resumed)
    assert sorted(second) == list(range(203))
    assert second != first
    assert second == ids(dataset)


def test_after_set_epoch_of_its_own_epoch_a_state_saved_at_the_end_gives_the_empty_rest_of_it(dataset_203):
    dataset = ss.StreamDataset(dataset_203, partitions=4)
    ids(dataset)
    resumed = ss.StreamDataset(dataset_203, partitions=4)
    resumed.load_state_dict(dataset.state_dict())
    resumed.set_epoch(0)
    assert ids(resumed) == []
    resumed.set_epoch(1)
    assert ids(resumed) == ids(dataset)


def test_a_state_saved_at_the_end_accepts_its_own_epoch_and_the_next_and_no_other(dataset_203):
    dataset = ss.StreamDataset(dataset_203, partitions=4)
    ids(dataset)
    resumed = ss.StreamDataset(dataset_203, partitions=4)
    resumed.load_state_dict(dataset.state_dict())
    resumed.set_epoch(1)
    with pytest.raises(ss.UsageError, match=r"set_epoch\(2\) contradicts .* at the end of epoch 0; .* set_epoch\(1\)"):
        resumed.set_epoch(2)
    assert ids(resumed) == ids(dataset)


def test_loading_twice_uses_the_last_state_and_saving_before_the_first_item_returns_it(dataset_203):
    dataset = ss.StreamDataset(dataset_203, partitions=4)
    iterator = iter(dataset)
    states = [dataset.state_dict()]
    whole = []
    for _ in range(20):
        whole.append(next(iterator)["id"])
        states.append(dataset.state_dict())
    whole += [item["id"] for item in iterator]
    other = ss.StreamDataset(dataset_203, partitions=4)
    other.load_state_dict(states[20])
    other.load_state_dict(states[7])
    assert other.state_dict() == states[7]
    assert ids(other) == whole[7:]
    other.load_state_dict(states[0])
    assert ids(other) == whole


def test_a_state_from_before_the_first_item_fits_any_reader(dataset_203):
    state = ss.StreamDataset(dataset_203).state_dict()
    got = []
    for rank in range(3):
        dataset = ss.StreamDataset(dataset_203, topology=ss.Topology(rank, 3))
        dataset.load_state_dict(state)
        got += ids(dataset)
    assert sorted(got) == list(range(203))


def test_a_failing_map_leaves_the_state_at_the_last_item_that_came_out(dataset_203):
    broken = True

    def fragile(item):
        if broken and item["id"] == 100:
            raise ZeroDivisionError
        return item

    whole = ids(ss.StreamDataset(dataset_203, ss.Map(fragile), partitions=4)) if not broken else None
    dataset = ss.StreamDataset(dataset_203, ss.Filter(even), ss.Map(fragile), partitions=4)
    got = []
    with pytest.raises(ZeroDivisionError) as caught:
        got.extend(item["id"] for item in dataset)
    assert "Map(" in caught.value.__notes__[0]
    assert "row" in caught.value.__notes__[0]
    broken = False
    whole = ids(ss.StreamDataset(dataset_203, ss.Filter(even), ss.Map(fragile), partitions=4))
    state = dataset.state_dict()
    resumed = ss.StreamDataset(dataset_203, ss.Filter(even), ss.Map(fragile), partitions=4)
    resumed.load_state_dict(state)
    rest = ids(resumed)
    assert whole[len(whole) - len(rest) :] == rest
    assert whole[len(whole) - len(rest)] == 100


def test_a_function_that_gives_another_number_of_outputs_on_resume_is_an_error(dataset_203):
    factor = 3

    def some(item):
        return [item] * factor

    dataset = ss.StreamDataset(dataset_203, ss.FlatMap(some), partitions=1)
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    factor = 2
    resumed = ss.StreamDataset(dataset_203, ss.FlatMap(some), partitions=1)
    resumed.load_state_dict(state)
    with pytest.raises(ss.StateError, match=r"gives 2 outputs .* not deterministic.*rng=True"):
        next(iter(resumed))


def test_contents_are_not_read_again(tmp_path):
    """With a contents snapshot a resume asks the store only for samples that had not been read."""
    directory = write_dataset(tmp_path / "ds", 400, per_shard=100, block_bytes=1)
    asked = []

    def watch(dataset):
        store = dataset._store
        plain = store.get
        store.get = lambda key, start, stop: asked.append((key, start, stop)) or plain(key, start, stop)
        return dataset

    options = {"partitions": 2, "shuffle_buffer": 20, "interleave": 2, "prefetch_bytes": 1}
    first = watch(ss.StreamDataset(directory, ss.FlatMap(zero_to_three), snapshot="contents", **options))
    iterator = iter(first)
    whole = [next(iterator) for _ in range(150)]
    state = first.state_dict()
    whole += list(iterator)
    manifest = ss.open_manifest(directory)
    asked.clear()
    second = watch(ss.StreamDataset(directory, ss.FlatMap(zero_to_three), snapshot="contents", **options))
    second.load_state_dict(state)
    rest = list(second)
    assert rest == whole[150:]
    blocks = [ask for ask in asked if ask[1] >= int(manifest.index_bytes.min())]
    assert len(blocks) == len(set(blocks))
    # 150 outputs come from about 100 samples; the two buffers hold 40 more, all of them already read.
    assert len(blocks) < 400 - 100 - 30


RESUME_SCRIPT = """
import json, sys, torch
import streamshard as ss
from streamshard.testing.resume import digest
from tests.test_resume import PIPELINES
directory, name, snapshot, *paths = sys.argv[1:]
for path in paths:
    dataset = ss.StreamDataset(directory, *PIPELINES[name], partitions=4, shuffle_buffer=7, seed=5, snapshot=snapshot)
    dataset.load_state_dict(torch.load(path, weights_only=True))
    print(json.dumps([digest(item).hex() for item in dataset]))
"""


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
@pytest.mark.parametrize(
    "name", ["plain", "filter, flat map, noise", "flat map, batched map, filter", "batch, drop last"]
)
def test_another_process_resumes_at_five_points(tmp_path, dataset_203, name, snapshot):
    def fresh():
        return ss.StreamDataset(
            dataset_203, *PIPELINES[name], partitions=4, shuffle_buffer=7, seed=5, snapshot=snapshot
        )

    whole = [digest(item).hex() for item in fresh()]
    total = len(whole)
    stops = [0, 1, total // 3, total - 1, total]
    paths = []
    for stop in stops:
        dataset = fresh()
        iterator = iter(dataset)
        for _ in range(stop):
            next(iterator)
        paths.append(str(tmp_path / f"{stop}.pt"))
        torch.save(dataset.state_dict(), paths[-1])
    command = [sys.executable, "-c", RESUME_SCRIPT, dataset_203, name, snapshot, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [whole[stop:] for stop in stops]


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
def test_epoch_3_resumes_at_every_item(tmp_path, snapshot):
    directory = write_dataset(tmp_path / "ds", 47, per_shard=11, block_bytes=200)

    def factory():
        dataset = ss.StreamDataset(directory, *PIPELINES["flat map"], partitions=4, shuffle_buffer=7, snapshot=snapshot)
        dataset.set_epoch(3)
        return dataset

    assert_exact_resume(factory, chain=1)


def read_rank(directory, rank, ranks, state=None, count=None, steps=(), workers=1, **options):
    """(items, states by worker) of a rank whose workers take turns, as a DataLoader with batch_size=None would."""
    dataset = ss.StreamDataset(directory, *steps, topology=ss.Topology(rank, ranks), **options)
    if state is not None:
        dataset.load_state_dict(state)
    return list(itertools.islice(iter(dataset), count)), dataset.state_dict()


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize(("before", "after"), list(itertools.product(divisors(12), divisors(12))))
def test_any_number_of_ranks_goes_on_with_the_same_global_sequence(dataset_203, before, after, repeat):
    options = {"partitions": 12, "shuffle_buffer": 7, "repeat": repeat}
    whole = ids(ss.StreamDataset(dataset_203, **options), 600)
    steps_before = 24 // before  # 24 items over all ranks: an aligned moment for every number of ranks
    lives = [read_rank(dataset_203, rank, before, count=steps_before, **options) for rank in range(before)]
    head = [item["id"] for group in zip(*(items for items, _ in lives), strict=True) for item in group]
    assert head == whole[:24]
    state = ss.merge_states([state for _, state in lives])
    limit = 240 // after if repeat else None
    rest = [read_rank(dataset_203, rank, after, state, limit, **options)[0] for rank in range(after)]
    tail = [item["id"] for group in itertools.zip_longest(*rest) for item in group if item is not None]
    assert tail == whole[24 : 24 + len(tail)]
    assert len(tail) == (240 if repeat else 203 - 24)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (3, 2), (2, 6), (6, 12), (12, 1)])
def test_with_filters_the_set_is_the_same_and_each_rank_is_in_slot_order(dataset_203, before, after):
    steps = (ss.Filter(low), ss.FlatMap(zero_to_three))
    options = {"partitions": 12, "shuffle_buffer": 7, "steps": steps}
    whole, _ = read_rank(dataset_203, 0, 1, **options)
    lives = [read_rank(dataset_203, rank, before, count=24 // before, **options) for rank in range(before)]
    state = ss.merge_states([state for _, state in lives])
    rest = [read_rank(dataset_203, rank, after, state, **options)[0] for rank in range(after)]
    key = lambda item: (item["id"], item["part"])  # noqa: E731
    got = [key(item) for items, _ in lives for item in items] + [key(item) for items in rest for item in items]
    assert sorted(got) == sorted(map(key, whole))
    assert len(got) == len(set(got))
    place = {key(item): number for number, item in enumerate(whole)}
    for items in rest:
        places = [place[key(item)] for item in items]
        assert places == sorted(places)


def test_ragged_states_still_resume_exactly_once_and_say_how_ragged_they_are(dataset_203, caplog):
    options = {"partitions": 12, "shuffle_buffer": 7}
    lives = [read_rank(dataset_203, rank, 4, count=count, **options) for rank, count in enumerate([5, 17, 1, 30])]
    state = ss.merge_states([state for _, state in lives])
    rest = [item for rank in range(6) for item in read_rank(dataset_203, rank, 6, state, **options)[0]]
    got = [item["id"] for items, _ in lives for item in items] + [item["id"] for item in rest]
    assert sorted(got) == list(range(203))
    # Ranks hold 3 partitions each; rank 2 stands at slot 2 + 4 x 1, the others are ahead of it by 5 - 2, 17 - 2 and 30 - 1.
    assert "ragged: some partitions are ahead of the others, by 47 items" in caplog.text


def test_successive_resumes_at_other_numbers_of_ranks_lose_and_repeat_nothing(dataset_203):
    options = {"partitions": 12, "shuffle_buffer": 30, "repeat": True}
    whole = ids(ss.StreamDataset(dataset_203, **options), 203 * 3)
    state, got = None, []
    for ranks in (4, 1, 6, 3, 12, 2):
        lives = [read_rank(dataset_203, rank, ranks, state, 96 // ranks, **options) for rank in range(ranks)]
        got += [item["id"] for group in zip(*(items for items, _ in lives), strict=True) for item in group]
        state = ss.merge_states([state for _, state in lives])
    assert got == whole[: len(got)]


def test_another_batch_size_can_be_allowed_and_loses_nothing(dataset_203):
    strip = ss.Map(lambda item: {"id": item["id"]})
    dataset = ss.StreamDataset(dataset_203, strip, ss.Batch(4), partitions=4)
    iterator = iter(dataset)
    got = [int(i) for _ in range(9) for i in next(iterator)["id"]]
    resumed = ss.StreamDataset(dataset_203, strip, ss.Batch(6), partitions=4)
    with pytest.raises(ss.StateError, match=r"batch=\[4\].*batch=\[6\].*allow=\{'batch'\}"):
        resumed.load_state_dict(dataset.state_dict())
    resumed.load_state_dict(dataset.state_dict(), allow={"batch"})
    got += [int(i) for batch in resumed for i in batch["id"]]
    assert sorted(got) == list(range(203))


def test_other_steps_can_be_allowed_and_go_on_at_the_source_position(dataset_203):
    dataset = ss.StreamDataset(dataset_203, partitions=4)
    iterator = iter(dataset)
    got = [next(iterator)["id"] for _ in range(50)]
    resumed = ss.StreamDataset(dataset_203, ss.Filter(even), partitions=4)
    resumed.load_state_dict(dataset.state_dict(), allow={"steps"})
    rest = ids(resumed)
    assert sorted(rest) == sorted(set(range(0, 203, 2)) - set(got))


def test_a_grown_dataset_joins_in_the_next_epoch(tmp_path):
    directory = write_dataset(tmp_path / "ds", 60, per_shard=20)
    for repeat in (False, True):
        options = {"partitions": 4, "shuffle_buffer": 10, "repeat": repeat}
        dataset = ss.StreamDataset(directory, **options)
        iterator = iter(dataset)
        total = len(ss.MapDataset(directory))
        got = [next(iterator)["id"] for _ in range(25)]
        state = dataset.state_dict()
        write_dataset_more(directory, total, 30)
        resumed = ss.StreamDataset(directory, **options)
        with pytest.raises(ss.StateError, match="allow=.'dataset'"):
            resumed.load_state_dict(state)
        resumed.load_state_dict(state, allow={"dataset"})
        got += ids(resumed, total - 25)
        assert sorted(got) == list(range(total))
        state = resumed.state_dict()  # carries the history: the next resume needs no permission
        again = ss.StreamDataset(directory, **options)
        again.load_state_dict(state)
        if not repeat:
            assert ids(again) == []
        assert sorted(ids(again, total + 30)) == list(range(total + 30))


def write_dataset_more(directory, first, count):
    with ss.DatasetWriter(directory, append=True, block_bytes=400) as writer:
        for number in range(first, first + count):
            writer.write(sample(number))
