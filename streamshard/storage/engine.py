"""One event loop in one thread for all requests of this process.

Requests are coroutines here, so that any of them can be cancelled at once: a consumer that leaves, Ctrl-C, the end of the
interpreter. Blocking calls (file systems without an asynchronous interface) run on a few threads beside the loop.

A forked child has the parent's objects but not its threads. It gets an engine of its own at first use; what belonged to the
parent's is kept, unused, for the life of the process, because closing it here could speak into the parent's connections.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from streamshard.errors import UsageError

T = TypeVar("T")

_EXIT_S = 2.0  # how long the end of the interpreter waits for requests to be cancelled
_BLOCKING_THREADS = 16


class Engine:
    """The loop, its thread, and what else a process has exactly once for storage."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.shared: dict[Any, Any] = {}  # limiters and the like, by endpoint; under the lock
        self.lock = threading.Lock()  # for whoever builds something once per process
        self._blocking = ThreadPoolExecutor(_BLOCKING_THREADS, "streamshard-blocking")
        self._thread = threading.Thread(target=self._run, name="streamshard-io", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`'s result; if the wait is interrupted, `work` is cancelled. Not for callers on the loop, who would wait for
        themselves: they get a `UsageError`.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("a storage hook may not read from a store: hand the record to a thread of your own")
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def blocking(self, call: Callable[..., T], *arguments: Any) -> T:
        """The result of a blocking call, made on a thread beside the loop."""
        return await self.loop.run_in_executor(self._blocking, call, *arguments)

    def submit_blocking(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Start a blocking call on a thread beside the loop, for callers that are not on the loop."""
        return self._blocking.submit(call, *arguments)

    def close(self) -> None:
        """Cancel everything and stop."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop)
            self._thread.join(_EXIT_S)
        self._blocking.shutdown(wait=False, cancel_futures=True)

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_EXIT_S / 2) if tasks else None
        self.loop.stop()


_current: Engine | None = None
_lock = threading.Lock()
_inherited: list[Any] = []


def current_engine() -> Engine:
    """The engine of this process, started at first use."""
    global _current  # noqa: PLW0603  (one per process is the point)
    with _lock:
        if _current is None:
            _current = Engine()
        return _current


def is_current(engine: Engine) -> bool:
    """Whether `engine` is this process's and still runs."""
    return engine is _current and engine.loop.is_running()


def keep_inherited(thing: object) -> None:
    """Never let go of something that belongs to the parent of this forked process."""
    _inherited.append(thing)


def _forget_parent() -> None:
    global _current, _lock
    if _current is not None:
        _inherited.append(_current)
    _current, _lock = None, threading.Lock()


def _close_at_exit() -> None:
    if _current is not None:
        _current.close()


os.register_at_fork(after_in_child=_forget_parent)
atexit.register(_close_at_exit)
