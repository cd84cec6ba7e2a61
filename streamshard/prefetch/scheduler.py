"""Threads that fetch ahead of the consumer, within a byte budget. One `ReadAhead` per iteration.

Every stripe of every partition is a sequential stream. While one unit (a ranged GET of neighbouring blocks) is being
consumed, the stream's next one is in flight. So with S live streams at most 2 * S units of budget / (2 * S) bytes wait, and
whatever the consumer needs next has always been asked for: a stream never waits for another one's share, which is what rules
out deadlock.

Blocks are decompressed and unpacked by the consumer, one at a time and into one reused buffer. Threads for it were measured:
the hand-overs of the GIL cost as much as the parallel zstd gains (docs/decisions/0003-decode-in-the-consumer.md).

Until the first item has been handed out nothing is speculative: each stream asks for one block when it is needed. After
that units double up to their share, per stream and not per shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.plan import BlockPiece, Segment, plan_blocks, plan_units
from streamshard.shard.records import Sample

MAX_UNIT = 8 << 20  # larger ranges gain nothing on S3 and GCS (AWS and AnyBlob advise 8-16 MiB)
_FIRST_UNIT = 1 << 20  # the first speculative unit
_FETCH_THREADS = 16


class ReadAhead:
    """The threads and the budget shared by the streams of one iteration. Closed with `close`, from any thread."""

    def __init__(self, budget: int, streams: int) -> None:
        self.unit_limit = max(1, min(MAX_UNIT, budget // (2 * max(1, streams))))
        self.speculative = False
        self._fetchers = ThreadPoolExecutor(min(_FETCH_THREADS, max(2, streams)), "streamshard-fetch")
        self.buffer = bytearray()  # for the block being decoded; the streams share it, having one consumer
        self._streams: list[StripeStream] = []

    def stream(self, access: ShardAccess, segments: Iterable[Segment], *, refs: bool) -> StripeStream:
        """A new stream over `segments`; its first block is requested at once."""
        opened = StripeStream(self, access, segments, refs=refs)
        if not self.speculative:
            self._streams.append(opened)
        opened.request()
        return opened

    def begin_speculation(self) -> None:
        """The first item has been handed out: from now on every stream keeps its next unit in flight."""
        self.speculative = True
        for stream in self._streams:
            stream.request()
        self._streams.clear()

    def submit_fetch(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on a fetching thread."""
        return self._fetchers.submit(work)

    def close(self) -> None:
        """Forget what has not started. Requests in flight end by themselves and are dropped."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._streams.clear()


class _Limit:
    """How many bytes the next unit may have; apart from the stream, so that stream and plan do not refer to each other."""

    bytes = 0

    def __call__(self) -> int:
        return self.bytes


class StripeStream:
    """The samples of consecutive segments, in order. Used by one consumer thread.

    Planning reads indexes and therefore runs on the fetching threads; it is never run by two at once, because a unit is
    requested only when the one before it has arrived.
    """

    def __init__(self, ahead: ReadAhead, access: ShardAccess, segments: Iterable[Segment], *, refs: bool) -> None:
        self._ahead = ahead
        self._access = access
        self._refs = refs
        self._limit = _Limit()
        self._units = plan_units(plan_blocks(segments, access.index), self._limit)
        self._unit: Future[list[tuple[BlockPiece, memoryview]]] | None = None
        self._fetched: deque[tuple[BlockPiece, memoryview]] = deque()
        self._rows: list[Any] = []  # of the current block, the next one last

    def request(self) -> None:
        """Ask for the next unit unless one is in flight."""
        if self._unit is None:
            self._unit = self._ahead.submit_fetch(self._fetch)

    def _fetch(self) -> list[tuple[BlockPiece, memoryview]]:
        unit = next(self._units, None)
        if self._ahead.speculative:
            self._limit.bytes = min(self._ahead.unit_limit, max(_FIRST_UNIT, 2 * self._limit.bytes))
        return [] if unit is None else list(zip(unit, self._access.fetch(unit), strict=True))

    def take(self, count: int) -> list[Any]:
        """The next `count` samples; with `refs`, (sample, shard, row) tuples. The caller knows that they exist.

        They leave the block's list: a sample that waits in a shuffle buffer keeps itself alive and not its block, and one
        that has been used is freed while it is still in the processor's cache.
        """
        while len(self._rows) < count:
            earlier = self._rows
            self._next_block()
            self._rows += earlier
        taken = self._rows[-count:] if count else []
        del self._rows[len(self._rows) - count :]
        taken.reverse()
        return taken

    def _next_block(self) -> None:
        if not self._fetched:
            self._receive()
        piece, frame = self._fetched.popleft()
        self._rows = self._deliver(piece, self._access.decode(piece, frame, self._ahead.buffer))
        self._rows.reverse()

    def _receive(self) -> None:
        """Take the unit that was requested, waiting for it if need be, and ask for the one after it."""
        self.request()
        assert self._unit is not None  # request() has just seen to it
        self._fetched.extend(self._unit.result())
        self._unit = None
        if self._fetched and self._ahead.speculative:
            self.request()

    def _deliver(self, piece: BlockPiece, samples: list[Sample]) -> list[Any]:
        """The rows that were asked for, with their refs if they were asked for too."""
        whole = piece.slices == [(0, len(samples))]
        if not self._refs:
            return samples if whole else [s for first, last in piece.slices for s in samples[first:last]]
        return [
            (samples[row], piece.shard, piece.first_row + row)
            for first, last in piece.slices
            for row in range(first, last)
        ]
