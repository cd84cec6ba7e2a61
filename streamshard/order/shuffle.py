"""The local shuffle buffer as arithmetic: which slot each emission takes, and what the buffer holds at any moment.

With n reads in the partition, a buffer of B slots and k samples emitted, the buffer holds

    b(k) = min(B, b0 + k, n - k)      samples, and has read      r(k) = k + b(k).

It starts with b0 = min(B, initial), grows by one an emission up to B, and drains at the end. Until draining starts, at
k_d, emission k takes slot s_k, uniform on [0, b(k)), and refills it with read r(k); while growing, slot b(k) is added
with read r(k) + 1. From k_d on nothing is refilled and the remaining slots leave in the order of a keyed permutation.

Draws are functions of (seed, epoch, partition, k) alone. So the data path is a plain list with swaps at known slots, and
*which* reads the buffer holds at k is recomputed (`contents`) instead of being stored in a checkpoint.
"""

from __future__ import annotations

import numpy as np

from streamshard.order.partition import Ints, PartitionOrder
from streamshard.order.random import bounded, permutation, raw_words, stream_key


class ShuffleBuffer:
    """The buffer's timetable for one partition-epoch. Immutable and free of data."""

    def __init__(self, part: PartitionOrder) -> None:
        spec = part.epoch.spec
        self.reads = part.size
        self.slots = spec.buffer
        self.initial = min(spec.buffer, spec.initial)
        self.drain_from = max(0, self.reads - self.slots, -((self.initial - self.reads) // 2))
        self._draw_key = stream_key(spec.seed, part.epoch.epoch, "slot", spec.path, part.p)
        self._drain_key = stream_key(spec.seed, part.epoch.epoch, "drain", spec.path, part.p)

    def size(self, k: int) -> int:
        """b(k): samples held after `k` emissions."""
        return min(self.slots, self.initial + k, self.reads - k)

    def reads_before(self, k: int) -> int:
        """r(k): reads made after `k` emissions."""
        return k + self.size(k)

    def chunk_end(self, k: int, chunk: int) -> int:
        """Where to stop drawing slots ahead from emission `k` on: after `chunk` draws at most, where draining starts, and
        where the buffer stops growing, so that within a chunk it grows with every emission or with none.
        """
        stop = min(k + chunk, self.drain_from)
        for border in (self.slots - self.initial, (self.reads - self.initial) // 2):
            if k < border < stop:
                stop = border
        return stop

    def draws(self, start: int, stop: int) -> Ints:
        """Slots s_k for k in [start, stop), all below `drain_from`."""
        sizes = np.minimum(self.slots, self.initial + np.arange(start, stop))
        return bounded(raw_words(self._draw_key, start, stop - start), sizes)

    def drain_order(self) -> Ints:
        """Slots in the order in which they leave from `drain_from` on."""
        return permutation(self._drain_key, self.size(self.drain_from))

    def contents(self, k: int) -> Ints:
        """The read held by each slot after `k` emissions, shape ``(b(min(k, drain_from)),)``; -1 where one has left.

        A slot holds its last refill. Windows of draws are replayed backwards until every slot has been seen, about
        B * H_B draws; a slot never drawn still has what it was created with.
        """
        moment = min(k, self.drain_from)
        held = np.full(self.size(moment), -1, dtype=np.int64)
        stop, window = moment, max(256, 2 * self.slots)
        while stop > 0 and (held < 0).any():
            start = max(0, stop - window)
            last = np.full(len(held), -1, dtype=np.int64)
            last[self.draws(start, stop)] = np.arange(start, stop)  # repeated indices: the last assignment stays
            fresh = (held < 0) & (last >= 0)
            emission = last[fresh]
            held[fresh] = emission + np.minimum(self.slots, self.initial + emission)
            stop, window = start, 2 * window
        created = np.arange(len(held))
        created = np.where(created < self.initial, created, 2 * (created - self.initial) + self.initial + 1)
        held = np.where(held < 0, created, held)
        held[self.drain_order()[: k - moment]] = -1
        return held

    def emission(self, read: int) -> int:
        """Which emission hands out `read`: the inverse of `emissions`.

        A read has a slot from the emission that brings it on, until that slot is drawn again: windows of draws are searched for
        it, about B of them.
        """
        slot, k = read, 0
        if read >= self.size(0):
            growing = 2 * (self.slots - self.initial)  # reads that come in pairs, the second of each into a new slot
            if read < self.initial + growing:
                brought, added = divmod(read - self.initial, 2)
            else:
                brought, added = read - self.slots, 0
            slot = self.size(brought) if added else int(self.draws(brought, brought + 1)[0])
            k = brought + 1
        window = max(256, 2 * self.slots)
        while k < self.drain_from:
            stop = min(k + window, self.drain_from)
            found = np.flatnonzero(self.draws(k, stop) == slot)
            if len(found):
                return k + int(found[0])
            k, window = stop, 2 * window
        return self.drain_from + int(np.flatnonzero(self.drain_order() == slot)[0])

    def emissions(self, start: int, stop: int) -> Ints:
        """The reads that emissions [start, stop) hand out."""
        held = self.contents(start).tolist()
        out = []
        for k, slot in enumerate(self.draws(start, max(start, min(stop, self.drain_from))).tolist(), start):
            out.append(held[slot])
            held[slot] = self.reads_before(k)
            if self.size(k + 1) > self.size(k):
                held.append(self.reads_before(k) + 1)
        drained = max(start, self.drain_from) - self.drain_from, max(stop, self.drain_from) - self.drain_from
        out.extend(held[slot] for slot in self.drain_order()[slice(*drained)].tolist())
        return np.array(out, dtype=np.int64)
