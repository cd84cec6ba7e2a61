"""Admission, pacing, budgets and hedging as arithmetic: a fake clock, no sockets. The same rules on sockets: test_weather.py."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.errors import UsageError
from streamshard.storage.body import Meter
from streamshard.storage.hedging import HedgePolicy
from streamshard.storage.limiter import Episode, Limiter, Pace, RetryBudget, full_jitter
from streamshard.storage.policy import StoragePolicy


def limiter(jitter=lambda n: 1.0 * 2**n, **policy):
    return Limiter(StoragePolicy(**policy), jitter)


def fill(limits, now):
    """Take places until there is none; returns how many."""
    return sum(1 for _ in iter(lambda: limits.admit(now), False))


def answer(limits, started, now):
    limits.released()
    limits.good(started, now)


def throttle(limits, started, now, retry_after=None):
    limits.released()
    limits.throttled(started, now, retry_after)


def test_eight_requests_at_first_and_one_more_per_saturated_window():
    limits = limiter()
    assert fill(limits, 0.0) == 8
    for window in range(1, 6):
        now = window * 0.2
        for _ in range(limits.in_flight):
            answer(limits, now - 0.1, now)
        assert fill(limits, now) == 8 + window


def test_the_limit_does_not_grow_where_it_is_not_used():
    limits = limiter()
    for window in range(1, 20):
        assert limits.admit(window)
        answer(limits, window, window + 0.1)
    assert limits.limit == 8


def test_many_throttled_answers_of_one_moment_halve_the_limit_once():
    limits = limiter()
    fill(limits, 0.0)
    for _ in range(8):
        throttle(limits, 0.0, 0.1)
    assert limits.limit == 4
    assert limits.opens_at == pytest.approx(1.1)


def test_after_a_pause_one_probe_at_a_time_and_each_failure_doubles_the_pause():
    limits = limiter()
    assert limits.admit(0.0)
    throttle(limits, 0.0, 0.0)
    now = 0.0
    for pause in (1, 2, 4, 8):
        assert not limits.admit(now + pause - 0.01)
        now += pause
        assert limits.admit(now)
        assert not limits.admit(now)
        throttle(limits, now, now)
    assert limits.limit == 1


def test_the_answer_to_a_request_from_before_the_pause_does_not_end_it():
    limits = limiter()
    assert limits.admit(0.0)
    assert limits.admit(0.0)
    throttle(limits, 0.0, 0.1)
    answer(limits, 0.0, 0.2)
    assert limits.throttled_since is not None
    assert not limits.admit(0.3)


def test_a_named_pause_is_kept_but_not_longer_than_the_cap():
    limits = limiter(jitter=lambda n: 0.0)
    assert limits.admit(0.0)
    throttle(limits, 0.0, 0.0, retry_after=7.0)
    assert limits.opens_at == 7.0
    assert limits.admit(7.0)
    throttle(limits, 7.0, 7.0, retry_after=1e9)
    assert limits.opens_at == 7.0 + 60.0


def test_after_an_outage_the_limit_doubles_up_to_half_of_what_it_was():
    limits = limiter(jitter=lambda n: 1.0, limit_start=32)
    fill(limits, 0.0)
    for _ in range(32):
        throttle(limits, 0.0, 0.05)
    now = 1.05
    for _ in range(9):  # failing probes
        assert limits.admit(now)
        throttle(limits, now, now + 0.01)
        now = limits.opens_at
    assert limits.limit == 1
    assert limits.admit(now)
    answer(limits, now, now + 0.02)
    first_good, clock = now + 0.02, now + 0.02
    while limits.limit < 16:
        taken = fill(limits, clock)
        clock += 0.02
        for _ in range(taken):
            answer(limits, clock - 0.02, clock)
    assert clock - first_good < 10.0


def test_the_pace_is_passive_until_the_store_throttles():
    pace = Pace()
    assert pace.rate(0.0) == float("inf")
    for tick in range(100):
        pace.good(tick / 100)
        pace.started(tick / 100)
    assert pace.next_start() == 0.0


def test_the_pace_begins_below_the_rate_that_was_throttled_comes_back_to_it_and_then_goes_beyond():
    pace = Pace()
    for tick in range(100):
        pace.good(tick / 100)
    pace.throttled(1.0, 0.0, 0.0)
    pace.resume(1.5, strikes=1)
    rates = [pace.rate(1.5 + second) for second in range(16)]
    assert rates[0] == pytest.approx(70.0, rel=0.05)
    assert rates == sorted(rates)
    assert any(99 < rate < 101 for rate in rates)
    assert rates[-1] > 110


def share(*, hidden, seed, processes=8, capacity=100, seconds=30.0):
    """`processes` limiters against one store that answers `capacity` requests a second after 20 ms, and 503 beyond.

    Returns (good answers a second, slowest process / mean).
    """
    rng = random.Random(seed)
    limits = [Limiter(StoragePolicy(), lambda n: rng.uniform(0, min(20.0, 2.0**n))) for _ in range(processes)]
    events, order = [], itertools.count()
    tokens, filled, waiting, good = 6.0, 0.0, [8] * processes, [0] * processes

    def at(time, what, number, started=0.0):
        heapq.heappush(events, (time, next(order), what, number, started))

    for number in range(processes):
        at(rng.uniform(0, 0.2), "wake", number)
    while events[0][0] < seconds:
        now, _, what, number, started = heapq.heappop(events)
        limit = limits[number]
        if what == "arrive":
            tokens, filled = min(6.0, tokens + (now - filled) * capacity), now
            at(now + (0.02 if tokens >= 1 else 0.001), "good" if tokens >= 1 else "throttled", number, started)
            tokens -= tokens >= 1
            continue
        if what == "good":
            good[number] += 1
            answer(limit, started, now)
        elif what == "throttled":
            throttle(limit, started, now, hidden)
        waiting[number] += what != "wake"
        while waiting[number] and limit.admit(now):
            waiting[number] -= 1
            at(now + 0.001, "arrive", number, now)
        if waiting[number] and now < limit.opens_at:
            at(limit.opens_at, "wake", number)
    return sum(good) / seconds, min(good) / (sum(good) / processes)


@pytest.mark.parametrize("hidden", [None, 2.0])
def test_eight_processes_use_what_the_store_has_and_share_it(hidden):
    """hidden: the least pause of a transport that does not show Retry-After."""
    runs = [share(hidden=hidden, seed=seed) for seed in range(5)]
    assert sorted(goodput for goodput, _ in runs)[2] >= 80
    assert sorted(slowest for _, slowest in runs)[2] >= 0.5


def test_without_the_pace_eight_processes_use_half_of_it(monkeypatch):
    """The mutation: a limit in flight alone, which cannot say less than one."""
    monkeypatch.setattr(Pace, "rate", lambda self, now: float("inf"))
    assert share(hidden=2.0, seed=0)[0] < 60


@given(st.integers(0, 2000))
def test_full_jitter_is_between_nothing_and_the_cap(n):
    assert 0 <= full_jitter(0.1, 20.0)(n) <= min(20.0, 0.1 * 2.0 ** min(n, 60))


def test_the_retry_budget_runs_out_and_is_earned_back():
    budget = RetryBudget(StoragePolicy(), jitter=lambda n: 0.5)
    waits = [budget.wait("transient", 0) for _ in range(101)]
    assert waits == [0.5] * 100 + [20.0]
    for _ in range(10):
        budget.earn()
    assert budget.wait("timeout", 0) == 0.5
    assert budget.wait("transient", 0) == 20.0


def test_an_episode_is_told_once_however_often_the_store_throttles():
    episode = Episode()
    told = [(episode.throttled(second), episode.good(second + 0.5)) for second in range(30)]
    assert told == [(True, None)] + [(False, None)] * 29
    assert episode.good(35.0) is None
    assert episode.good(40.0) == 29.0
    assert episode.answers == 30
    assert episode.good(60.0) is None


@given(st.lists(st.tuples(st.floats(0.001, 3), st.integers(1, 10_000)), max_size=200))
def test_a_body_is_given_up_exactly_if_some_window_stays_below_the_floor(pieces):
    """Against a plain model: windows that begin anew whenever they have kept up."""
    floor, stall = 1000.0, 5.0
    meter, now, begun, base, have = Meter(floor, stall, 0.0), 0.0, 0.0, 0, 0
    ends = meter.arrived(0, 0.0)
    for wait, count in pieces:
        now += wait
        assert ends == begun + stall
        if now > ends:
            return
        have += count
        if have - base >= floor * stall:
            begun, base = now, have
        ends = meter.arrived(count, now)


def test_hedging_waits_for_the_p95_and_stays_within_its_budget():
    hedge = HedgePolicy(StoragePolicy(hedge=True))
    assert hedge.delay() is None
    for number in range(200):
        hedge.seen(2.0 if number % 10 == 0 else 0.3)
    assert hedge.delay() == 2.0
    spent = 0
    for _ in range(2000):
        hedge.seen(1.5)
        spent += hedge.spend()
    assert spent <= 0.05 * 2000 + 16


def test_hedging_is_off_unless_asked_for():
    hedge = HedgePolicy(StoragePolicy())
    for _ in range(200):
        hedge.seen(1.0)
    assert hedge.delay() is None


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"deadline_s": -1}, {"limit_start": 0}, {"stall_s": "10"}, {"limit_max": 4}]
)
def test_a_policy_that_cannot_work_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        StoragePolicy(**wrong)
