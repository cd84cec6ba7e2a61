"""Decompressing ahead on another core: many blocks in one call.

The interpreter's lock decides how this is done. A thread that has to win it back from a busy consumer waits up to 5 ms for it,
so a thread that decompresses block by block falls behind (docs/decisions/0013). This one takes all blocks that were offered
meanwhile, up to sixteen, and decompresses them in one call without the lock: two waits for sixteen blocks.

Nobody depends on it. A block that it has not begun is decompressed by the consumer, as are blocks that it could not do, so
that errors arise in one place.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

from streamshard.errors import DataError
from streamshard.prefetch.plan import BlockPiece
from streamshard.shard.compression import DECOMPRESSES_MANY, decompress_many

_AT_ONCE = 16
_LEAST = 32 << 10  # a smaller block is decompressed in less time than it takes to hand it over
_MOST = 32 << 20  # bytes decompressed and not yet taken
_WORTH = 0.95  # what does not compress is merely copied, and new memory for it costs more than the copy


class Block:
    """A fetched block. Whoever claims it, consumer or inflater, is the one who decompresses it."""

    __slots__ = ("_unclaimed", "done", "frame", "inflated", "piece")

    def __init__(self, piece: BlockPiece, frame: memoryview) -> None:
        self.piece = piece
        self.frame = frame
        self.done: threading.Event | None = None  # once it is offered
        self.inflated: memoryview | None = None  # when `done`; None if it failed
        self._unclaimed = [True]

    @property
    def size(self) -> int:
        """Bytes when decompressed."""
        return int(self.piece.index.uncompressed[self.piece.block])

    def claim(self) -> bool:
        """True for the first caller only."""
        try:
            return self._unclaimed.pop()  # one step for the interpreter: no lock is needed
        except IndexError:
            return False


class Inflater:
    """What one consumer thread has decompressed ahead, by the process's one thread for that."""

    def __init__(self) -> None:
        self._offered = _thread()
        self._bytes = 0

    @staticmethod
    def helps() -> bool:
        """Whether there is another core, and the call."""
        return DECOMPRESSES_MANY and len(os.sched_getaffinity(0)) > 1

    def offer(self, block: Block) -> None:
        """`block` will be taken soon."""
        size = block.size
        if block.done is not None or size < _LEAST or len(block.frame) > _WORTH * size or self._bytes + size > _MOST:
            return
        self._bytes += size
        block.done = threading.Event()
        self._offered.put(block)

    def take(self, block: Block) -> memoryview | None:
        """The decompressed bytes of a block, waiting if that is under way. None: nobody has done it."""
        if block.done is None:
            return None
        self._bytes -= block.size
        if block.claim():
            return None
        block.done.wait()
        return block.inflated


Offered = SimpleQueue[Block]
_process: dict[str, Offered] = {}  # "offered" -> the queue of this process's thread
_lock = threading.Lock()


def _thread() -> Offered:
    """The queue of this process's thread, which is started at first use and waits between iterations."""
    with _lock:
        if "offered" not in _process:
            offered: Offered = SimpleQueue()
            # A daemon: at exit it may be in the middle of a call, which is C and may be ended there.
            threading.Thread(target=_run, args=(offered,), name="streamshard-inflate", daemon=True).start()
            _process["offered"] = offered
        return _process["offered"]


def _forget_parent() -> None:
    """A forked child has the parent's queue and not its thread."""
    global _lock  # noqa: PLW0603  (somebody may have held it)
    _process.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)


def _run(offered: Offered) -> None:
    while True:
        blocks = [offered.get()]
        with suppress(Empty):
            while len(blocks) < _AT_ONCE:
                blocks.append(offered.get_nowait())
        _inflate([block for block in blocks if block.claim()])
        del blocks  # it waits for the next ones now, and must not keep these


def _inflate(blocks: list[Block]) -> None:
    try:
        found = decompress_many([block.frame for block in blocks], [block.size for block in blocks])
        for block, inflated in zip(blocks, found, strict=True):
            block.inflated = inflated
    except DataError:
        pass  # the consumer will do it again, and say what is wrong
    finally:
        for block in blocks:
            if block.done is not None:
                block.done.set()
