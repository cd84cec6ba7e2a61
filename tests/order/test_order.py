"""The order is a bijection, equals a naive model, and does not depend on who reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamshard.errors import UsageError
from streamshard.order.partition import EpochOrder, OrderSpec
from streamshard.order.random import bounded, permutation, raw_words, stream_key
from streamshard.order.rotation import Reader, Rotation, carrier, owned, resolve_partitions
from streamshard.order.shuffle import ShuffleBuffer
from tests import naive

worlds = st.fixed_dictionaries(
    {
        "samples": st.lists(st.integers(0, 90), min_size=1, max_size=12).filter(any),
        "seed": st.integers(0, 2**40),
        "epoch": st.integers(0, 5),
        "parts": st.sampled_from([1, 2, 3, 4, 12, 48]),
        "interleave": st.integers(1, 5),
        "run": st.sampled_from([1, 3, 16]),
        "buffer": st.sampled_from([1, 2, 7, 33, 100, 1000]),
        "shuffle": st.booleans(),
        "repeat": st.booleans(),
    }
)


def partitions_of(world: dict):
    spec = OrderSpec(
        partitions=world["parts"], seed=world["seed"], shuffle=world["shuffle"], repeat=world["repeat"], run=world["run"],
        interleave=world["interleave"] if world["shuffle"] else 1, buffer=world["buffer"] if world["shuffle"] else 1,
    )  # fmt: skip
    samples = np.array(world["samples"], dtype=np.int64)
    epoch = EpochOrder(spec, samples, world["epoch"], world["epoch"] * int(samples.sum()))
    return epoch, [epoch.partition(p) for p in range(world["parts"])]


def our_orders(world: dict) -> list[list[tuple[int, int]]]:
    orders = []
    for part in partitions_of(world)[1]:
        shards, rows = part.refs(ShuffleBuffer(part).emissions(0, part.size))
        orders.append(list(zip(shards.tolist(), rows.tolist(), strict=True)))
    return orders


@given(worlds)
@settings(max_examples=300, deadline=None)
def test_every_partition_emits_what_the_naive_model_emits(world):
    assert our_orders(world) == naive.partition_orders(**world)


@given(worlds)
@settings(max_examples=100, deadline=None)
def test_every_ref_comes_exactly_once_an_epoch(world):
    refs = sorted(ref for order in our_orders(world) for ref in order)
    assert refs == [(shard, row) for shard, count in enumerate(world["samples"]) for row in range(count)]


@given(worlds)
@settings(max_examples=200, deadline=None)
def test_a_sample_s_place_is_found_from_its_shard_and_row(world):
    """Ref to position to partition to read to emission, each step the inverse of the way out."""
    epoch, parts = partitions_of(world)
    for part in parts:
        emitted = ShuffleBuffer(part).emissions(0, part.size)
        positions = part.positions(emitted)
        shards, rows = epoch.refs(positions)
        for k, (position, shard, row) in enumerate(
            zip(positions.tolist(), shards.tolist(), rows.tolist(), strict=True)
        ):
            assert epoch.position(shard, row) == position
            assert epoch.partition_of(position) == part.p
            assert part.read(position) == emitted[k]
            assert ShuffleBuffer(part).emission(int(emitted[k])) == k


@given(worlds)
@settings(max_examples=50, deadline=None)
def test_the_turns_of_earlier_epochs_are_their_sizes(world):
    earlier = [partitions_of({**world, "epoch": epoch})[0] for epoch in range(world["epoch"])]
    epoch, parts = partitions_of(world)
    for part in parts:
        expected = sum(one.partition_size(part.p) for one in earlier) if world["repeat"] else 0
        assert epoch.turns_before(part.p) == expected


@given(worlds, st.data())
@settings(max_examples=100, deadline=None)
def test_the_buffers_contents_at_any_moment_are_what_a_held_buffer_has(world, data):
    spec = OrderSpec(partitions=1, seed=world["seed"], interleave=world["interleave"], buffer=world["buffer"])
    part = EpochOrder(spec, np.array(world["samples"], dtype=np.int64), world["epoch"]).partition(0)
    buffer = ShuffleBuffer(part)
    k = data.draw(st.integers(0, part.size))
    emitted = buffer.emissions(0, k).tolist()
    held = [read for read in buffer.contents(k).tolist() if read >= 0]
    assert sorted(held + emitted) == list(range(buffer.reads_before(k)))
    assert emitted + buffer.emissions(k, part.size).tolist() == buffer.emissions(0, part.size).tolist()


def test_the_contents_of_a_long_partition_equal_those_of_a_simulated_buffer():
    spec = OrderSpec(partitions=1, buffer=64)
    buffer = ShuffleBuffer(EpochOrder(spec, np.array([20_000]), 0).partition(0))
    held = list(range(32))
    for k, slot in enumerate(buffer.draws(0, buffer.drain_from).tolist()):
        if k % 977 == 0:
            assert buffer.contents(k).tolist() == held
        read = buffer.reads_before(k)
        held[slot] = read
        if len(held) < 64:
            held.append(read + 1)


@given(worlds, st.data())
@settings(max_examples=200, deadline=None)
def test_positions_reads_and_runs_describe_one_order(world, data):
    spec = OrderSpec(
        partitions=world["parts"], interleave=world["interleave"], run=world["run"], repeat=world["repeat"]
    )
    total = sum(world["samples"])
    epoch = EpochOrder(spec, np.array(world["samples"], dtype=np.int64), world["epoch"], world["epoch"] * total)
    part = epoch.partition(data.draw(st.integers(0, world["parts"] - 1)))
    positions = part.positions(np.arange(part.size)).tolist()
    assert sorted(positions) == list(range(part.start, part.start + part.size))
    read = data.draw(st.integers(0, part.size))
    heads = [start + had for start, had in zip(part.stripe_starts, part.progress(read), strict=True)]
    by_runs = []
    for stripe, rows in part.runs(read):
        assert 0 < rows <= world["run"]
        by_runs += range(heads[stripe], heads[stripe] + rows)
        heads[stripe] += rows
    assert by_runs == positions[read:]


@given(st.integers(1, 500), st.integers(0, 6), st.sampled_from([1, 2, 5, 12, 48]), st.booleans())
def test_partition_sizes_follow_the_slots_and_lie_end_to_end(total, epoch, parts, repeat):
    spec = OrderSpec(partitions=parts, repeat=repeat)
    order = EpochOrder(spec, np.array([total]), epoch, epoch * total)
    assert [order.partition_size(p) for p in range(parts)] == naive.epoch_slots(total, epoch, parts, repeat)
    starts = np.cumsum([0] + [order.partition_size(p) for p in range(parts)])
    assert [order.partition_start(p) for p in range(parts)] == starts[:-1].tolist()


def test_seeds_and_epochs_give_different_orders():
    world = {"samples": [50] * 8, "seed": 1, "epoch": 0, "parts": 4, "interleave": 2, "run": 16, "buffer": 20,
             "shuffle": True, "repeat": False}  # fmt: skip
    orders = [our_orders(world | change) for change in ({}, {"seed": 2}, {"epoch": 1}, {"epoch": 2})]
    for i, first in enumerate(orders):
        for other in orders[:i]:
            assert first != other


class FakeRun:
    def __init__(self, p, turn, items):
        self.p, self.turn = p, turn
        self.items = self._take(items)

    def _take(self, items):
        for item in items:
            self.turn += 1
            yield item


@given(st.integers(1, 8), st.data())
@settings(deadline=None)
def test_rotation_takes_the_least_slot_whatever_the_turns_are(parts, data):
    turns = [data.draw(st.integers(0, 4)) for _ in range(parts)]
    items = [[(p, i) for i in range(data.draw(st.integers(0, 5)))] for p in range(parts)]
    runs = [FakeRun(p, turns[p], items[p]) for p in range(parts)]
    assert list(Rotation(runs)) == naive.in_slot_order(items, turns)


@given(st.integers(1, 8), st.data())
@settings(deadline=None)
def test_taking_many_at_a_time_is_the_same_rotation_and_says_who_gave_what_in_which_turn(parts, data):
    turns = [data.draw(st.integers(0, 4)) for _ in range(parts)]
    items = [[(p, i) for i in range(data.draw(st.integers(0, 5)))] for p in range(parts)]
    runs = [FakeRun(p, turns[p], items[p]) for p in range(parts)]
    one_pass = data.draw(st.booleans())
    rotation = Rotation(runs)
    got, before = [], {run.p: run.turn for run in runs}
    while True:
        count = data.draw(st.integers(1, 9))
        if one_pass:
            taken, turn, touched = rotation.step(count)
            assert [(run.p, turn) for run in touched][: len(taken)] == [(p, turns[p] + i) for p, i in taken]
            assert len(touched) == len(set(touched))
        else:
            taken, touched = rotation.take(count)
        got += taken
        assert {run.p for run in runs if run.turn != before[run.p]} <= {run.p for run in touched}
        before = {run.p: run.turn for run in runs}
        if not touched:
            break
    assert got == naive.in_slot_order(items, turns)
    assert rotation.take(3) == ([], [])


@given(st.sampled_from([4, 12, 48]), st.integers(0, 200), st.data())
@settings(deadline=None)
def test_readers_of_an_aligned_moment_interleave_to_the_global_sequence(parts, slot, data):
    """At global slot g the live partitions are dealt so that reader i gets slots g + i, g + i + readers, ..."""
    divisors = [d for d in range(1, parts + 1) if parts % d == 0]
    ranks = data.draw(st.sampled_from(divisors))
    workers = data.draw(st.sampled_from([d for d in divisors if (parts // ranks) % d == 0]))
    turns = {p: -((p - slot) // parts) for p in range(parts)}  # ceil((slot - p) / parts)
    for rank in range(ranks):
        for worker in range(workers):
            mine, _ = owned(turns, set(), parts, Reader(rank, ranks, worker, workers))
            first = [turns[p] * parts + p - slot for p in mine]
            assert first == [rank + ranks * (worker + workers * i) for i in range(len(mine))]


@given(st.sampled_from([4, 12]), st.data())
def test_every_partition_live_or_finished_has_one_holder(parts, data):
    turns = {p: data.draw(st.integers(0, 3)) for p in range(parts)}
    done = {p for p in range(parts) if data.draw(st.booleans())}
    held = []
    for rank in range(2):
        for worker in range(2):
            live, carried = owned(turns, done, parts, Reader(rank, 2, worker, 2))
            assert not set(live) & done
            assert all(carrier(p, Reader(rank, 2, worker, 2)) == (rank, worker) for p in carried)
            held += live + carried
    assert sorted(held) == list(range(parts))


def test_the_default_number_of_partitions_leaves_room_for_other_readers():
    assert resolve_partitions(None, Reader(0, 1), shuffle=True) == 16
    assert resolve_partitions(None, Reader(0, 3, 0, 2), shuffle=True) == 48
    assert resolve_partitions(None, Reader(0, 3, 0, 2), shuffle=False) == 6


def test_readers_that_do_not_divide_the_partitions_are_refused_with_numbers_that_would_do():
    with pytest.raises(
        UsageError, match=r"partitions=16 .* 3 ranks x 2 workers = 6 .* partitions=48 .* 1, 2, 4, 8, 16"
    ):
        resolve_partitions(16, Reader(0, 3, 0, 2), shuffle=True)


def test_golden_words_permutations_and_orders_never_change():
    """These pin checkpoints that people hold: if this fails, ALGORITHM must be raised and old states refused."""
    key = stream_key(17, 3, "slot", "", 5)
    assert key == 0x9F809925A80E15ED67BFF1F318F3B968
    assert raw_words(key, 0, 3).tolist() == [698661648611798586, 8643027132978578825, 2699162472105813022]
    assert permutation(stream_key(17, 0, "shards", ""), 10).tolist() == [0, 8, 5, 6, 7, 1, 4, 2, 9, 3]
    assert bounded(raw_words(key, 5, 6), 100).tolist() == [90, 56, 63, 7, 21, 64]
    world = {"samples": [5, 3, 7], "seed": 17, "epoch": 1, "parts": 2, "interleave": 2, "run": 2, "buffer": 3,
             "shuffle": True, "repeat": True}  # fmt: skip
    assert our_orders(world) == [
        [(2, 0), (2, 1), (2, 2), (2, 4), (2, 6), (2, 3), (2, 5)],
        [(0, 4), (0, 1), (0, 0), (1, 0), (0, 2), (1, 1), (0, 3), (1, 2)],
    ]


def test_words_are_random_access():
    key = stream_key("a")
    whole = raw_words(key, 0, 50)
    for start in range(20):
        assert raw_words(key, start, 7).tolist() == whole[start : start + 7].tolist()


def test_keys_of_different_parts_differ():
    assert (
        len({stream_key("a", "b"), stream_key("ab"), stream_key(1), stream_key("1"), stream_key(1, 2), stream_key(12)})
        == 6
    )


@given(worlds, st.data())
@settings(max_examples=100, deadline=None)
def test_any_readers_that_divide_the_partitions_read_one_global_sequence(world, data):
    """Slot g is read by rank g mod R, worker (g // R) mod W, whatever R, W, N, buffers and stripes are."""
    world = world | {"repeat": False}
    parts = world["parts"]
    divisors = [d for d in range(1, parts + 1) if parts % d == 0]
    ranks = data.draw(st.sampled_from(divisors))
    workers = data.draw(st.sampled_from([d for d in divisors if (parts // ranks) % d == 0]))
    orders = our_orders(world)
    readers = {}
    for rank in range(ranks):
        for worker in range(workers):
            mine, _ = owned(dict.fromkeys(range(parts), 0), set(), parts, Reader(rank, ranks, worker, workers))
            readers[rank, worker] = iter(Rotation([FakeRun(p, 0, orders[p]) for p in mine]))
    total = sum(world["samples"])
    got = [next(readers[g % ranks, (g // ranks) % workers]) for g in range(total)]
    assert got == naive.in_slot_order(orders)
    assert all(next(reader, None) is None for reader in readers.values())
