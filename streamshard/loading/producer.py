"""The thread that forms batches while the training loop computes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from streamshard.loading.formed import Formed, Source
from streamshard.loading.handover import Handover

_logger = logging.getLogger("streamshard")

JOIN_S = 5.0  # a function of the user's that does not return cannot be interrupted


class Producer:
    """Reads `source` in a thread of its own, `depth` batches ahead of the one that takes them from `ready`.

    finish: called in that thread with every batch formed.
    """

    def __init__(self, source: Source, depth: int, finish: Callable[[Formed], None] | None = None) -> None:
        self.ready: Handover[Formed] = Handover(depth)
        self._source = source
        self._finish = finish
        # A daemon, because it may be in a user's function at exit; `close` ends it before the interpreter goes.
        self._thread = threading.Thread(target=self._run, name="streamshard-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            for formed in self._source.batches():
                if self._finish is not None:
                    self._finish(formed)
                if not self.ready.put(formed):
                    break
        except BaseException as error:  # noqa: BLE001  (the training loop's thread raises it)
            failure = error
        try:
            self._source.close()
        except Exception as error:  # noqa: BLE001  (the taker must hear of an end, whatever happens)
            failure = failure or error
        self.ready.end(failure)
        failure = None  # its traceback has this frame: keeping it here would leave all of this to the collector

    def close(self) -> None:
        """Stop reading ahead and end the thread."""
        self.ready.close()
        self._source.interrupt()
        if self._thread is threading.current_thread():  # the collector may close an iterator on any thread
            return
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            _logger.warning(
                "the loader's thread is still busy in the steps' functions after %.0f s; it ends when they have returned",
                JOIN_S,
            )
