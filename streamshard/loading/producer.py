"""Who forms batches: a thread, while the training loop computes, or the loop's own thread when it asks for one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from streamshard.loading.formed import Formed, Source
from streamshard.loading.handover import Handover

_logger = logging.getLogger("streamshard")

JOIN_S = 5.0  # a function of the user's that does not return cannot be interrupted


class Ready(Protocol):
    """Where formed batches are taken from; None at the end or when closed. `waits` and `waited_s` are what that took."""

    waits: int
    waited_s: float

    def take(self) -> Formed | None: ...


class Direct:
    """Reads `source` when a batch is asked for, in the thread that asks. To a `Run` it looks like a `Producer`.

    It may be closed on another thread (by the collector, or at exit) while a batch is being formed: that is interrupted, and
    the forming thread lets go of the source.
    """

    def __init__(self, source: Source, finish: Callable[[Formed], None] | None = None) -> None:
        self.ready: Ready = self
        self.waits = 0
        self.waited_s = 0.0
        self._source = source
        self._batches = source.batches()
        self._finish = finish
        self._closed = False
        self._forming = threading.Lock()

    def start(self) -> None:
        """Nothing is done ahead."""

    def take(self) -> Formed | None:
        """Form the next batch."""
        began = time.perf_counter()
        formed = None
        try:
            with self._forming:
                formed = None if self._closed else next(self._batches, None)
                if formed is not None and self._finish is not None:
                    self._finish(formed)
        except Exception:
            if not self._closed:  # else it is the interruption
                raise
        finally:
            self.waits += 1
            self.waited_s += time.perf_counter() - began
            if self._closed:
                self._let_go()
        return None if self._closed else formed

    def close(self) -> None:
        """Nothing more is wanted."""
        self._closed = True
        self._source.interrupt()
        self._let_go()

    def _let_go(self) -> None:
        if self._forming.acquire(blocking=False):
            try:
                self._source.close()
            finally:
                self._forming.release()


class Producer:
    """Reads `source` in a thread of its own, `depth` batches ahead of the one that takes them from `ready`.

    finish: called in that thread with every batch formed.
    """

    def __init__(self, source: Source, depth: int, finish: Callable[[Formed], None] | None = None) -> None:
        self._handover: Handover[Formed] = Handover(depth)
        self.ready: Ready = self._handover
        self._source = source
        self._finish = finish
        # A daemon, because it may be in a user's function at exit; `close` ends it before the interpreter goes.
        self._thread = threading.Thread(target=self._run, name="streamshard-loader", daemon=True)

    def start(self) -> None:
        """Begin to read. Apart from construction, so that whoever may have to close this has it in hand before."""
        self._thread.start()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            for formed in self._source.batches():
                if self._finish is not None:
                    self._finish(formed)
                if not self._handover.put(formed):
                    break
        except BaseException as error:  # noqa: BLE001  (the training loop's thread raises it)
            failure = error
            self._handover.end(failure)  # first of all: closing may have to wait for others, who wait for the loop
        try:
            self._source.close()
        except Exception as error:  # noqa: BLE001  (the taker must hear of an end, whatever happens)
            failure = failure or error
        self._handover.end(failure)
        failure = None  # its traceback has this frame: keeping it here would leave all of this to the collector

    def close(self) -> None:
        """Stop reading ahead and end the thread."""
        self._handover.close()
        self._source.interrupt()
        if self._thread is threading.current_thread():  # the collector may close an iterator on any thread
            return
        if self._thread.ident is None:  # not started yet: it will find that it is not wanted
            return
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            _logger.warning(
                "the loader's thread is still busy in the steps' functions after %.0f s; it ends when they have returned",
                JOIN_S,
            )
