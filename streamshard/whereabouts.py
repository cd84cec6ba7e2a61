"""Which samples are in a step, and in which step a sample is, without reading any.

The order is a function of the manifest and the settings, so both directions are arithmetic where items are, one to one, samples
or `Batch`es of them. After `Filter`, `FlatMap` and batched `Map`s the items depend on the data.

    step t of rank r of R, n items a step  <->  slots [t R n, (t + 1) R n) whose partition is r modulo R
    slot                                   <->  partition p, turn
    turn                                   <->  samples of the partition's log, epoch after epoch with repeat=True
    sample of the log                      <->  (epoch, emission) <-> read <-> position <-> (shard, row)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from streamshard.catalog import load_manifest
from streamshard.errors import StateError, UsageError
from streamshard.iteration import Book
from streamshard.lengths import emitted_length
from streamshard.order.cursor import Ref
from streamshard.order.partition import EpochOrder, OrderSpec
from streamshard.order.shuffle import ShuffleBuffer
from streamshard.prefetch.access import ShardAccess
from streamshard.storage.store import Store

_ONE_TO_ONE = {"Map", "Batch"}


class Place(NamedTuple):
    """Where a sample comes: in `epoch`, in step `step` (from 0) of data-parallel rank `rank`, out of `partition`."""

    epoch: int
    step: int
    rank: int
    partition: int


class Whereabouts:
    """The steps of a run: `ranks` data-parallel ranks that take `items` items each a step, from the run's beginning (with
    finite epochs: that of `epoch`). `book` has the order, `fingerprint` the run's settings.

    Raises `UsageError` where items depend on data, and for ranks that do not divide the partitions.
    """

    def __init__(self, book: Book, fingerprint: dict[str, Any], *, ranks: int, items: int, epoch: int = 0) -> None:
        for step in fingerprint["steps"]:
            if step["step"] not in _ONE_TO_ONE or step.get("batch") is not None:
                raise UsageError(
                    f"what is in a step depends on the data: the pipeline has a {step['step']}, whose items are known only "
                    f"after reading. Iterate with provenance=True and look at each sample's '__ref__' or each "
                    f"row's '__segments__'"
                )
        _check_least(1, ranks=ranks, items=items)
        if fingerprint["partitions"] is None:
            raise UsageError(
                "the number of partitions is not settled: pass partitions=, or a state from after the first step"
            )
        self.parts: int = fingerprint["partitions"]
        if self.parts % ranks:
            raise UsageError(f"ranks={ranks} do not divide the {self.parts} partitions")
        sizes = fingerprint["batch"]
        if len(sizes) > 1:
            raise UsageError(f"a Batch of batches is not counted: the pipeline has Batch sizes {sizes}")
        self._samples = sizes[0] if sizes else 1  # of an item
        self._drop_last = any(step.get("drop_last") for step in fingerprint["steps"])
        self._book = book
        self._repeat: bool = fingerprint["repeat"]
        self.fingerprint = fingerprint
        self.ranks, self._items, self._first = ranks, items, epoch

    def step(self, number: int, rank: int | None = None) -> Iterator[tuple[int, Ref]]:
        """(rank, ref) of the samples of a step, by slots, of one rank or of all. Nothing beyond the end of an epoch."""
        _check_least(0, step=number)
        width = self.ranks * self._items
        for slot in range(number * width, (number + 1) * width):
            turn, p = divmod(slot, self.parts)
            if rank is None or p % self.ranks == rank:
                yield from ((p % self.ranks, ref) for ref in self._item(p, turn))

    def _item(self, p: int, turn: int) -> Iterator[Ref]:
        """The samples of the item that partition `p` emits at `turn`."""
        start, stop = turn * self._samples, (turn + 1) * self._samples
        if not self._repeat and self._drop_last and stop > self._order(self._first)[0].partition_size(p):
            return
        number = self._epoch_of(p, start)
        while start < stop:
            order, _ = self._order(number)
            part = order.partition(p)
            k = start - self._before(p, number)
            count = min(stop - start, part.size - k)
            if count > 0:
                shards, rows = part.refs(ShuffleBuffer(part).emissions(k, k + count))
                yield from (Ref("", shard, row) for shard, row in zip(shards.tolist(), rows.tolist(), strict=True))
                start += count
            if not self._repeat:
                return
            number += 1

    def _epoch_of(self, p: int, sample: int) -> int:
        """The epoch of a sample of a partition's log."""
        number = self._first
        while self._repeat and sample >= self._end(p, number):
            number += 1
        return number

    def _end(self, p: int, number: int) -> int:
        return self._before(p, number) + self._order(number)[0].partition_size(p)

    def _before(self, p: int, number: int) -> int:
        """Samples of a partition's log before an epoch: the log begins with the run's first."""
        return self._order(number)[0].turns_before(p) - self._order(self._first)[0].turns_before(p)

    def agrees(self, p: int, turn: int, cursor: tuple[int, int]) -> bool:
        """Whether `turn` items of partition `p` end at a cursor."""
        reached = self._before(p, cursor[0]) + cursor[1]
        short = not self._repeat and cursor[1] == self._order(cursor[0])[0].partition_size(p)
        return reached == turn * self._samples or (short and reached < turn * self._samples)

    def find(self, shard: int, row: int, epoch: int) -> Place | None:
        """Where a sample comes in `epoch`; None if it is in a short batch that is dropped."""
        if epoch < self._first:
            raise UsageError(f"epoch {epoch} comes before the first of the run, {self._first}")
        order, access = self._order(epoch)
        counts = access.manifest.sample_counts
        if not 0 <= shard < len(counts) or not 0 <= row < int(counts[shard]):
            held = (
                f"rows 0 to {int(counts[shard]) - 1}" if 0 <= shard < len(counts) else f"shards 0 to {len(counts) - 1}"
            )
            raise UsageError(f"there is no sample {shard}:{row} in epoch {epoch}: the dataset has {held}")
        p = order.partition_of(position := order.position(shard, row))
        part = order.partition(p)
        sample = self._before(p, epoch) + ShuffleBuffer(part).emission(part.read(position))
        turn = sample // self._samples
        if not self._repeat and self._drop_last and (turn + 1) * self._samples > part.size:
            return None
        return Place(epoch, (turn * self.parts + p) // (self.ranks * self._items), p % self.ranks, p)

    def slots(self, steps: int) -> int:
        """How many slots so many steps take, over all ranks."""
        return steps * self.ranks * self._items

    def tokens_before(self, slot: int) -> int:
        """Lengths of all samples that come before a slot, in the epoch or with ``repeat=True`` since the run began."""
        total, number = 0, self._first
        left = [turn * self._samples for turn in self.turns(slot)]
        while any(left):
            order, access = self._order(number)
            for p in range(self.parts):
                emitted = min(left[p], order.partition_size(p))
                left[p] -= emitted
                total += emitted_length(order.partition(p), emitted, access) if emitted else 0
            if not self._repeat:
                break
            number += 1
        return total

    def step_at(self, tokens: int) -> int:
        """The first step before which at least so many tokens were consumed. Reads indexes, a few times as many as one step
        touches. Raises `UsageError` for more than an epoch has, without ``repeat=True``.
        """
        high = 1
        while self.tokens_before(self.slots(high)) < tokens:
            if not self._repeat and self.slots(high) > self._order(self._first)[0].total:
                raise UsageError(f"epoch {self._first} has fewer than {tokens} tokens; with repeat=True a run goes on")
            high *= 2
        low = 0
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.tokens_before(self.slots(middle)) >= tokens else (middle + 1, high)
        return low

    def turns(self, slot: int) -> list[int]:
        """How many items of each partition come before a slot."""
        return [max(0, -((p - slot) // self.parts)) for p in range(self.parts)]

    def cursors(self, slot: int) -> list[tuple[int, int]]:
        """(epoch, emitted) of each partition when all before a slot is consumed. Raises `UsageError` beyond an epoch's end."""
        found = []
        for p, turn in enumerate(self.turns(slot)):
            number = self._epoch_of(p, turn * self._samples)
            order, _ = self._order(number)
            emitted = turn * self._samples - self._before(p, number)
            if emitted >= order.partition_size(p) + self._samples:
                raise UsageError(
                    f"epoch {number} ends before slot {slot}; go to another with set_epoch, or use repeat=True"
                )
            found.append((number, min(emitted, order.partition_size(p))))
        return found

    def _order(self, number: int) -> tuple[EpochOrder, ShardAccess]:
        return self._book.epoch(number)


def _check_least(least: int, **numbers: int) -> None:
    for name, value in numbers.items():
        if value < least:
            raise UsageError(f"{name}={value} must be at least {least}")


def book_of(fingerprint: dict[str, Any], store: Store) -> Book:
    """The order and the dataset versions that a fingerprint names. Reads their manifests."""
    found = fingerprint
    if "shuffle_buffer" not in found:
        raise StateError(
            "this is the state of a MapDataset's sampler, which has no shuffle buffers; leave the dataset out"
        )
    if "mixture" in found:
        raise StateError(
            "this is the state of a Mixture: which sample comes when depends on the data, and needs reading"
        )
    history = found.get("history") or [[0, found["dataset"]]]
    timeline = [(int(first), ShardAccess(store, load_manifest(store, version))) for first, version in history]
    spec = OrderSpec(
        partitions=found["partitions"], seed=found["seed"], shuffle=found["shuffle"], interleave=found["interleave"],
        run=found["run"], buffer=found["shuffle_buffer"], initial=found["initial"], repeat=found["repeat"],
    )  # fmt: skip
    return Book(spec, timeline)
