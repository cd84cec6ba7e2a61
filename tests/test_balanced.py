"""Ranks that share a plan cost the same in every step, and each sample comes once an epoch whatever happens to them."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import streamshard as ss
from streamshard.errors import StateError, UsageError
from streamshard.order.balance import dealt, next_step
from streamshard.testing import assert_exact_resume
from streamshard.testing.resume import through_msgpack


def conversations(count, seed=0):
    """Half of them 2048 long, the others of any length up to that."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.55, 2048, rng.integers(24, 2048, count))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("balanced"))
    with ss.DatasetWriter(directory, length_field="n", shard_bytes=1 << 12, block_bytes=400) as writer:
        for number, length in enumerate(np.random.default_rng(1).integers(1, 60, 500).tolist()):
            writer.write({"id": number, "n": length})
    return directory


def sampler(url, rank=0, ranks=1, **options):
    return ss.MapDataset(url).balanced(
        **{"max_tokens": 200, "seed": 3, "topology": ss.Topology(rank, ranks), **options}
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 6), st.integers(50, 200))
def test_items_are_dealt_out_once_and_fit(lengths, ranks, budget):
    found = dealt([length**2 for length in lengths], lengths, ranks, budget)
    if found is None:
        assert sum(lengths) > ranks * (budget - 50)
        return
    assert sorted(itertools.chain(*found)) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in places) <= budget for places in found)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=60, max_size=90), st.integers(1, 6))
def test_a_step_has_consecutive_items_and_something_for_every_rank(lengths, ranks):
    step = next_step(lengths, ranks, 50)
    taken = sum(map(len, step))
    assert sorted(itertools.chain(*step)) == list(range(taken))
    assert all(step)


@pytest.mark.parametrize("ranks", [8, 64])
def test_ranks_cost_the_same_within_a_hundredth(ranks):
    """16 x 2048 tokens a rank, as in multipack's benchmark."""
    lengths, worst, tokens, steps = conversations(100_000).tolist(), [], 0, 0
    while len(lengths) > 40 * ranks:
        step = next_step(lengths[: 40 * ranks], ranks, 16 * 2048)
        costs = [sum(lengths[place] ** 2 for place in places) for places in step]
        worst.append(max(costs) / (sum(costs) / ranks))
        tokens, steps = tokens + sum(lengths[: sum(map(len, step))]), steps + 1
        lengths = lengths[sum(map(len, step)) :]
    assert np.mean(worst) <= 1.01
    assert tokens / (steps * ranks * 16 * 2048) > 0.95


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_sample_comes_once_an_epoch_over_all_ranks(url, ranks):
    samplers = [sampler(url, rank, ranks) for rank in range(ranks)]
    for _ in range(2):
        batches = [list(one) for one in samplers]
        assert Counter(itertools.chain(*itertools.chain(*batches))) == Counter(range(500))
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
    dataset = ss.MapDataset(url)
    assert all(sum(one["n"] for one in dataset[batch]) <= 200 for batch in batches[0])
    assert len({one.efficiency for one in samplers}) == 1
    assert samplers[0].efficiency > 0.85
    assert samplers[0].utilisation > 0.9


def test_a_last_step_that_leaves_a_rank_idle_can_be_dropped(url):
    samplers = [sampler(url, rank, 8, drop_last=True) for rank in range(8)]
    batches = [list(one) for one in samplers]
    assert len(set(map(len, batches))) == 1
    found = sum(map(len, itertools.chain(*batches)))
    assert {500 - found} == {one.dropped for one in samplers}


@pytest.mark.parametrize("repeat", [False, True])
def test_a_sampler_resumes_after_every_batch(url, repeat):
    assert_exact_resume(lambda: sampler(url, 1, 3, repeat=repeat), items=60 if repeat else None)


def test_a_run_goes_on_on_any_number_of_ranks_with_each_sample_once(url):
    seen, state = [], None
    for ranks, steps in ((4, 7), (2, 5), (8, 2), (3, None)):
        samplers = [sampler(url, rank, ranks) for rank in range(ranks)]
        for one in samplers if state else ():
            one.load_state_dict(through_msgpack(state))
        for one in samplers:
            seen += itertools.chain(*itertools.islice(one, steps))
        states = [one.state_dict() for one in samplers]
        state = ss.merge_states(states) if steps else None
    assert Counter(seen) == Counter(range(500))


def test_a_data_loader_reads_the_batches(url):
    dataset = ss.MapDataset(url)
    batches = dataset.balanced(max_tokens=200, seed=3, topology=ss.Topology(0, 2))
    expected = list(sampler(url, 0, 2))
    got = [batch["id"].tolist() for batch in DataLoader(dataset, batch_sampler=batches)]
    assert got == expected


def test_what_cannot_be_planned_is_refused(url, tmp_path):
    with pytest.raises(UsageError, match="has the length 59, and a rank's part of a step must hold it"):
        next(iter(sampler(url, max_tokens=40)))
    with pytest.raises(UsageError, match="max_tokens=0"):
        sampler(url, max_tokens=0)
    with ss.DatasetWriter(str(tmp_path)) as writer:
        writer.write({"id": 0})
    with pytest.raises(UsageError, match="written without length_field="):
        next(iter(sampler(str(tmp_path))))
    one = sampler(url)
    next(iter(one))
    with pytest.raises(StateError, match="seed"):
        sampler(url, seed=4).load_state_dict(one.state_dict())
    with pytest.raises(StateError, match="kind"):
        sampler(url).load_state_dict(ss.MapDataset(url).sampler(partitions=1, seed=3).state_dict())
