"""What a state means: where it stands, what was consumed up to there, what the shuffle buffers hold. For people and for tools.

A state alone tells epochs, items and the spread of partitions. With its dataset (the manifest, and for tokens the indexes of
shards that were begun) it also tells samples, tokens and refs. No sample is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from streamshard.errors import StateError
from streamshard.iteration import Book
from streamshard.lengths import emitted_length
from streamshard.order.cursor import Ref, innermost
from streamshard.order.rotation import raggedness
from streamshard.order.shuffle import ShuffleBuffer
from streamshard.state import PartitionState, Snapshot, State, decode_state
from streamshard.steps.counts import Counts
from streamshard.steps.mixture import branches_in, epochs_in
from streamshard.steps.saved import held_in
from streamshard.storage.store import Store
from streamshard.whereabouts import book_of


@dataclass(frozen=True)
class Spread:
    """Of the partitions that a state holds: the least and the largest number of items, how many are done, and by how many
    items in all some are ahead of where the order has them (0 unless ranks were saved at different steps; full states only).
    """

    held: int
    least: int
    most: int
    done: int
    ahead: int


@dataclass(frozen=True)
class Consumed:
    """Of one source: samples that have left its shuffle buffers, and their lengths if the writer was given a length field."""

    samples: int
    tokens: int | None


class Inspected:
    """A state, with `store` together with its dataset. Raises `StateError` for what is no state."""

    def __init__(self, state: State, store: Store | None = None) -> None:
        self.snapshot: Snapshot = decode_state(state)
        self._store = store

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that shapes the order."""
        return self.snapshot.fingerprint

    @property
    def epochs(self) -> tuple[int, int]:
        """The least and the highest epoch in which a partition is."""
        found = [epoch for part in self._parts.values() for epoch in epochs_in(innermost(part.cursor))]
        return min(found, default=self.snapshot.epoch), max(found, default=self.snapshot.epoch)

    @property
    def mixes(self) -> bool:
        """Whether it is a mixture's."""
        return "mixture" in self.fingerprint

    @property
    def items(self) -> int:
        """Items that have left the pipeline, of the partitions held: in the epoch, with ``repeat=True`` ever."""
        return sum(part.turn for part in self._parts.values())

    def spread(self) -> Spread:
        """How far apart the partitions are."""
        turns = {p: part.turn for p, part in self._parts.items()}
        done = {p for p, part in self._parts.items() if part.done}
        ahead = (
            raggedness(turns, done, self.fingerprint["partitions"]) if self.snapshot.scope == "full" and turns else 0
        )
        return Spread(len(turns), min(turns.values(), default=0), max(turns.values(), default=0), len(done), ahead)

    def consumed(self) -> dict[str, Consumed]:
        """By source (a plain dataset is called ""), of the partitions held. In this epoch, with ``repeat=True`` since the
        run began. Reads the indexes of shards in which a partition begins, ends, or is; of a mixture it tells what was mixed,
        and reads nothing.
        """
        if self.mixes:
            drawn: dict[str, Consumed] = {}
            for part in self._parts.values():
                for path, state in branches_in(innermost(part.cursor)):
                    was = drawn.get(path, Consumed(0, 0))
                    drawn[path] = Consumed(was.samples + state.samples, (was.tokens or 0) + state.tokens)
            return drawn
        samples, tokens = 0, 0
        counted = True
        at = {p: innermost(part.cursor) for p, part in self._parts.items()}
        low, high = self.epochs
        for number in range(self.snapshot.epoch if self.fingerprint.get("repeat") else low, high + 1):
            order, access = self._book.epoch(number)
            counted = counted and access.manifest.length_field is not None
            for p, (epoch, k) in at.items():
                if number <= epoch:
                    partition = order.partition(p)
                    emitted = k if number == epoch else partition.size
                    samples += emitted
                    tokens += emitted_length(partition, emitted, access) if counted else 0
        return {"": Consumed(samples, tokens if counted else None)}

    def counts(self) -> Counts | None:
        """Rows, documents and tokens that had left the partitions held, by source, if a step counts them."""
        steps = self.fingerprint.get("steps", [])
        held = [held_in(steps, part.cursor) for part in self._parts.values()]
        return sum((found.counts for found in held if found is not None), Counts()) if any(held) else None

    def buffered(self) -> Iterator[tuple[int, list[Ref]]]:
        """(partition, refs of the samples in its shuffle buffer, slot by slot), of partitions that are not done."""
        if self.mixes:
            raise StateError("the shuffle buffers of a Mixture are not shown: it has several for each partition")
        for p, part in self._parts.items():
            if part.done:
                continue
            epoch, k = innermost(part.cursor)
            partition = self._book.epoch(epoch)[0].partition(p)
            reads = ShuffleBuffer(partition).contents(k)
            shards, rows = partition.refs(reads[reads >= 0])
            yield p, [Ref("", shard, row) for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]

    @property
    def _parts(self) -> Mapping[int, PartitionState]:
        return self.snapshot.partitions

    @cached_property
    def _book(self) -> Book:
        if self._store is None:
            raise StateError("samples, tokens and refs are known with the dataset only: pass its URL")
        return book_of(self.fingerprint, self._store)


def first_difference(one: State, other: State) -> str | None:
    """The first thing that differs between two states and matters for what comes next, in words; None if nothing does.

    First what shapes the order, then whose state it is, then where partitions stand, then what only tools look at.
    """
    a, b = decode_state(one), decode_state(other)
    return next((f"{name}: {x!r} and {y!r}" for name, x, y in _compared(a, b) if x != y), None)


def _compared(a: Snapshot, b: Snapshot) -> Iterator[tuple[str, Any, Any]]:
    """(name, its value in the one, in the other) in the order of what matters most."""
    for name in sorted(a.fingerprint.keys() | b.fingerprint.keys()):
        yield name, a.fingerprint.get(name), b.fingerprint.get(name)
    yield "scope", a.scope, b.scope
    yield "epoch", a.epoch, b.epoch
    yield "partitions held", sorted(a.partitions), sorted(b.partitions)
    for p, part in sorted(a.partitions.items()):
        for field in ("turn", "done", "cursor"):
            yield f"{field} of partition {p}", getattr(part, field), getattr(b.partitions[p], field)
    for field in ("batches", "ended", "workers"):
        yield field, getattr(a, field), getattr(b, field)
    yield "contents of partitions", sorted(a.contents), sorted(b.contents)
