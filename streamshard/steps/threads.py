"""`Map` on several threads: calls run ahead, results leave in order, and the cursor is that of what has left.

The one stage that pulls more than it has given. So it notes with every item where its upstream stood after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from streamshard.order.cursor import Cursor, Ref


class Pools:
    """The threads of an iteration's steps, shared by its partitions and made when first needed.

    held: partitions that share them.
    """

    def __init__(self, held: int) -> None:
        self._held = max(1, held)
        self._pools: dict[int | str, ThreadPoolExecutor] = {}

    def pool(self, place: int | str, threads: int) -> ThreadPoolExecutor:
        """The pool of the step at `place`."""
        if place not in self._pools:
            self._pools[place] = ThreadPoolExecutor(threads, thread_name_prefix="streamshard-map")
        return self._pools[place]

    def ahead(self, threads: int) -> int:
        """How many calls each partition keeps in flight, so that together they keep the threads busy."""
        return -(-2 * threads // self._held)

    def close(self) -> None:
        """Let the threads end; calls that have not begun never do."""
        for pool in list(self._pools.values()):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class Call:
    """An item on its way through the function, or the failure that met the one who wanted to pull it."""

    item: Any
    result: Future[Any] | None
    cursor: Cursor
    identity: tuple[Any, ...]
    ref: Ref
    counters: tuple[tuple[str, int], ...]
    failure: Exception | None = None


def run_ahead(calls: Iterator[Call], ahead: int) -> Generator[Call, None, None]:
    """`calls`, in order, each when it is done or failed; pulled so that `ahead` more are in flight.

    A failure to pull is kept until its turn: what came before it is not its fault.
    """
    waiting: deque[Call] = deque()
    more = True
    try:
        while True:
            while more and len(waiting) <= ahead:
                call = next(calls, None)
                if call is None:
                    more = False
                    break
                waiting.append(call)
                more = call.failure is None
            if not waiting:
                return
            yield waiting.popleft()
    finally:
        for call in waiting:
            if call.result is not None:
                call.result.cancel()
