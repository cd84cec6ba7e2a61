"""One partition's samples in their final order: reads from the stripes, swapped through the shuffle buffer.

This is the innermost loop of the package. A sample costs one swap in a plain list; everything that can be done per block
or per thousand draws is done there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np

from streamshard.order.cursor import REF_FIELD, Cursor, Ref
from streamshard.order.partition import EpochOrder, PartitionOrder
from streamshard.order.shuffle import ShuffleBuffer
from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.again import Again, Place
from streamshard.prefetch.plan import Segment
from streamshard.prefetch.scheduler import ReadAhead
from streamshard.shard.records import Sample, pack_sample

_DRAWS = 1024  # draws per vectorised call

Contents = Mapping[tuple[str, int, int], Sample]  # (source path, epoch, read) -> sample as stored


class Book(Protocol):
    """Where a source looks up an epoch: its order, and access to the dataset version it was made for."""

    def epoch(self, number: int) -> tuple[EpochOrder, ShardAccess]:
        """The order of epoch `number` and the shards it is about."""


class Kept(NamedTuple):
    """A sample for a ``contents`` snapshot: where it was read, and its packed bytes."""

    path: str
    epoch: int
    read: int
    packed: bytes


class PartitionSource:
    """The first stage of a partition's pipeline. Iterate it once; not thread-safe.

    `provenance` adds a `Ref` to each sample under ``__ref__``. `keep` remembers the samples that a contents snapshot needs.
    `first`: samples that will be asked for before anything is handed out, to be requested together. `last`: the epoch with
    which it ends; None: it goes on for ever.
    """

    def __init__(
        self,
        book: Book,
        ahead: ReadAhead,
        p: int,
        cursor: Cursor,
        *,
        tracked: bool = False,
        provenance: bool = False,
        keep: bool = False,
        contents: Contents | None = None,
        path: str = "",
        first: int = 0,
        last: int | None = None,
    ) -> None:
        self._path = path
        self._last = last
        self._first = first
        self.epoch: int = cursor[0]
        self.k: int = cursor[1]
        self._book = book
        self._ahead = ahead
        self._p = p
        self._tracked = tracked or provenance or keep
        self._provenance = provenance
        self._keep = keep
        self._contents = {(epoch, read): sample for (of, epoch, read), sample in (contents or {}).items() if of == path}
        self._current: tuple[int, int] = (-1, -1)
        self._emitted_before: int = -self.k
        # For contents: samples read and not forgotten, as read until they are emitted and packed from then on, because
        # a step may change what it is given. Another thread than the reading one may `forget` and ask for `kept`.
        self._retained: dict[tuple[int, int], Sample | bytes] = {}
        self._emitted: deque[tuple[Place, tuple[int, int]]] = deque()  # (epoch, k) -> (epoch, read)
        self._waiting: dict[Place, tuple[int, int]] = {}  # the same, of those emitted that a step carries
        self._started = False
        self.finished = False
        self._opened: _PartitionReads | None = None
        self._agains: list[Again] = []
        self._reading: list[_PartitionReads] = []  # of this epoch, and perhaps of the next

    def open(self) -> None:
        """Request the first blocks now, so that the partitions of a process wait for the store together."""
        for again in self._agains:
            again.open()
        self._agains = []
        self._opened = self._open(self.epoch, self.k, self._first)

    def close(self) -> None:
        """Let go of what was requested and not begun."""
        self._opened, self._agains = None, []
        for reads in self._reading:
            reads.close()
        self._reading = []

    def again(self, identities: Sequence[tuple[Any, ...]]) -> Again:
        """The samples of `identities`, which have been emitted before, once more."""
        places = sorted({(epoch, k) for _, epoch, k, *_ in identities})
        again = Again(self, self._ahead, self._p, self._path, places, provenance=self._provenance)
        self._agains.append(again)
        return again

    def epoch_order(self, epoch: int) -> tuple[EpochOrder, ShardAccess]:
        """For `Again`: the order of an epoch, and its shards."""
        return self._book.epoch(epoch)

    def held(self, epoch: int, read: int) -> Sample | None:
        """For `Again`: a sample out of a contents snapshot."""
        return self._contents.get((epoch, read))

    def keep_again(self, place: Place, read: int, sample: Sample) -> None:
        """For `Again`: a sample was read again."""
        if self._keep:
            self._retained[place[0], read] = pack_sample(sample)
            self._emitted.append((place, (place[0], read)))

    def _open(self, epoch: int, k: int, first: int = 0) -> _PartitionReads:
        order, access = self._book.epoch(epoch)
        part = order.partition(self._p)
        reads = _PartitionReads(
            part, access, self._ahead, k, tracked=self._tracked, contents=self._contents, first=first
        )
        self._reading = [*self._reading[-1:], reads]
        return reads

    def cursor(self) -> Cursor:
        """(epoch, k) after the last sample that left."""
        return self.epoch, self.k

    def identity(self) -> tuple[Any, ...]:
        """What tells the last sample from all others: (source path, epoch, k)."""
        return self._path, self.epoch, self.k

    def counters(self) -> Iterator[tuple[str, int]]:
        """A source drops nothing and so counts nothing."""
        return iter(())

    def ref(self) -> Ref:
        """The ref of the last sample, for messages and generators; closed-form arithmetic if refs are not tracked."""
        if self._tracked:
            return Ref(self._path, *self._current)
        return self.ref_of(self.identity())

    def ref_of(self, identity: tuple[Any, ...]) -> Ref:
        """The ref of the sample with an identity, by closed-form arithmetic."""
        _, epoch, k, *_ = identity
        order, _ = self._book.epoch(epoch)
        part = order.partition(self._p)
        shard, row = part.refs(ShuffleBuffer(part).emissions(k - 1, k))
        return Ref(self._path, int(shard[0]), int(row[0]))

    def __iter__(self) -> Generator[Sample, None, None]:
        return self._tracked_samples() if self._tracked else self._epochs()

    def _epochs(self) -> Generator[Any, None, None]:
        """All that is left, epoch after epoch if they repeat. `k` counts a sample just before it leaves."""
        opened = self._opened or self._open(self.epoch, self.k)
        self._opened = None
        while True:
            buffer, k = opened.buffer, self.k
            held = opened.fill()
            if self._keep:
                self._retained.update({p: s for p, s in self._contents.items() if p[0] == self.epoch})  # read or not
                for entry in held:
                    self._retain(entry)
            self._started = True
            # Contents of this epoch are in the buffer now or about to be read: what they were kept for is over.
            self._contents = {place: sample for place, sample in self._contents.items() if place[0] > self.epoch}
            reads: Iterator[Any] = chain.from_iterable(opened.runs())
            if self._keep:
                reads = map(self._retain, reads)
            while k < buffer.drain_from:
                stop = buffer.chunk_end(k, _DRAWS)
                slots = buffer.draws(k, stop).tolist()
                growing = buffer.size(stop) > buffer.size(k)
                # zip asks for a slot first, so a chunk's end does not swallow a read.
                for slot, read in zip(slots, reads, strict=False):
                    sample = held[slot]
                    held[slot] = read
                    if growing:
                        held.append(next(reads))
                    self.k = k = k + 1
                    yield sample
            ends = self._last is not None and self.epoch >= self._last
            if not ends:
                number = self._next_epoch()
                following = self._open(number, 0)  # its first blocks arrive while this epoch drains
            for slot in buffer.drain_order()[k - buffer.drain_from :].tolist():
                sample = held[slot]
                held[slot] = None
                self.k = k = k + 1
                yield sample
            if ends:
                self.finished = True
                return
            self._emitted_before += self.k
            self.epoch, self.k, opened = number, 0, following

    def _next_epoch(self) -> int:
        """The next epoch in which the partition has samples: of fewer samples than partitions, not every partition has one in
        every epoch.
        """
        number = self.epoch + 1
        while number != self._last and self._book.epoch(number)[0].partition_size(self._p) == 0:
            number += 1
        return number

    @property
    def emitted(self) -> int:
        """Samples that have left since this source was made."""
        return self._emitted_before + self.k

    def _tracked_samples(self) -> Generator[Sample, None, None]:
        for read, (sample, shard, row) in self._epochs():
            self._current = shard, row
            if self._keep:
                self._retained[self.epoch, read] = pack_sample(sample)
                self._emitted.append(((self.epoch, self.k), (self.epoch, read)))
            if self._provenance:
                sample[REF_FIELD] = Ref(self._path, shard, row)
            yield sample

    def _retain(self, entry: Any) -> Any:
        if entry is not None:
            read, (sample, _, _) = entry
            self._retained[self.epoch, read] = sample
        return entry

    def forget(self, base: Cursor, needed: Set[tuple[str, int, int]] = frozenset()) -> None:
        """No cursor before `base` will be asked for again: let go of samples emitted up to it, but for those `needed`."""
        named = {(epoch, k) for path, epoch, k in needed if path == self._path}
        self._waiting = {place: read for place, read in self._waiting.items() if place in named or self._let_go(read)}
        while self._emitted and self._emitted[0][0] <= base:
            place, read = self._emitted.popleft()
            if place in named:
                self._waiting[place] = read
            else:
                self._let_go(read)

    def _let_go(self, read: tuple[int, int]) -> bool:
        self._retained.pop(read, None)
        return False

    def kept(self) -> list[Kept]:
        """What a resume at the base of the last `forget`, or later, need not read again, by (epoch, read)."""
        if not self._started:  # nothing was read yet: what we were given is still what a resume needs
            return [Kept(self._path, *place, pack_sample(sample)) for place, sample in sorted(self._contents.items())]
        retained = self._retained.copy()  # at once, whatever the reading thread does
        return [Kept(self._path, *place, self._packed(place, retained[place])) for place in sorted(retained)]

    def _packed(self, place: tuple[int, int], entry: Sample | bytes) -> bytes:
        """`entry` as stored. If it has been emitted a step may be changing it: what was packed before that is right."""
        if isinstance(entry, bytes):
            return entry
        try:
            packed = pack_sample(entry)
        except Exception:  # a step's doing, or a fault of ours
            now = self._retained.get(place)
            if isinstance(now, bytes):
                return now
            raise
        now = self._retained.get(place)
        return now if isinstance(now, bytes) else packed


class _PartitionReads:
    """A partition-epoch opened at emission k: the samples in the buffer, then all further reads.

    Reads found in `contents` are taken from there; the streams begin where it ends.
    """

    def __init__(
        self,
        part: PartitionOrder,
        access: ShardAccess,
        ahead: ReadAhead,
        k: int,
        *,
        tracked: bool,
        contents: Mapping[Place, Sample],
        first: int,
    ) -> None:
        self.buffer = ShuffleBuffer(part)
        self._part = part
        self._tracked = tracked
        self._first = self._resume = self.buffer.reads_before(min(k, self.buffer.drain_from))
        self._reads_held = self.buffer.contents(k)
        self._known = {read: sample for (epoch, read), sample in contents.items() if epoch == part.epoch.epoch}
        while self._resume in self._known:
            self._resume += 1
        wanted = np.array(sorted({r for r in self._reads_held.tolist() if r >= 0} - set(self._known)), dtype=np.int64)
        stripes, offsets = part.locate(wanted)
        self._wanted = [wanted[stripes == i] for i in range(len(part.stripe_sizes))]
        self._streams = [
            ahead.stream(
                access,
                _segments(part, i, offsets[stripes == i].tolist(), done),
                refs=tracked,
                rows=len(self._wanted[i]) + -(-first // len(part.stripe_sizes)),
            )
            for i, done in enumerate(part.progress(self._resume))
        ]

    def close(self) -> None:
        """Nothing more is taken."""
        for stream in self._streams:
            stream.close()

    def fill(self) -> list[Any]:
        """The buffer at the start, by slot (None where one has left)."""
        held = [read for read in self._reads_held.tolist() if read >= 0]
        samples = dict(self._numbered([read for read in held if read in self._known]))
        for stream, wanted in zip(self._streams, self._wanted, strict=True):
            taken = stream.take(len(wanted))
            numbers = wanted.tolist()
            samples.update(zip(numbers, zip(numbers, taken, strict=True) if self._tracked else taken, strict=True))
        return [None if read < 0 else samples[read] for read in self._reads_held.tolist()]

    def runs(self) -> Iterator[list[Any]]:
        """Lists of samples in reading order, a run of a stripe at a time; (read, sample with ref) when tracked."""
        known = [sample for _, sample in self._numbered(list(range(self._first, self._resume)))]
        self._known = {}
        yield known
        read = self._resume
        for stripe, rows in self._part.runs(read):
            taken = self._streams[stripe].take(rows)
            yield list(zip(range(read, read + rows), taken, strict=True)) if self._tracked else taken
            read += rows

    def _numbered(self, reads: list[int]) -> Iterator[tuple[int, Any]]:
        """(read, sample) for `reads` out of the contents, in the form in which the streams deliver."""
        if not self._tracked:
            yield from ((read, self._known[read]) for read in reads)
        elif reads:
            shards, rows = self._part.refs(np.array(reads, dtype=np.int64))
            for read, shard, row in zip(reads, shards.tolist(), rows.tolist(), strict=True):
                yield read, (read, (self._known[read], shard, row))


def _segments(part: PartitionOrder, stripe: int, offsets: list[int], done: int) -> Iterator[Segment]:
    """Rows of a stripe: those the buffer still needs, then everything from `done` on."""
    start = part.stripe_starts[stripe]
    ranges = [(offset, offset + 1) for offset in offsets if offset < done]
    ranges.append((done, part.stripe_sizes[stripe]))
    for first, last in _joined(ranges):
        yield from part.epoch.segments(start + first, start + last)


def _joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Adjoining ranges made one."""
    first, last = ranges[0]
    for start, stop in ranges[1:]:
        if start != last:
            if last > first:
                yield first, last
            first = start
        last = stop
    if last > first:
        yield first, last
