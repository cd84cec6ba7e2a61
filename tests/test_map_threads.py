"""`Map(threads=n)`: at the same time, in order, and as exact as without."""

from __future__ import annotations

import threading

import pytest

import streamshard as ss
from streamshard.testing.resume import digest


def noisy(item, rng):
    return {**item, "noise": int(rng.integers(1 << 40))}


def even(item):
    return item["id"] % 2 == 0


@pytest.mark.parametrize("parts", [1, 4, 16])
def test_items_leave_in_the_order_and_with_the_numbers_of_one_thread(dataset_203, parts):
    def read(threads):
        steps = ss.Filter(even), ss.Map(noisy, rng=True, threads=threads)
        return ss.StreamDataset(dataset_203, *steps, partitions=parts, provenance=True)

    assert [digest(item) for item in read(3)] == [digest(item) for item in read(None)]


@pytest.mark.parametrize(("parts", "at_once"), [(1, 4), (16, 2)])
def test_calls_run_at_the_same_time(dataset_203, parts, at_once):
    together, met = threading.Barrier(at_once), threading.Event()

    def meet(item):
        if not met.is_set():
            together.wait(timeout=20)
            met.set()
        return item

    assert len(list(ss.StreamDataset(dataset_203, ss.Map(meet, threads=4), partitions=parts))) == 203


def test_an_exception_comes_in_its_turn_names_its_sample_and_leaves_the_state_before_it(dataset_203):
    def boom(item):
        if item["id"] == 100:
            raise KeyError("a hundred")
        return item

    dataset = ss.StreamDataset(dataset_203, ss.Map(boom, threads=3), partitions=2)
    plain = [item["id"] for item in ss.StreamDataset(dataset_203, partitions=2)]
    seen = []
    with pytest.raises(KeyError, match="a hundred") as caught:
        for item in dataset:
            seen.append(item["id"])
    assert seen == plain[: plain.index(100)]
    assert caught.value.__notes__ == [
        "in Map(test_an_exception_comes_in_its_turn_names_its_sample_and_leaves_the_state_before_it.<locals>.boom) at shard 2, row 20"
    ]
    mended = ss.StreamDataset(dataset_203, partitions=2)
    mended.load_state_dict(dataset.state_dict(), allow={"steps"})
    assert seen + [item["id"] for item in mended] == plain


def test_what_earlier_steps_dropped_is_counted_with_what_has_left(dataset_203):
    dataset = ss.StreamDataset(dataset_203, ss.Filter(even), ss.Map(dict, threads=4), partitions=1, shuffle=False)
    items = iter(dataset)
    for _ in range(5):
        next(items)
    assert dataset.counters() == {"Filter(even) dropped": 4}
    list(items)
    assert dataset.counters() == {"Filter(even) dropped": 101}


def test_breaking_off_ends_the_threads(dataset_203):
    for _ in ss.StreamDataset(dataset_203, ss.Map(dict, threads=4)):
        break
    for thread in threading.enumerate():
        if thread.name.startswith("streamshard-map"):
            thread.join(5)
            assert not thread.is_alive()


def test_bad_numbers_of_threads_are_refused():
    with pytest.raises(ss.UsageError, match=r"threads=0\): the number of threads must be an int >= 1"):
        ss.Map(dict, threads=0)
    with pytest.raises(ss.UsageError, match="one or the other"):
        ss.Map(dict, threads=2, batch=3)
