"""A second request for a range whose answer is late (Dean and Barroso, "The Tail at Scale", 2013).

`HedgePolicy` is pure: when, and whether there is budget. `hedged` races the two. Off unless the policy says so: it helps
where single answers are late now and then, and a store that is slow as a whole must not be asked twice for everything;
hence the budget, and none while the endpoint throttles.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from streamshard.storage.policy import StoragePolicy

T = TypeVar("T")

_REMEMBERED = 200  # request times that the p95 is taken over
_ENOUGH = 20  # fewer say nothing about a p95
_BURST = 16.0


class HedgePolicy:
    """How late is late, and how many second requests are left."""

    def __init__(self, policy: StoragePolicy) -> None:
        self._policy = policy
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._tokens = _BURST * policy.hedge_share * 4  # a few at once; earned back at hedge_share a request
        self._after: float | None = None
        self._since = 0

    def seen(self, seconds: float) -> None:
        """A request was answered after `seconds`: earn a share of a second request."""
        self._times.append(seconds)
        self._tokens = min(_BURST, self._tokens + self._policy.hedge_share)
        self._since += 1
        if self._since >= _ENOUGH:
            self._since = 0
            ordered = sorted(self._times)
            self._after = ordered[int(0.95 * (len(ordered) - 1))]

    def delay(self) -> float | None:
        """Seconds after which a second request may be sent; None: not at all."""
        if not self._policy.hedge or self._after is None:
            return None
        return max(self._after, self._policy.hedge_after_s)

    def spend(self) -> bool:
        """Pay for a second request, if there is budget."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


async def hedged(
    first: Callable[[], Awaitable[T]],
    second: Callable[[], Awaitable[T]],
    delay: float,
    allowed: Callable[[], bool],
) -> tuple[T, bool]:
    """The result of `first`, or of `second` if that was faster: it is begun after `delay` seconds if `allowed()` then.

    Returns (result, whether the second won); the loser is cancelled. A failure counts only if both fail: the first's.
    """
    racing = asyncio.ensure_future(first())
    tasks = [racing]
    try:
        await asyncio.wait(tasks, timeout=delay)
        if racing.done() or not allowed():
            return await racing, False
        tasks.append(asyncio.ensure_future(second()))
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None:
                    return task.result(), task is not racing
        return await racing, False
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
