"""`Filter`: keep the items for which a predicate holds, and count the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from streamshard.errors import DataError
from streamshard.order.cursor import Cursor
from streamshard.steps.step import Passing, Stage, StepContext, check_callable, function_name


class Starvation:
    """Turns an endless search into an error: P + 1 epochs of a partition in a row in which a step let nothing through.

    Partitions read other samples in other epochs, so that by then the step has seen a large part of the dataset. In a mixture
    that holds for every source: a small one may have many epochs before a rare one has its turn.
    """

    def __init__(self, label: str, context: StepContext) -> None:
        self._label = label
        self._partitions = context.partitions
        self._sources = context.sources
        self._first: dict[str, int] = {}  # the epoch in which each source was when nothing came through any more
        self._over: set[str] = set()  # sources that have had their P + 1 epochs since
        self.in_a_row = 0

    def dropped(self, path: str, epoch: int) -> None:
        """An item of source `path` was dropped; raises `DataError` when nothing has come through for P + 1 epochs."""
        if self.in_a_row == 0:
            self._first, self._over = {}, set()
        self.in_a_row += 1
        first = self._first.setdefault(path, epoch)
        if epoch - first > self._partitions:
            self._over.add(path)
        if len(self._over) >= self._sources:
            raise DataError(
                f"{self._label} dropped all of the last {self.in_a_row} items it was given, epochs {first} "
                f"to {epoch - 1} of this partition: with repeat=True the search would never end. Loosen the step, or use "
                f"repeat=False"
            )


@dataclass(frozen=True)
class Filter:
    """Keep items for which `predicate(item)` is true. What is dropped is counted (`StreamDataset.counters`).

    The predicate must be deterministic. It enters the fingerprint by name; give `version` a new value when it changes.
    """

    predicate: Callable[[Any], bool]
    version: str | int | None = None

    def __post_init__(self) -> None:
        check_callable("Filter", self.predicate)

    @property
    def label(self) -> str:
        return f"Filter({function_name(self.predicate)})"

    def fingerprint(self) -> dict[str, Any]:
        return {"step": "Filter", "predicate": function_name(self.predicate), "version": self.version}

    def start(self, inner: Cursor) -> Cursor:
        return inner, 0

    def inner(self, cursor: Cursor) -> Cursor:
        upstream: Cursor = cursor[0]
        return upstream

    def left(self, upstream: int, cursor: Cursor) -> None:
        """Only reading tells."""

    def open(self, upstream: Stage, cursor: Cursor, context: StepContext) -> Stage:
        return _FilterStage(self, upstream, cursor, context)


class _FilterStage(Passing):
    """Cursor: (upstream cursor, items dropped so far)."""

    def __init__(self, step: Filter, upstream: Stage, cursor: Cursor, context: StepContext) -> None:
        super().__init__(upstream)
        self._step = step
        self._dropped: int = cursor[1]
        self._starvation = Starvation(step.label, context)

    def cursor(self) -> Cursor:
        return self._upstream.cursor(), self._dropped

    def counters(self) -> Iterator[tuple[str, int]]:
        yield from self._upstream.counters()
        yield f"{self._step.label} dropped", self._dropped

    def __iter__(self) -> Iterator[Any]:
        predicate, starvation = self._step.predicate, self._starvation
        for item in self._upstream:
            try:
                keep = predicate(item)
            except Exception as error:
                self.blame(error, self._step.label)
                raise
            if keep:
                starvation.in_a_row = 0
                yield item
            else:
                self._dropped += 1
                starvation.dropped(*self._upstream.identity()[:2])
