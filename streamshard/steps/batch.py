"""`Batch`: items of one partition as one micro-batch of tensors: so many, or as many as so many tokens hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from streamshard.errors import UsageError
from streamshard.order.cursor import Cursor
from streamshard.steps.counts import Counts, thaw
from streamshard.steps.padded import Padded
from streamshard.steps.step import Passing, Stage, StepContext, check_callable, function_name
from streamshard.steps.tensors import RAGGED, collate
from streamshard.steps.token_batch import TokenBatchStage, first_cursor


@dataclass(frozen=True)
class Batch:
    """Collect `size` consecutive items of a partition into one batch.

    Every micro-batch is the same for any number of ranks and workers. Maps become maps of batched fields: arrays and
    numbers become tensors with a leading dimension of `size`, everything else a list (`collate` says exactly how).

    ragged: what to do with array fields whose shapes differ. ``"error"`` (the default, since padding has to be masked
        later) refuses them, ``"pad"`` pads with `pad_value` at the end of every dimension and adds ``<field>_length``
        (int64, the true first dimension), ``"list"`` keeps a list of tensors.
    drop_last: whether the incomplete batch at the end of a finite epoch is dropped (and counted) or kept. With
        ``repeat=True`` batches run across epochs and there is no last one.
    collate_fn: called with the list of items instead of all this.
    max_tokens: instead of `size`, or beside it: a batch has as many consecutive items as cost at most so many tokens, padding
        included (items x the longest of them). Items are then documents, and the batch is by the batch contract, one document
        a row, counted by source; `fields`, `pad_id`, `overflow`, `length` and `collate_fn` as for `BucketBatch`.
    """

    size: int | None = None
    drop_last: bool = False
    ragged: str = "error"
    pad_value: float = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    version: str | int | None = None
    max_tokens: int | None = None
    fields: Mapping[str, str] | None = None
    length: str | None = None
    overflow: str = "error"
    pad_id: int = 0
    _padded: Padded | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size is None and self.max_tokens is None:
            raise UsageError("Batch(): pass the number of items, or max_tokens=")
        if self.size is not None and (type(self.size) is not int or self.size < 1):
            raise UsageError(f"Batch({self.size!r}): the number of items must be an int >= 1")
        if self.max_tokens is not None:
            self._check_max_tokens(self.max_tokens)
        elif (self.fields, self.length, self.overflow, self.pad_id) != (None, None, "error", 0):
            raise UsageError(
                "Batch(fields=, length=, overflow=, pad_id=) are about max_tokens=: pass that too, or leave them out"
            )
        if self.ragged not in RAGGED:
            raise UsageError(f"Batch(ragged={self.ragged!r}): choose one of {', '.join(map(repr, RAGGED))}")
        if not isinstance(self.pad_value, int | float):
            raise UsageError(f"Batch(pad_value={self.pad_value!r}): pass an int or a float")
        if self.collate_fn is not None:
            check_callable("Batch", self.collate_fn)

    def _check_max_tokens(self, max_tokens: int) -> None:
        if self.ragged != "error" or self.drop_last:
            raise UsageError(
                f"Batch(max_tokens={max_tokens}): ragged= and drop_last= are about batches of a number of items; leave them out"
            )
        padded = Padded(
            "Batch", max_tokens, fields=self.fields, length=self.length, overflow=self.overflow, pad_id=self.pad_id,
            collate_fn=self.collate_fn,
        )  # fmt: skip
        object.__setattr__(self, "_padded", padded)

    @property
    def label(self) -> str:
        return f"Batch({self.size})" if self.max_tokens is None else f"Batch(max_tokens={self.max_tokens})"

    def fingerprint(self) -> dict[str, Any]:
        if self.max_tokens is not None:
            return {
                "step": "TokenBatch", "most": self.size, "max_tokens": self.max_tokens, "fields": dict(self.fields or {}),
                "length": self.length, "overflow": self.overflow, "pad_id": self.pad_id, "version": self.version,
                "collate_fn": None if self.collate_fn is None else function_name(self.collate_fn),
            }  # fmt: skip
        return {
            "step": "Batch", "size": self.size, "drop_last": self.drop_last, "ragged": self.ragged,
            "pad_value": repr(float(self.pad_value)), "version": self.version,
            "collate_fn": None if self.collate_fn is None else function_name(self.collate_fn),
        }  # fmt: skip

    def start(self, inner: Cursor) -> Cursor:
        return (inner, 0) if self.max_tokens is None else first_cursor(inner)

    def inner(self, cursor: Cursor) -> Cursor:
        upstream: Cursor = cursor[0]
        return upstream

    def counts(self, cursor: Cursor) -> Counts | None:
        """What had left at `cursor`; a number of items is not counted in tokens."""
        return None if self.max_tokens is None else thaw(cursor[-1])

    def left(self, upstream: int, cursor: Cursor) -> int | None:  # noqa: ARG002  (between batches it holds nothing)
        if self.size is None or self.max_tokens is not None:
            return None
        return upstream // self.size if self.drop_last else -(-upstream // self.size)

    def open(self, upstream: Stage, cursor: Cursor, context: StepContext) -> Stage:
        if self._padded is not None:
            return TokenBatchStage(self, self._padded, upstream, cursor, context)
        return _BatchStage(self, upstream, cursor)


class _BatchStage(Passing):
    """Cursor: (upstream cursor, items dropped as an incomplete last batch). Between batches it holds nothing."""

    def __init__(self, step: Batch, upstream: Stage, cursor: Cursor) -> None:
        super().__init__(upstream)
        assert step.size is not None  # else another stage is opened
        self._step = step
        self._size = step.size
        self._dropped: int = cursor[1]

    def cursor(self) -> Cursor:
        return self._upstream.cursor(), self._dropped

    def counters(self) -> Iterator[tuple[str, int]]:
        yield from self._upstream.counters()
        yield f"{self._step.label} dropped at the end", self._dropped

    def __iter__(self) -> Iterator[Any]:
        step, upstream = self._step, iter(self._upstream)
        while items := list(islice(upstream, self._size)):
            if step.drop_last and len(items) < self._size:
                self._dropped += len(items)
                return
            yield self._collate(items)

    def _collate(self, items: list[Any]) -> Any:
        step = self._step
        try:
            if step.collate_fn is not None:
                return step.collate_fn(items)
            return collate(items, ragged=step.ragged, pad_value=step.pad_value)
        except Exception as error:
            self.blame(error, f"{step.label}, whose last item came from the sample")
            raise
