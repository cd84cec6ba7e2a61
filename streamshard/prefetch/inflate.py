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
import weakref
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
    """The thread, and the bound on what it holds. For one consumer thread; `close` may come from any."""

    def __init__(self) -> None:
        self._offered: SimpleQueue[Block | None] = SimpleQueue()
        self._bytes = 0
        # A daemon: at exit it may be in the middle of a call. It refers to the queue alone, so it keeps nothing alive.
        threading.Thread(target=_run, args=(self._offered,), name="streamshard-inflate", daemon=True).start()
        weakref.finalize(self, self._offered.put, None)

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

    def close(self) -> None:
        """End the thread; may be called again."""
        self._offered.put(None)


def _run(offered: SimpleQueue[Block | None]) -> None:
    blocks: list[Block | None] = []
    while None not in blocks:
        blocks = [offered.get()]
        with suppress(Empty):
            while len(blocks) < _AT_ONCE:
                blocks.append(offered.get_nowait())
        _inflate([block for block in blocks if block is not None and block.claim()])


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
