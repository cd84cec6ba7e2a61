"""A bounded queue between two threads that can be closed from both ends and carries a failure to the reader."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Handover(Generic[T]):
    """At most `depth` things wait. One thread puts, another takes; `close` may be called from any.

    What was put before an end or a failure is still taken before it shows. `waits` and `waited_s` say how often and how
    long the taker found nothing.
    """

    def __init__(self, depth: int) -> None:
        self.waits = 0
        self.waited_s = 0.0
        self._depth = depth
        self._things: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = self._ended = False
        self._failure: BaseException | None = None

    def put(self, thing: T) -> bool:
        """Wait for room; False if the taker wants no more."""
        with self._changed:
            while len(self._things) >= self._depth and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._things.append(thing)
            self._changed.notify_all()
            return True

    def end(self, failure: BaseException | None = None) -> None:
        """No more will be put; the taker gets `failure` when it comes to it."""
        with self._changed:
            self._ended, self._failure = True, failure
            self._changed.notify_all()

    def take(self) -> T | None:
        """The next thing; None at the end or when closed. Raises what the other side failed with."""
        with self._changed:
            if not self._things and not self._ended and not self._closed:
                began = time.perf_counter()
                while not self._things and not self._ended and not self._closed:
                    self._changed.wait()
                self.waits += 1
                self.waited_s += time.perf_counter() - began
            if self._things and not self._closed:
                thing = self._things.popleft()
                self._changed.notify_all()
                return thing
            failure, self._failure = self._failure, None
        if failure is not None and not self._closed:
            raise failure
        return None

    def close(self) -> None:
        """Let both sides go at once; what waits is dropped."""
        with self._changed:
            self._closed = True
            self._things.clear()
            self._changed.notify_all()
