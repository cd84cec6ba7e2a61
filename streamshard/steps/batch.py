"""`Batch`: n items of one partition as one micro-batch of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from streamshard.errors import UsageError
from streamshard.order.cursor import Cursor
from streamshard.steps.step import Passing, Stage, StepContext, check_callable, function_name
from streamshard.steps.tensors import RAGGED, collate


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
    """

    size: int
    drop_last: bool = False
    ragged: str = "error"
    pad_value: float = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    version: str | int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise UsageError(f"Batch({self.size!r}): the number of items must be an int >= 1")
        if self.ragged not in RAGGED:
            raise UsageError(f"Batch(ragged={self.ragged!r}): choose one of {', '.join(map(repr, RAGGED))}")
        if not isinstance(self.pad_value, int | float):
            raise UsageError(f"Batch(pad_value={self.pad_value!r}): pass an int or a float")
        if self.collate_fn is not None:
            check_callable("Batch", self.collate_fn)

    @property
    def label(self) -> str:
        return f"Batch({self.size})"

    def fingerprint(self) -> dict[str, Any]:
        return {
            "step": "Batch", "size": self.size, "drop_last": self.drop_last, "ragged": self.ragged,
            "pad_value": repr(float(self.pad_value)), "version": self.version,
            "collate_fn": None if self.collate_fn is None else function_name(self.collate_fn),
        }  # fmt: skip

    def start(self, inner: Cursor) -> Cursor:
        return inner, 0

    def inner(self, cursor: Cursor) -> Cursor:
        upstream: Cursor = cursor[0]
        return upstream

    def left(self, upstream: int, cursor: Cursor) -> int:  # noqa: ARG002  (between batches it holds nothing)
        return upstream // self.size if self.drop_last else -(-upstream // self.size)

    def open(self, upstream: Stage, cursor: Cursor, context: StepContext) -> Stage:  # noqa: ARG002  (the protocol's)
        return _BatchStage(self, upstream, cursor)


class _BatchStage(Passing):
    """Cursor: (upstream cursor, items dropped as an incomplete last batch). Between batches it holds nothing."""

    def __init__(self, step: Batch, upstream: Stage, cursor: Cursor) -> None:
        super().__init__(upstream)
        self._step = step
        self._dropped: int = cursor[1]

    def cursor(self) -> Cursor:
        return self._upstream.cursor(), self._dropped

    def counters(self) -> Iterator[tuple[str, int]]:
        yield from self._upstream.counters()
        yield f"{self._step.label} dropped at the end", self._dropped

    def __iter__(self) -> Iterator[Any]:
        step, upstream = self._step, iter(self._upstream)
        while items := list(islice(upstream, step.size)):
            if len(items) < step.size and step.drop_last:
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
