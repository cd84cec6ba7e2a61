"""`BucketBatch`: documents of similar length together, so that little of a batch is padding and no row is packed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from streamshard.errors import UsageError
from streamshard.order.cursor import Cursor, Ref
from streamshard.steps.carried import Carried, decode
from streamshard.steps.counts import Counts, Tally, thaw
from streamshard.steps.padded import Padded
from streamshard.steps.rounds import Piece, Plan, RoundStage, first_cursor
from streamshard.steps.step import Stage, StepContext, function_name


@dataclass(frozen=True)
class BucketBatch:
    """Batches of documents whose lengths are in the same bucket, at most `max_tokens` each with their padding.

    boundaries: the largest length of each bucket, ascending; longer documents are in one more bucket.
    max_tokens: of a batch: rows x the longest of them (with `fixed_shapes`, x the bucket's boundary).
    fixed_shapes: pad to the bucket's boundary, so that a compiled model sees few shapes.
    window: documents that are sorted into buckets together. Batches that are not full wait for the next window; a document
        leaves in its window or one of the two after it.
    fields, pad_id: as for `Pack`. Rows are by the batch contract, one document each.
    overflow: a document longer than `max_tokens` is refused (``"error"``), cut short (``"truncate"``), left out (``"drop"``),
        or has a batch of its own (``"alone"``).
    length, collate_fn: for items that are no documents: the field with their length, and a function of a list of them.

    What leaves is counted by source: `StreamLoader.counts`. Only `Map`, `Filter` and `FlatMap` may come before it.
    """

    boundaries: Sequence[int]
    max_tokens: int
    fixed_shapes: bool = False
    window: int = 1000
    fields: Mapping[str, str] | None = None
    overflow: str = "error"
    pad_id: int = 0
    length: str | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    version: str | int | None = None
    _padded: Padded = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bounds = self.boundaries
        if not isinstance(bounds, Sequence) or not bounds or any(type(b) is not int or b < 1 for b in bounds):
            raise UsageError(f"BucketBatch(boundaries={bounds!r}): pass a list of ints >= 1")
        if any(after <= before for before, after in pairwise(bounds)):
            raise UsageError(f"BucketBatch(boundaries={[*bounds]}): they must rise")
        if type(self.window) is not int or self.window < 1:
            raise UsageError(f"BucketBatch(window={self.window!r}): it must be an int >= 1")
        padded = Padded(
            "BucketBatch", self.max_tokens, fields=self.fields, length=self.length, overflow=self.overflow,
            pad_id=self.pad_id, collate_fn=self.collate_fn,
        )  # fmt: skip
        if bounds[-1] > self.max_tokens:
            raise UsageError(
                f"BucketBatch(boundaries={[*bounds]}, max_tokens={self.max_tokens}): a bucket's longest document must fit into "
                f"a batch; leave out boundaries above max_tokens"
            )
        object.__setattr__(self, "_padded", padded)

    @property
    def label(self) -> str:
        return f"BucketBatch({self.max_tokens})"

    def fingerprint(self) -> dict[str, Any]:
        return {
            "step": "BucketBatch", "boundaries": [*self.boundaries], "max_tokens": self.max_tokens,
            "fixed_shapes": self.fixed_shapes, "window": self.window, "fields": dict(self.fields or {}),
            "overflow": self.overflow, "pad_id": self.pad_id, "length": self.length, "version": self.version,
            "collate_fn": None if self.collate_fn is None else function_name(self.collate_fn),
        }  # fmt: skip

    def start(self, inner: Cursor) -> Cursor:
        return first_cursor(inner)

    def border(self, cursor: Cursor) -> bool:
        """Whether all batches of a window have left."""
        return bool(cursor[1] == 0)

    def inner(self, cursor: Cursor) -> Cursor:
        upstream: Cursor = cursor[0][0]
        return upstream

    def left(self, upstream: int, cursor: Cursor) -> None:
        """Only reading tells."""

    def carried(self, cursor: Cursor) -> tuple[Carried, ...]:
        """Documents that wait at `cursor` for a later window."""
        return decode(cursor[0][1])

    def counts(self, cursor: Cursor) -> Counts:
        """What had left at `cursor`."""
        return thaw(cursor[-1])

    def reached(self, cursor: Cursor) -> int:
        """The epoch up to which documents of the window at `cursor` are."""
        return int(cursor[3])

    def open(self, upstream: Stage, cursor: Cursor, context: StepContext) -> Stage:
        return RoundStage(Bucketer(self, self._padded, provenance=context.provenance), upstream, cursor, context)


class Bucketer:
    """How `BucketBatch` plans and makes batches: see `streamshard.steps.rounds.Planner`."""

    def __init__(self, step: BucketBatch, padded: Padded, *, provenance: bool) -> None:
        self.label = step.label
        self.window = step.window
        self._boundaries = step.boundaries
        self._fixed = step.fixed_shapes
        self._padded = padded
        self._provenance = provenance

    def content(self, item: Any, ref: Ref | None) -> tuple[Any, int]:
        return self._padded.content(item, ref)

    def cut(self, piece: Piece, tally: Tally) -> list[Piece]:
        fitted = self._padded.fitted(piece, tally)
        return [] if fitted is None else [fitted]

    def again(self, content: Any, length: int, start: int) -> tuple[Any, int]:  # noqa: ARG002  (the protocol's)
        return content, length

    def plan(self, pieces: Sequence[Piece], *, last: bool, before: int) -> Plan:  # noqa: ARG002  (the protocol's)
        """Each bucket's documents in order, those that waited first, in batches; the unfinished one waits, but not for ever."""
        batches, left = [], []
        for bucket in self._by_bucket(pieces):
            found = self._batches(bucket)
            if not last and all(piece.age < 2 for piece in found[-1]) and self._has_room(found[-1]):
                left += found.pop()
            batches += found
        return Plan(batches, left)

    def _by_bucket(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        buckets: dict[int, list[Piece]] = {}
        for piece in pieces:
            buckets.setdefault(bisect_left(self._boundaries, piece.length), []).append(piece)
        return [buckets[place] for place in sorted(buckets)]

    def _batches(self, bucket: list[Piece]) -> list[list[Piece]]:
        batches: list[list[Piece]] = []
        for piece in bucket:
            if batches and self._fits([*batches[-1], piece]):
                batches[-1].append(piece)
            else:
                batches.append([piece])
        return batches

    def _fits(self, batch: Sequence[Piece]) -> bool:
        return len(batch) * self._length(batch) <= self._padded.max_tokens

    def _has_room(self, batch: Sequence[Piece]) -> bool:
        return (len(batch) + 1) * self._length(batch) <= self._padded.max_tokens

    def _length(self, batch: Sequence[Piece]) -> int:
        """Of the rows of a batch."""
        longest = max(piece.length for piece in batch)
        place = bisect_left(self._boundaries, longest)
        return self._boundaries[place] if self._fixed and place < len(self._boundaries) else longest

    def arrange(self, rows: list[list[Piece]], *, before: int) -> list[list[Piece]]:  # noqa: ARG002  (the protocol's)
        return rows

    def make(self, row: Sequence[Piece]) -> Any:
        return self._padded.make(row, self._length(row), provenance=self._provenance)

    def count(self, row: Sequence[Piece], tally: Tally) -> None:
        self._padded.count(row, self._length(row), tally)
