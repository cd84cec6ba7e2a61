"""How many requests an endpoint gets, and when. Pure: every function takes the time; the shell is in resilience.py.

`Limiter` is TCP's answer to the same question. The limit grows by one per saturated window and is halved by throttling, at
most once a window. Throttling also pauses the endpoint; after the pause one request at a time probes it, and each probe that
is throttled doubles the next pause (full jitter: processes that were throttled together come back apart). The first good
answer ends the throttling; from there the limit doubles per window up to half of what it was before, then grows by one.

`RetryBudget` is the token bucket of the AWS SDKs: retries in bad weather cannot outnumber what good weather has paid for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tenacity import RetryCallState, wait_random_exponential

from streamshard.storage.policy import StoragePolicy

_SMOOTHING = 0.2  # weight of the newest request in the smoothed request time


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


class Limiter:
    """Admission to one endpoint for one process. Not thread-safe: it lives on the event loop."""

    def __init__(self, policy: StoragePolicy, jitter: Jitter | None = None) -> None:
        self._policy = policy
        self._jitter = jitter or full_jitter(policy.throttle_backoff_s, policy.backoff_cap_s)
        self.limit = float(policy.limit_start)
        self.in_flight = 0
        self.paused_until = 0.0
        self.throttled_since: float | None = None  # None: in good weather
        self.last_good = 0.0
        self._strikes = 0  # pauses in a row without a good answer
        self._paused_at = 0.0
        self._threshold = 0.0  # below it the limit doubles per window
        self._request_s = 0.0
        self._window_ends = 0.0
        self._saturated = False

    def admit(self, now: float) -> bool:
        """Take a place, if there is one."""
        if now < self.paused_until:
            return False
        if self.in_flight >= (1 if self.throttled_since is not None else int(self.limit)):
            self._saturated = True
            return False
        self.in_flight += 1
        self._saturated |= self.in_flight >= int(self.limit)
        return True

    def released(self) -> None:
        """A request has ended, in whatever way; before what is said about it below."""
        self.in_flight -= 1

    def good(self, started: float, now: float) -> bool:
        """A request that began at `started` was answered. True if this ends a throttling."""
        took = now - started
        self._request_s += (took - self._request_s) * (_SMOOTHING if self._request_s else 1.0)
        if started < self._paused_at:
            return False  # asked before the pause: says nothing about what comes after it
        self.last_good = now
        ended = self.throttled_since is not None
        if ended:
            self.throttled_since, self._strikes, self.paused_until = None, 0, 0.0
            self._window_ends, self._saturated = now + self._window(), True
        elif now >= self._window_ends:
            self._grow()
            self._window_ends, self._saturated = now + self._window(), False
        return ended

    def _grow(self) -> None:
        if not self._saturated:
            return
        doubled = min(2 * self.limit, self._threshold)
        self.limit = min(float(self._policy.limit_max), max(self.limit + 1, doubled))

    def throttled(self, started: float, now: float, retry_after: float | None) -> bool:
        """A request that began at `started` was throttled. True if this begins a throttling.

        Answers to requests from before the pause belong to the same event; only their Retry-After is heeded.
        """
        asked = min(retry_after or 0.0, self._policy.retry_after_cap_s)
        began = self.throttled_since is None
        if began or started >= self._paused_at:
            if began:
                self.throttled_since, self._threshold = now, self.limit / 2
            self.limit = max(float(self._policy.limit_min), self.limit / 2)
            pause = self._jitter(self._strikes)
            # A named time is the earliest; the jitter on top keeps those who were told the same from coming back together.
            asked += min(pause, asked / 2)
            self._strikes += 1
            self._paused_at = now
            self.paused_until = max(self.paused_until, now + max(pause, asked))
        elif asked:
            self.paused_until = max(self.paused_until, now + asked)
        return began

    def _window(self) -> float:
        return max(self._policy.window_s, self._request_s)


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
