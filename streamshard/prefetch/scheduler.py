"""Requests for what will be needed, ahead of time and within a byte budget. One `ReadAhead` per iteration.

Every stripe of every partition is a sequential stream, and all advance at about the same rate. So the stream that will run
out first is the one with the fewest rows ahead, and it gets the next request: that is the order of need over all partitions.
How many requests are in flight is the store's to say (its allowance falls while it throttles, and the budget with it); how
many bytes wait is bounded by the budget. A stream that the consumer waits for is served at once whatever the bounds say,
with one block at least: no stream ever waits for another one's bytes, which is what rules out deadlock.

Until the first item has been handed out nothing is speculative: each stream asks for the rows that filling the shuffle buffer
takes. After that its requests double up to its share of the budget, per stream and not per shard.

Answers arrive on the store's thread, which slices and plans; the consumer unpacks, one block at a time and out of one reused
buffer. Each time it takes a block, the next ones of the stream are offered to a thread that decompresses many in one call; what
that has not begun when it is wanted the consumer decompresses too (inflate.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from streamshard.errors import CorruptError, StorageError
from streamshard.observe.events import StorageCounters
from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.inflate import Block, Inflater
from streamshard.prefetch.plan import BlockPiece, Request, Segment, StripePlan
from streamshard.shard.records import Sample
from streamshard.storage.store import Reply

MAX_UNIT = 8 << 20  # larger ranges gain nothing on S3 and GCS (AWS and AnyBlob advise 8-16 MiB)
_FIRST_UNIT = 1 << 20, 4 << 20  # the first speculative request of a stream: with many streams, with few
_EASY = 8  # requests in flight from which on the budget is used whole
_OFFERED = 2  # blocks of a stream that are decompressed ahead of the consumer
_ALL_ROWS = 1 << 62
_REPORT_S = 10.0  # between two records of counters for the hook

Blocks = deque[Block]


class _Slot:
    """A request of a stream, on its way or arrived, until its last block is used up."""

    def __init__(self, request: Request, *, urgent: bool) -> None:
        self.request = request
        self.urgent = urgent
        self.ready: Future[Blocks] = Future()
        self.fresh = False
        self.rows = request.rows


class ReadAhead:
    """The budget and the bookkeeping shared by the streams of one iteration. Closed with `close`, from any thread.

    budget: bytes. streams: how many there will be at a time. report: called every few seconds and at the end.
    """

    def __init__(self, budget: int, streams: int, report: Callable[[], None] | None = None) -> None:
        self.unit_limit = max(1, min(MAX_UNIT, budget // (2 * max(1, streams))))
        self.first_unit = max(_FIRST_UNIT[0], min(_FIRST_UNIT[1], budget // (4 * max(1, streams))))
        self.speculative = False
        self.inflater: Inflater | None = None  # before the first item there is nothing to be ahead of
        self.buffer = bytearray()  # for the block being decoded; the streams share it, having one consumer
        self.stalls = 0
        self.waiting_s = self.decoding_s = 0.0
        self.outstanding = self.peak = 0
        self._budget = budget
        self._in_flight = 0
        self._streams: list[StripeStream] = []
        # Reentrant: the collector may close an abandoned iteration on the thread that holds it.
        self._lock = threading.RLock()
        self._fetches: set[Future[Reply]] = set()
        self._pumping = self._closed = False
        self._report = report
        self._reported = time.monotonic()

    def stream(self, access: ShardAccess, segments: Iterable[Segment], *, refs: bool, rows: int = 1) -> StripeStream:
        """A new stream over `segments`; its first `rows` rows are requested at once."""
        opened = StripeStream(self, access, segments, refs=refs, rows=rows)
        with self._lock:
            self._streams.append(opened)
        self.pump()
        return opened

    def begin_speculation(self) -> None:
        """The first item has been handed out: from now on requests are made for what comes later."""
        self.speculative = True
        if self.inflater is None and Inflater.helps():
            self.inflater = Inflater()
        self.pump()

    def demand(self, stream: StripeStream) -> None:
        """The consumer waits for `stream`: see that a request of it is under way, whatever the bounds say."""
        with self._lock:
            chosen = None if stream.slots else self._slot(stream, urgent=True)
        if chosen is not None:
            self._send(*chosen)

    def pump(self) -> None:
        """Make the requests that may be made now. One thread at a time does it; what another one has changed meanwhile, it
        finds before it stops.
        """
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._lock:
                chosen = self._choose()
                if chosen is None:
                    self._pumping = False
                    return
            self._send(*chosen)

    def _choose(self) -> tuple[StripeStream, _Slot] | None:
        """The next request by need, if the bounds allow one; called with the lock held."""
        while not self._closed:
            streams = [s for s in self._streams if s.plan.ready and (self.speculative or s.rows_ahead < s.rows_needed)]
            if not streams:
                return None
            neediest = min(streams, key=_rows_ahead)
            allowance = neediest.access.store.allowance()
            if self._in_flight >= int(allowance):
                return None
            least = min(self.unit_limit, neediest.next_size) if self.speculative else 1
            if neediest.slots and self._room(allowance) < least:
                return None
            chosen = self._slot(neediest, urgent=not self.speculative)
            if chosen is not None:  # else this stream has come to its end
                return chosen
        return None

    def _room(self, allowance: float) -> int:
        """Bytes that may still be asked for; the budget shrinks with the allowance when that is low."""
        return int(self._budget * min(1.0, allowance / _EASY)) - self.outstanding

    def _slot(self, stream: StripeStream, *, urgent: bool) -> tuple[StripeStream, _Slot] | None:
        """The next request of `stream`, entered in the books; None if it has none (any more)."""
        if self.speculative:
            room = self._room(stream.access.store.allowance())
            request = stream.plan.next(max(0, min(room, stream.next_size)), _ALL_ROWS)
            stream.next_size = min(self.unit_limit, max(self.first_unit, 2 * stream.next_size))
        else:
            request = stream.plan.next(self.unit_limit, max(1, stream.rows_needed - stream.rows_ahead))
        if request is None:
            if stream.plan.finished and stream in self._streams:
                self._streams.remove(stream)
            return None
        slot = _Slot(request, urgent=urgent)
        stream.slots.append(slot)
        stream.rows_ahead += slot.rows
        self._in_flight += 1
        self.outstanding += request.size
        self.peak = max(self.peak, self.outstanding)
        return stream, slot

    def _send(self, stream: StripeStream, slot: _Slot) -> None:
        try:
            fetch = stream.access.send(slot.request, urgent=slot.urgent, fresh=slot.fresh)
        except Exception as error:  # noqa: BLE001  (whatever it is, the consumer must hear of it)
            self._settle(stream, slot, None, error)
            return
        with self._lock:
            self._fetches.add(fetch)
        fetch.add_done_callback(partial(self._arrived, stream, slot))
        if self._closed:
            fetch.cancel()

    def _arrived(self, stream: StripeStream, slot: _Slot, fetched: Future[Reply]) -> None:
        """An answer, on whatever thread it comes: find its blocks, and hand them to the consumer."""
        with self._lock:
            self._fetches.discard(fetched)
        try:
            reply = fetched.result()
            if slot.request.ranges:
                index = stream.access.learn(slot.request, reply)
                with self._lock:
                    stream.plan.learned(slot.request, index)
            blocks = deque(map(Block, slot.request.pieces, stream.access.frames(slot.request, reply)))
            self._settle(stream, slot, blocks, None)
        except CancelledError:
            self._settle(stream, slot, None, StorageError("the iteration was closed"))
        except CorruptError as error:
            if slot.fresh:
                self._settle(stream, slot, None, error)
            else:  # wrong bytes are read once more, past any cache
                slot.fresh = slot.urgent = True
                self._send(stream, slot)
        except StorageError as error:
            named = stream.access.named(slot.request.shard, error)
            named.__cause__ = error
            self._settle(stream, slot, None, named)
        except Exception as error:  # noqa: BLE001  (a fault of ours: the consumer would wait for ever)
            self._settle(stream, slot, None, error)

    def _settle(self, stream: StripeStream, slot: _Slot, blocks: Blocks | None, failure: Exception | None) -> None:
        with self._lock:
            self._in_flight -= 1
            stream.rows_ahead += slot.request.rows - slot.rows
            slot.rows = slot.request.rows
        if failure is not None:
            slot.ready.set_exception(failure)
        else:
            slot.ready.set_result(blocks or deque())
        self.pump()

    def used(self, stream: StripeStream, rows: int, finished: _Slot | None) -> None:
        """The consumer has taken a block, the last one of the slot `finished` if that is given."""
        with self._lock:
            stream.rows_ahead -= rows
            stream.rows_needed = max(0, stream.rows_needed - rows)
            if finished is not None:
                self.outstanding -= finished.request.size
        self.pump()
        if self._report is not None and time.monotonic() - self._reported > _REPORT_S:
            self._reported = time.monotonic()
            self._report()

    def drop(self, stream: StripeStream) -> None:
        """Nothing more of `stream` is taken: what it had asked for no longer counts."""
        with self._lock:
            if stream in self._streams:
                self._streams.remove(stream)
            self.outstanding -= sum(slot.request.size for slot in stream.slots)
            stream.slots.clear()
        self.pump()

    def counters(self, store: StorageCounters) -> StorageCounters:
        """`store`'s counters with this iteration's."""
        return replace(
            store, stalls=self.stalls, waiting_storage_s=self.waiting_s, decoding_s=self.decoding_s,
            lookahead_bytes=self.outstanding, lookahead_peak=self.peak,
        )  # fmt: skip

    def close(self) -> None:
        """Cancel what is in flight and forget what has arrived."""
        with self._lock:
            self._closed = True
            self._streams = []
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.cancel()
        report, self._report = self._report, None  # it refers to the iteration, which refers to this
        if report is not None:
            report()


def _rows_ahead(stream: StripeStream) -> int:
    return stream.rows_ahead


class StripeStream:
    """The samples of consecutive segments, in order. `take` is for one consumer thread; the rest is `ReadAhead`'s."""

    def __init__(
        self, ahead: ReadAhead, access: ShardAccess, segments: Iterable[Segment], *, refs: bool, rows: int
    ) -> None:
        self.access = access
        self.plan = StripePlan(segments, access)
        self.slots: deque[_Slot] = deque()
        self.rows_ahead = 0  # asked for and not taken
        self.rows_needed = rows  # before anything is speculative
        self.next_size = ahead.first_unit
        self._ahead = ahead
        self._refs = refs
        self._blocks: Blocks = deque()
        self._rows: list[Any] = []  # of the current block, the next one last

    def take(self, count: int) -> list[Any]:
        """The next `count` samples; with `refs`, (sample, shard, row) tuples. The caller knows that they exist.

        They leave the block's list: a sample that waits in a shuffle buffer keeps itself alive and not its block, and one
        that has been used is freed while it is still in the processor's cache.
        """
        while len(self._rows) < count:
            earlier = self._rows
            self._next_block(count - len(earlier))
            self._rows += earlier
        taken = self._rows[-count:] if count else []
        del self._rows[len(self._rows) - count :]
        taken.reverse()
        return taken

    def close(self) -> None:
        """Nothing more is taken."""
        self._blocks, self._rows = deque(), []
        self._ahead.drop(self)

    def _next_block(self, needed: int) -> None:
        while not self._blocks:
            self._receive(needed)
        ahead, inflater = self._ahead, self._ahead.inflater
        block = self._blocks.popleft()
        if inflater is not None:
            for coming in self._coming():
                inflater.offer(coming)
        began = time.perf_counter()
        inflated = None if inflater is None else inflater.take(block)
        self._rows = self._deliver(block.piece, self.access.decode(block.piece, block.frame, ahead.buffer, inflated))
        ahead.decoding_s += time.perf_counter() - began
        del block, inflated
        finished = None if self._blocks else self.slots.popleft()
        ahead.used(self, len(self._rows), finished)
        self._rows.reverse()

    def _coming(self) -> list[Block]:
        """The next blocks, as far as they have arrived."""
        coming = list(islice(self._blocks, _OFFERED))
        if len(coming) < _OFFERED and len(self.slots) > 1:
            arrived = self.slots[1].ready
            if arrived.done() and arrived.exception() is None:
                coming += islice(arrived.result(), _OFFERED - len(coming))
        return coming

    def _receive(self, needed: int) -> None:
        """The next request's blocks, waiting for them if need be."""
        self.rows_needed = max(self.rows_needed, needed)
        if not self.slots:
            self._ahead.demand(self)
        slot = self.slots[0]
        if not slot.ready.done():
            began = time.perf_counter()
            slot.ready.exception()  # waits
            self._ahead.stalls += 1
            self._ahead.waiting_s += time.perf_counter() - began
        self._blocks = slot.ready.result()
        slot.ready = Future()  # the blocks are the stream's now
        if not self._blocks:  # an index alone
            self.slots.popleft()
            self._ahead.used(self, 0, slot)

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
