"""Samples that a partition has emitted before, read again: for documents that a step carries from one window to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from streamshard.order.cursor import REF_FIELD, Cursor, Ref
from streamshard.order.partition import EpochOrder, Ints
from streamshard.order.shuffle import ShuffleBuffer
from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.plan import Segment
from streamshard.prefetch.scheduler import ReadAhead, StripeStream
from streamshard.shard.records import Sample, pack_sample, unpack

_NEAR = 4096  # emissions that are replayed at once: documents wait for two windows at most, so they are close together

Place = tuple[int, int]  # (epoch, k): the k-th emission of the epoch has k = 1


class Log(Protocol):
    """What is asked of the partition's source."""

    def epoch_order(self, epoch: int) -> tuple[EpochOrder, ShardAccess]: ...
    def held(self, epoch: int, read: int) -> Sample | None: ...
    def keep_again(self, place: Place, read: int, sample: Sample) -> None: ...


class Again:
    """The first stage over `places`, ascending. Iterate it once.

    `open` asks the store for them; without it, the first sample does. Samples that the log still holds are not read.
    """

    def __init__(
        self, log: Log, ahead: ReadAhead, p: int, path: str, places: Sequence[Place], *, provenance: bool
    ) -> None:
        self._log = log
        self._ahead = ahead
        self._p = p
        self._path = path
        self._places = places
        self._provenance = provenance
        self._batches: list[_Batch] | None = None
        self._current: Place = (-1, -1)
        self._ref = Ref(path, -1, -1)

    def open(self) -> None:
        """Request what has to be read."""
        by_epoch = [(epoch, [k for _, k in of]) for epoch, of in groupby(self._places, key=itemgetter(0))]
        self._batches = [_Batch(self._log, self._ahead, self._p, epoch, ks) for epoch, ks in by_epoch]

    def __iter__(self) -> Iterator[Sample]:
        if self._batches is None:
            self.open()
        batches, self._batches = self._batches or [], []
        while batches:
            batch = batches.pop(0)
            for k, read, sample, shard, row in batch.take():
                self._current, self._ref = (batch.epoch, k), Ref(self._path, shard, row)
                self._log.keep_again(self._current, read, sample)
                if self._provenance:
                    sample[REF_FIELD] = self._ref
                yield sample

    def cursor(self) -> Cursor:
        return self._current

    def identity(self) -> tuple[Any, ...]:
        return self._path, *self._current

    def ref(self) -> Ref:
        return self._ref

    def counters(self) -> Iterator[tuple[str, int]]:
        return iter(())

    def again(self, identities: Sequence[tuple[Any, ...]]) -> Again:  # noqa: ARG002  (the protocol's)
        raise LookupError("what is read again cannot be read again from")

    def ref_of(self, identity: tuple[Any, ...]) -> Ref:  # noqa: ARG002  (the protocol's)
        return self._ref


class _Batch:
    """Emissions `ks` of one epoch."""

    def __init__(self, log: Log, ahead: ReadAhead, p: int, epoch: int, ks: list[int]) -> None:
        self.epoch = epoch
        self._ks = ks
        order, access = log.epoch_order(epoch)
        part = order.partition(p)
        self._reads = emitted_reads(ShuffleBuffer(part), ks)
        shards, rows = part.refs(self._reads)
        self._refs = list(zip(shards.tolist(), rows.tolist(), strict=True))
        # Copies: what a contents snapshot holds is read once more by others, and a step may change what it is given.
        found = (log.held(epoch, read) for read in self._reads.tolist())
        self._held = [None if sample is None else unpack(pack_sample(sample)) for sample in found]
        self._wanted = sorted(ref for ref, held in zip(self._refs, self._held, strict=True) if held is None)
        self._stream: StripeStream | None = None
        if self._wanted:
            self._stream = ahead.stream(access, _segments(self._wanted), refs=True, rows=len(self._wanted))

    def take(self) -> Iterator[tuple[int, int, Sample, int, int]]:
        """(k, read, sample, shard, row) of each."""
        taken = self._stream.take(len(self._wanted)) if self._stream is not None else []
        samples = {(shard, row): sample for sample, shard, row in taken}
        for k, read, ref, held in zip(self._ks, self._reads.tolist(), self._refs, self._held, strict=True):
            yield k, read, samples[ref] if held is None else held, *ref


def emitted_reads(buffer: ShuffleBuffer, ks: Sequence[int]) -> Ints:
    """The reads that emissions `ks` (ascending, the first emission is 1) handed out; neighbours are found together."""
    found: list[int] = []
    start = 0
    while start < len(ks):
        stop = start
        while stop < len(ks) and ks[stop] - ks[start] < _NEAR:
            stop += 1
        first = ks[start] - 1
        reads = buffer.emissions(first, ks[stop - 1])
        found += reads[np.array(ks[start:stop]) - 1 - first].tolist()
        start = stop
    return np.array(found, dtype=np.int64)


def _segments(refs: list[tuple[int, int]]) -> Iterator[Segment]:
    for shard, of in groupby(refs, key=itemgetter(0)):
        for _, row in of:
            yield shard, row, row + 1
