"""The shell around `Limiter`: coroutines wait here until the endpoint may be asked, the urgent ones first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Any

from streamshard.storage.hedging import HedgePolicy
from streamshard.storage.limiter import Episode, Limiter, RetryBudget
from streamshard.storage.policy import StoragePolicy


class Endpoint:
    """What all stores of a process share about one endpoint. Lives on the event loop."""

    def __init__(self, name: str, policy: StoragePolicy, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.limiter = Limiter(policy)
        self.budget = RetryBudget(policy)
        self.episode = Episode()
        self.hedge = HedgePolicy(policy)
        self._loop = loop
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._alarm: Any = None

    def now(self) -> float:
        """The loop's clock."""
        return self._loop.time()

    async def enter(self, deadline: float, *, urgent: bool) -> None:
        """Wait for a place. Raises TimeoutError at `deadline`. Every `enter` needs a `leave`."""
        if not self._waiting and self.limiter.admit(self.now()):
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._waiting, (not urgent, next(self._arrivals), turn))
        self._admit()
        try:
            async with asyncio.timeout_at(deadline):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # admitted in the same moment
                self.leave()
            raise

    def enter_at_once(self) -> bool:
        """Take a place if there is one and nobody waits for it."""
        return not self._waiting and self.limiter.throttled_since is None and self.limiter.admit(self.now())

    def leave(self) -> None:
        """Give the place back, and let others in once the caller has said how it went."""
        self.limiter.released()
        self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        now = self.now()
        while self._waiting:
            turn = self._waiting[0][2]
            if not turn.done() and not self.limiter.admit(now):
                break
            heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
        if self._waiting and now < self.limiter.opens_at:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._loop.call_at(self.limiter.opens_at, self._admit)
