"""`FlatMap`: one item in, any number of items out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from streamshard.errors import StateError, UsageError
from streamshard.order.cursor import Cursor
from streamshard.steps.filter import Starvation
from streamshard.steps.step import Passing, Stage, StepContext, check_callable, function_name, keep_ref


@dataclass(frozen=True)
class FlatMap:
    """Replace every item by the items of `function(item)` (a list, or any iterable; none is fine and counted).

    The function must be deterministic: a resume in the middle of an item's outputs calls it again and skips those that
    have left. It enters the fingerprint by name; give `version` a new value when it changes.
    """

    function: Callable[[Any], Iterable[Any]]
    version: str | int | None = None

    def __post_init__(self) -> None:
        check_callable("FlatMap", self.function)

    @property
    def label(self) -> str:
        return f"FlatMap({function_name(self.function)})"

    def fingerprint(self) -> dict[str, Any]:
        return {"step": "FlatMap", "function": function_name(self.function), "version": self.version}

    def start(self, inner: Cursor) -> Cursor:
        return inner, 0, 0, 0

    def border(self, cursor: Cursor) -> bool:
        """Whether all outputs of an item have left."""
        return bool(cursor[1] == 0)

    def inner(self, cursor: Cursor) -> Cursor:
        upstream: Cursor = cursor[0]
        return upstream

    def left(self, upstream: int, cursor: Cursor) -> None:
        """Only reading tells."""

    def open(self, upstream: Stage, cursor: Cursor, context: StepContext) -> Stage:
        return _FlatMapStage(self, upstream, cursor, context)


class _FlatMapStage(Passing):
    """Cursor: (upstream cursor before the item, outputs that have left, checksum of the item, items without output).

    The checksum covers (identity, number of outputs) and catches a function that is not deterministic. After the last
    output the cursor is (cursor after, 0, 0, ...).
    """

    def __init__(self, step: FlatMap, upstream: Stage, cursor: Cursor, context: StepContext) -> None:
        super().__init__(upstream)
        self._step = step
        self._before, self._left, self._checksum, self._dropped = cursor
        self._starvation = Starvation(step.label, context)
        self._identity: tuple[Any, ...] = ()
        self._provenance = context.provenance

    def cursor(self) -> Cursor:
        return self._before, self._left, self._checksum, self._dropped

    def identity(self) -> tuple[Any, ...]:
        return self._identity

    def counters(self) -> Iterator[tuple[str, int]]:
        yield from self._upstream.counters()
        yield f"{self._step.label} items without output", self._dropped

    def __iter__(self) -> Iterator[Any]:
        skip, expected = self._left, self._checksum
        for item in self._upstream:
            outputs = self._outputs(item)
            identity = self._upstream.identity()
            checksum = crc32(repr((identity, len(outputs))).encode())
            if skip and checksum != expected:
                raise self._changed(len(outputs), skip)
            after = self._upstream.cursor()
            for number in range(skip, len(outputs)):
                self._identity = (*identity, number)
                if number + 1 == len(outputs):
                    self._before, self._left, self._checksum = after, 0, 0
                else:
                    self._left, self._checksum = number + 1, checksum
                yield outputs[number]
            if not outputs:
                self._before = after
                self._dropped += 1
                self._starvation.dropped(*identity[:2])
            else:
                self._starvation.in_a_row = 0
            skip = 0
        self._before = self._upstream.cursor()  # what an upstream step dropped at the end is counted

    def _outputs(self, item: Any) -> list[Any]:
        try:
            outputs = self._step.function(item)
            if isinstance(outputs, dict | str | bytes):
                raise UsageError(
                    f"{self._step.label} returned a {type(outputs).__name__}; it must return a list of items "
                    f"(use Map for one item)"
                )
            return [keep_ref(item, output) for output in outputs] if self._provenance else list(outputs)
        except Exception as error:
            self.blame(error, self._step.label)
            raise

    def _changed(self, outputs: int, left: int) -> StateError:
        ref = self._upstream.ref()
        return StateError(
            f"{self._step.label} gives {outputs} outputs for shard {ref.shard}, row {ref.row}, of which {left} had left "
            f"when the state was saved, but gave another number then: it, or a step before it, is not deterministic. Make "
            f"it depend on its input only (Map(rng=True) gives reproducible randomness)"
        )
