"""The order of one epoch: shards laid end to end, cut into partitions, cut into stripes, read in rotation.

Everything here is a closed form of the manifest's sample counts, so any position can be asked for directly and a
resume costs no replay:

    shards, permuted        |--s7--|---s2---|-s0-|----s5----| ...          positions 0 ... N-1
    partitions              |------ p=0 ------|------ p=1 ------| ...      consecutive, sizes differ by at most 1
    stripes of a partition  |-- 0 --|-- 1 --|                              `interleave` of them
    reads                   16 rows of stripe 0, 16 of stripe 1, 16 of stripe 0, ...

A *read* is the partition-local number of a sample in reading order; the shuffle buffer (shuffle.py) turns reads into
emissions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from streamshard.order.random import permutation, stream_key

ALGORITHM = 1  # raise it with any change that moves a sample: it is part of every state's fingerprint

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """Everything that shapes the order apart from the sample counts.

    `interleave` stripes are read `run` rows at a time; the shuffle buffer has `buffer` slots and starts with
    ``min(buffer, initial)`` of them filled, so that the first sample does not wait for a full buffer.
    """

    partitions: int
    seed: int = 0
    shuffle: bool = True
    interleave: int = 2
    run: int = 16
    buffer: int = 512
    initial: int = 32
    repeat: bool = False
    path: str = ""


class EpochOrder:
    """The shard sequence of one epoch and its partitions. Immutable; safe to share between threads.

    `samples` holds the sample count of every shard (shape ``(shards,)``); `offset` is the number of slots that earlier
    epochs took (0 in finite epochs, where every epoch starts its rotation anew).
    """

    def __init__(self, spec: OrderSpec, samples: Ints, epoch: int, offset: int = 0) -> None:
        self.spec = spec
        self.epoch = epoch
        self.samples = samples
        self.total = int(samples.sum())
        self._offset = offset if spec.repeat else 0

    @cached_property
    def shard_sequence(self) -> Ints:
        """Shard numbers in the order in which this epoch lays them end to end."""
        if not self.spec.shuffle:
            return np.arange(len(self.samples))
        return permutation(stream_key(self.spec.seed, self.epoch, "shards", self.spec.path), len(self.samples))

    @cached_property
    def _ends(self) -> Ints:
        return np.cumsum(self.samples[self.shard_sequence])

    def partition_size(self, p: int) -> int:
        """How many positions partition `p` owns: the slots g = p (mod P) in [offset, offset + N)."""
        parts = self.spec.partitions
        return -((p - self._offset - self.total) // parts) + ((p - self._offset) // parts)

    def partition_start(self, p: int) -> int:
        """The first position of partition `p`."""
        parts = self.spec.partitions
        base, extra = divmod(self.total, parts)
        # The partitions with one more than `base` are those that follow the offset, cyclically, for `extra` places.
        first = self._offset % parts
        wrapped = max(0, first + extra - parts)
        larger = min(p, wrapped) + max(0, min(p, first + extra) - first)
        return p * base + larger

    def partition(self, p: int) -> PartitionOrder:
        """The reading order of partition `p`."""
        return PartitionOrder(self, p, self.partition_start(p), self.partition_size(p))

    def turns_before(self, p: int) -> int:
        """Slots of partition `p` in earlier epochs."""
        return max(0, -((p - self._offset) // self.spec.partitions))

    def partition_of(self, position: int) -> int:
        """Which partition owns a position. Of several that begin there the last, the others being empty."""
        return bisect_right(range(self.spec.partitions), position, key=self.partition_start) - 1

    def position(self, shard: int, row: int) -> int:
        """The inverse of `refs` for one sample."""
        place = int(np.flatnonzero(self.shard_sequence == shard)[0])
        return int(self._ends[place]) - int(self.samples[shard]) + row

    def refs(self, positions: Ints) -> tuple[Ints, Ints]:
        """(shard numbers, rows) of global `positions`; same shape as the input."""
        place = np.searchsorted(self._ends, positions, side="right")
        shards = self.shard_sequence[place]
        return shards, positions - (self._ends[place] - self.samples[shards])

    def segments(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Positions [start, stop) as (shard, first row, end row) pieces, in order."""
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            shard = int(self.shard_sequence[place])
            end = int(self._ends[place])
            begin = end - int(self.samples[shard])
            upto = min(stop, end)
            if upto > start:
                yield shard, start - begin, upto - begin
            start, place = upto, place + 1


class PartitionOrder:
    """Reads of one partition in one epoch: read number -> stripe -> position -> (shard, row)."""

    def __init__(self, epoch: EpochOrder, p: int, start: int, size: int) -> None:
        self.epoch = epoch
        self.p = p
        self.start = start
        self.size = size
        stripes = epoch.spec.interleave
        base, extra = divmod(size, stripes)
        self.stripe_sizes = [base + (i < extra) for i in range(stripes)]
        self.stripe_starts = [start + i * base + min(i, extra) for i in range(stripes)]
        self._cycle = stripes * epoch.spec.run
        self._cycles = self.stripe_sizes[-1] // epoch.spec.run  # the last stripe is the shortest

    def locate(self, reads: Ints) -> tuple[Ints, Ints]:
        """(stripe, offset in the stripe) of each read number."""
        run = self.epoch.spec.run
        cycle, within = np.divmod(reads, self._cycle)
        stripe, step = np.divmod(within, run)
        offset = cycle * run + step
        tail = reads >= self._cycles * self._cycle
        if tail.any():
            rest = np.array(self.stripe_sizes) - self._cycles * run
            ends = np.cumsum(rest)
            late = reads[tail] - self._cycles * self._cycle
            stripe[tail] = np.searchsorted(ends, late, side="right")
            offset[tail] = self._cycles * run + late - (ends - rest)[stripe[tail]]
        return stripe, offset

    def positions(self, reads: Ints) -> Ints:
        """Global positions of read numbers."""
        stripe, offset = self.locate(reads)
        return np.array(self.stripe_starts, dtype=np.int64)[stripe] + offset

    def refs(self, reads: Ints) -> tuple[Ints, Ints]:
        """(shard numbers, rows) of read numbers."""
        return self.epoch.refs(self.positions(reads))

    def read(self, position: int) -> int:
        """The inverse of `positions` for one read."""
        stripe = max(i for i, start in enumerate(self.stripe_starts) if start <= position and self.stripe_sizes[i])
        offset, run = position - self.stripe_starts[stripe], self.epoch.spec.run
        whole = self._cycles * run
        if offset < whole:
            cycle, step = divmod(offset, run)
            return cycle * self._cycle + stripe * run + step
        return self._cycles * self._cycle + sum(size - whole for size in self.stripe_sizes[:stripe]) + offset - whole

    def progress(self, read: int) -> list[int]:
        """How many rows of each stripe come before `read`."""
        run = self.epoch.spec.run
        cycle, within = divmod(read, self._cycle)
        if cycle < self._cycles:
            return [cycle * run + min(run, max(0, within - i * run)) for i in range(len(self.stripe_sizes))]
        late = read - self._cycles * self._cycle
        done = []
        for size in self.stripe_sizes:
            taken = min(late, size - self._cycles * run)
            done.append(self._cycles * run + taken)
            late -= taken
        return done

    def runs(self, read: int) -> Iterator[tuple[int, int]]:
        """(stripe, rows) pieces of at most `run` rows that cover the reads from `read` to the end, in order."""
        run = self.epoch.spec.run
        done = self.progress(read)
        for cycle in range(min(done) // run, self._cycles):
            for stripe, had in enumerate(done):
                rows = (cycle + 1) * run - max(had, cycle * run)
                if rows > 0:
                    yield stripe, rows
        for stripe, had in enumerate(done):
            left = self.stripe_sizes[stripe] - max(had, self._cycles * run)
            while left > 0:
                yield stripe, min(run, left)
                left -= run
