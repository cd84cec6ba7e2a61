"""A bounded queue between two threads that can be closed from both ends and carries a failure to the taker.

Two of the interpreter's own queues, one for the things and one for the room left: they are written in C, and a hand-over
costs 30 us on a machine where one through a ``threading.Condition`` costs 70.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class _End:
    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure


class Handover(Generic[T]):
    """At most `depth` things wait. One thread puts, another takes; `close` may be called from any.

    What was put before an end or a failure is still taken before it shows. `waits` and `waited_s` say how often and how
    long the taker found nothing.
    """

    def __init__(self, depth: int) -> None:
        self.waits = 0
        self.waited_s = 0.0
        self._closed = False
        self._things: SimpleQueue[T | _End] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self._room.put(None)

    def put(self, thing: T) -> bool:
        """Wait for room; False if the taker wants no more."""
        self._room.get()
        if self._closed:
            return False
        self._things.put(thing)
        return True

    def end(self, failure: BaseException | None = None) -> None:
        """No more will be put; the taker gets `failure` when it comes to it."""
        self._things.put(_End(None if self._closed else failure))

    def take(self) -> T | None:
        """The next thing; None at the end or when closed. Raises what the other side failed with."""
        try:
            thing = self._things.get_nowait()
        except Empty:
            began = time.perf_counter()
            thing = self._things.get()
            self.waits += 1
            self.waited_s += time.perf_counter() - began
        if isinstance(thing, _End):
            self._things.put(_End(None))  # for whoever asks again
            if thing.failure is not None and not self._closed:
                raise thing.failure
            return None
        self._room.put(None)
        return None if self._closed else thing

    def close(self) -> None:
        """Let both sides go at once; what waits is dropped."""
        self._closed = True
        try:
            while True:
                self._things.get_nowait()
        except Empty:
            self._things.put(_End(None))
        self._room.put(None)
