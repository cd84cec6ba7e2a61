"""How many requests an endpoint gets, and when. Pure: every function takes the time; the shell is in gate.py.

`Limiter` bounds requests in flight as TCP does. The limit grows by one per saturated window and is halved by throttling, at
most once a window. Throttling also pauses the endpoint; after the pause one request at a time probes it, and each probe that
is throttled doubles the next pause (full jitter: processes that were throttled together come back apart). The first good
answer ends the pause; from there the limit doubles per window up to half of what it was before, then grows by one.

`Pace` bounds starts per second, and only after throttling (docs/decisions/0007-pacing.md says why a limit in flight is not
enough). `RetryBudget` is the token bucket of the AWS SDKs: retries in bad weather cannot outnumber what good weather has paid
for. `Episode` decides what is logged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from tenacity import RetryCallState, wait_random_exponential

from streamshard.storage.policy import StoragePolicy

_SMOOTHING = 0.2  # weight of the newest request in the smoothed request time
_QUIET_S = 10.0
_BETA = 0.7  # what is kept of the rate after throttling (RFC 9438)
_CUBIC, _MOST_RISE_S = 0.2, 8.0  # steepness: absolute, so that of two processes the slower one gains on the other
_RATE_WINDOW_S = 1.0  # over which good answers are counted
_LEAST_RATE = 1.0  # starts a second
_LEAST_SHARE = 0.1  # of the ceiling, after however long an outage
_SLACK_S = 0.05  # starts that were not used are forgotten after this


class Jitter(Protocol):
    """Seconds to wait before try number `n` + 1 (n from 0)."""

    def __call__(self, n: int) -> float: ...


def full_jitter(base: float, cap: float) -> Jitter:
    """U(0, min(cap, base * 2**n)): tenacity's arithmetic, with the exponent bounded so that it cannot overflow."""
    wait = wait_random_exponential(multiplier=base, max=cap)

    def seconds(n: int) -> float:
        state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]  # only its attempt number is looked at
        state.attempt_number = min(n, 60) + 1
        return wait(state)

    return seconds


class Pace:
    """Starts per second after throttling: TCP's CUBIC (RFC 9438), as in botocore's adaptive mode. Passive before.

    A limit of one request in flight is still 50 requests a second if an answer takes 20 ms: too many where a store's capacity
    is shared by many processes. So the rate of good answers is remembered when the store throttles. The rate starts below
    it, comes back to it over some seconds, stays near, and only then looks for more.
    """

    def __init__(self) -> None:
        self._good: deque[float] = deque()
        self._ceiling = 0.0  # the rate at which the store throttled
        self._rise_s = 1.0  # from the start of the curve to the ceiling
        self._since: float | None = None  # when the current curve began; None: no pace
        self._kept = _BETA  # the share of the ceiling that the curve begins with
        self._next = 0.0

    def good(self, now: float) -> None:
        """An answer came."""
        self._good.append(now)
        while self._good[0] < now - _RATE_WINDOW_S:
            self._good.popleft()

    def measured(self, now: float, since: float) -> float:
        """Good answers a second, of late and not from before `since`."""
        begin = max(since, now - _RATE_WINDOW_S)
        return sum(time >= begin for time in self._good) / max(now - begin, _RATE_WINDOW_S / 10)

    def throttled(self, now: float, since: float, guess: float) -> None:
        """The store throttled; it has been answering since `since`. `guess`: the rate, as long as there is no pace."""
        # "Fast convergence": whoever is throttled below the earlier ceiling leaves room to others.
        room = (1 + _BETA) / 2
        if self._since is None:
            self._ceiling = max(self.measured(now, since), guess)
        elif now < since + _RATE_WINDOW_S:  # bad luck: there was no time to measure anything
            self._ceiling *= room
        else:
            seen = min(self.rate(now), self.measured(now, since))
            self._ceiling = seen * room if seen < self._ceiling else seen
        self._ceiling = max(_LEAST_RATE, self._ceiling)

    def resume(self, now: float, strikes: int) -> None:
        """Good answers again, after `strikes` pauses: begin the curve."""
        self._since = self._next = now
        self._kept = max(_BETA**strikes, _LEAST_SHARE)
        self._rise_s = min(_MOST_RISE_S, (self._ceiling * (1 - self._kept) / _CUBIC) ** (1 / 3))

    def rate(self, now: float) -> float:
        """Starts a second that are allowed."""
        if self._since is None:
            return float("inf")
        bend = ((now - self._since) / self._rise_s - 1) ** 3  # -1 at first, 0 at the ceiling
        return max(_LEAST_RATE, self._ceiling * (1 + bend * (1 - self._kept)))

    def next_start(self) -> float:
        """The earliest time of the next start."""
        return self._next

    def started(self, now: float) -> None:
        """A request was sent. A pace much faster than what is used is given up."""
        if self._since is None:
            return
        rate = self.rate(now)
        if rate > max(4 * self._ceiling, 20.0) and self.measured(now, self._since) < rate / 4:
            self._since, self._next = None, 0.0
        else:
            self._next = max(now - _SLACK_S, self._next) + 1 / rate


class Limiter:
    """Admission to one endpoint for one process. Not thread-safe: it lives on the event loop."""

    def __init__(self, policy: StoragePolicy, jitter: Jitter | None = None) -> None:
        self._policy = policy
        self._jitter = jitter or full_jitter(policy.throttle_backoff_s, policy.backoff_cap_s)
        self.limit = float(policy.limit_start)
        self.in_flight = 0
        self.opens_at = 0.0  # nobody is admitted before: a pause, or the pace
        self.throttled_since: float | None = None  # None: in good weather
        self.last_good = 0.0
        self._pace = Pace()
        self._strikes = 0  # pauses in a row without a good answer
        self._paused_at = self._resumed_at = 0.0
        self._threshold = 0.0  # below it the limit doubles per window
        self._request_s = 0.0
        self._window_ends = 0.0
        self._saturated = False

    def admit(self, now: float) -> bool:
        """Take a place, if there is one."""
        if now < self.opens_at:
            return False
        if self.in_flight >= (1 if self.throttled_since is not None else int(self.limit)):
            self._saturated = True
            return False
        self.in_flight += 1
        self._saturated |= self.in_flight >= int(self.limit)
        self._pace.started(now)
        self.opens_at = max(self.opens_at, self._pace.next_start())
        return True

    def released(self) -> None:
        """A request has ended, in whatever way."""
        self.in_flight -= 1

    def good(self, started: float, now: float) -> None:
        """A request that began at `started` was answered."""
        took = now - started
        self._request_s += (took - self._request_s) * (_SMOOTHING if self._request_s else 1.0)
        self._pace.good(now)
        if started < self._paused_at:
            return  # asked before the pause: says nothing about what comes after it
        self.last_good = now
        if self.throttled_since is not None:
            self._pace.resume(now, self._strikes)
            self.throttled_since, self._strikes = None, 0
            self.opens_at = self._resumed_at = now
            self._window_ends, self._saturated = now + self._window(), True
        elif now >= self._window_ends:
            self._grow()
            self._window_ends, self._saturated = now + self._window(), False

    def _grow(self) -> None:
        """Below the threshold the pace decides how fast places are used; the limit only gets out of its way."""
        if self.limit < self._threshold:
            self.limit = min(2 * self.limit, self._threshold)
        elif self._saturated:
            self.limit = min(float(self._policy.limit_max), self.limit + 1)

    def throttled(self, started: float, now: float, retry_after: float | None) -> None:
        """A request that began at `started` was throttled.

        Answers to requests from before the pause belong to the same event; only their Retry-After is heeded.
        """
        asked = min(retry_after or 0.0, self._policy.retry_after_cap_s)
        began = self.throttled_since is None
        if began or started >= self._paused_at:
            if began:
                self.throttled_since, self._threshold = now, self.limit / 2
                self._pace.throttled(now, self._resumed_at, self.limit / self._window() / 2)
            self.limit = max(float(self._policy.limit_min), self.limit / 2)
            pause = self._jitter(self._strikes)
            # A named time is the earliest; the jitter on top keeps those who were told the same from coming back together.
            asked += min(pause, asked / 2)
            self._strikes += 1
            self._paused_at = now
            self.opens_at = max(self.opens_at, now + max(pause, asked))
        elif asked:
            self.opens_at = max(self.opens_at, now + asked)

    def _window(self) -> float:
        return max(self._policy.window_s, self._request_s)


class Episode:
    """What is worth telling a person: throttling began, throttling ended. It ends with the first good answer after a quiet
    while; a store at its limit throttles now and then, and that is one story.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._last = 0.0
        self.answers = 0

    def throttled(self, now: float) -> bool:
        """A throttled answer; True if it begins an episode."""
        begins = self._began is None
        if begins:
            self._began, self.answers = now, 0
        self._last = now
        self.answers += 1
        return begins

    def good(self, now: float) -> float | None:
        """A good answer; the seconds from the first to the last throttled one, if this ends the episode."""
        if self._began is None or now < self._last + _QUIET_S:
            return None
        lasted, self._began = self._last - self._began, None
        return lasted


class RetryBudget:
    """Tokens that retries cost and good answers earn."""

    def __init__(self, policy: StoragePolicy, jitter: Jitter | None = None) -> None:
        self._policy = policy
        self._jitter: Callable[[int], float] = jitter or full_jitter(policy.backoff_s, policy.backoff_cap_s)
        self.tokens = policy.retry_budget

    def earn(self) -> None:
        """A request was answered."""
        self.tokens = min(self._policy.retry_budget, self.tokens + self._policy.success_gain)

    def wait(self, kind: str, attempt: int) -> float:
        """Pay for a retry after failed try number `attempt` (from 0); seconds to wait before it."""
        cost = self._policy.timeout_cost if kind == "timeout" else self._policy.retry_cost
        if self.tokens < cost:
            return self._policy.backoff_cap_s
        self.tokens -= cost
        return self._jitter(attempt)
