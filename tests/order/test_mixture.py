"""Shares are right at every moment: in each partition, over all of them, in samples and in tokens."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamshard.order.mixture import SCALE, UNSCALED, Mixer, Plan, buffers, integer_weights, phases, shared

WEIGHTS = [(0.7, 0.2, 0.1), (1, 1, 1, 6, 6), (0.999, 0.001), (1,)]


def mixer(plan, parts=1, p=0, mean=1):
    return Mixer(plan, parts, phases(plan, parts, mean)[p], [False] * plan.sources)


def plan_of(*weights, tokens=False, schedule=()):
    return Plan(((0, integer_weights(weights)), *((start, integer_weights(w)) for start, w in schedule)), tokens)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("p", "bound"), [(0, 1), (7, 2), (47, 2)])
def test_a_partition_is_never_further_from_its_shares_than_a_draw(weights, p, bound):
    plan = plan_of(*weights)
    shares = [Fraction(w, SCALE) for w in plan.segments[0][1]]
    drawing, given = mixer(plan, 48, p), [0] * len(weights)
    for draws in range(1, 100_001):
        source = drawing.choose()
        drawing.drew(source, 1)
        given[source] += 1
        if draws % 97 == 0 or draws < 200:
            assert all(abs(n - draws * share) < bound for n, share in zip(given, shares, strict=True))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("parts", [3, 48])
def test_a_batch_over_all_partitions_is_near_its_shares(weights, parts):
    plan = plan_of(*weights)
    drawing = [Mixer(plan, parts, owed, [False] * plan.sources) for owed in phases(plan, parts, 1)]
    for _ in range(200):
        given = [0] * len(weights)
        for one in drawing:
            source = one.choose()
            one.drew(source, 1)
            given[source] += 1
        wanted = [parts * w / SCALE for w in plan.segments[0][1]]
        assert all(abs(n - share) < 8 for n, share in zip(given, wanted, strict=True))


def test_tokens_are_shared_whatever_the_lengths():
    draw, tokens = random.Random(0), [0, 0]
    drawing = mixer(plan_of(1, 1, tokens=True), mean=2200)
    while sum(tokens) < 20_000_000:
        source = drawing.choose()
        length = max(1, int(draw.expovariate(1 / (400, 4000)[source])))
        drawing.drew(source, length)
        tokens[source] += length
    assert abs(tokens[0] / sum(tokens) - 0.5) < 0.001


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 40),
    st.lists(st.integers(0, 400), min_size=20, max_size=200),
)
def test_credits_add_up_to_nothing_and_stay_within_the_longest_draw(weights, tokens, p, lengths):
    plan = plan_of(*weights, tokens=tokens)
    drawing = mixer(plan, 41, p, mean=200)
    reach = SCALE * max([400, 200])
    for length in lengths:
        drawing.drew(drawing.choose(), length)
        assert sum(drawing.credits) == 0
        assert max(map(abs, drawing.credits)) <= (reach if tokens else SCALE)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any),
    st.booleans(),
    st.lists(st.integers(0, 4), max_size=4),
    st.data(),
)
def test_a_source_that_leaves_hands_what_it_is_owed_to_the_others(weights, tokens, leaving, data):
    drawing = mixer(plan_of(*weights, tokens=tokens))
    for source in leaving:
        for _ in range(data.draw(st.integers(0, 9))):
            chosen = drawing.choose()
            if chosen is None:
                return
            assert weights[chosen]
            assert not drawing.done[chosen]
            drawing.drew(chosen, data.draw(st.integers(0, 30)))
            assert sum(drawing.credits) == 0
        drawing.leave(source % len(weights))
    left = drawing.choose()
    assert (left is None) == (not any(w and not gone for w, gone in zip(weights, drawing.done, strict=True)))


def test_a_schedule_begins_with_the_first_draw_after_a_partitions_share_of_tokens():
    plan = plan_of(1, 0, tokens=True, schedule=[(1000, (0, 1))])
    drawing, drawn = mixer(plan, parts=4), []
    for _ in range(60):
        source = drawing.choose()
        drawn.append((drawing.tokens, source))
        drawing.drew(source, 10)
    assert all(source == (tokens >= 250) for tokens, source in drawn)


def test_a_segment_without_anybody_left_is_passed_over():
    plan = plan_of(1, 0, 0, schedule=[(10**9, (1, 1, 0)), (2 * 10**9, (0, 0, 1))])
    drawing = mixer(plan)
    assert drawing.choose() == 0
    drawing.leave(0)
    assert drawing.choose() == 1
    drawing.leave(1)
    assert drawing.choose() == 2
    drawing.leave(2)
    assert drawing.choose() is None
    drawing.back(0)
    assert drawing.choose() == 0


@given(st.lists(st.fractions(0, 10), min_size=1, max_size=8).filter(any), st.integers(-(10**12), 10**12))
def test_sharing_loses_nothing(weights, total):
    found = shared(total, weights)
    assert sum(found) == total
    assert all(abs(part - total * w / sum(weights)) < 1 for part, w in zip(found, weights, strict=True))


def test_a_tiny_weight_is_not_rounded_away():
    assert integer_weights((1, 1e-15))[1] == 1
    assert integer_weights((0.7, 0.2, 0.1)) == (700_000_000, 200_000_000, 100_000_000)


def test_buffers_follow_the_largest_weights():
    assert buffers(512, (700, 200, 100)) == [358, 102, 51]
    assert buffers(2, (1000, 1, 1)) == [1, 1, 1]


def test_phases_are_different():
    found = phases(plan_of(0.7, 0.2, 0.1), 16, 1)
    assert found[0] == [0, 0, 0]
    assert len(set(map(tuple, found))) > 5
    assert all(sum(owed) == 0 for owed in found)
    assert list(itertools.chain(*phases(plan_of(1, 1, tokens=True), 2, 100)[:1])) == [0, 0]


@pytest.mark.parametrize("p", [1, 7, 15])
def test_phases_of_unknown_length_are_scaled_by_the_first_draw(p):
    plan = plan_of(5, 3, 1, tokens=True)
    known = mixer(plan, 16, p, mean=20)
    unknown = Mixer(plan, 16, phases(plan, 16, 1)[p], [False] * 3, longest=UNSCALED)
    for _ in range(50):
        source = known.choose()
        assert unknown.choose() == source
        known.drew(source, 20)
        unknown.drew(source, 20)
        assert unknown.credits == known.credits
