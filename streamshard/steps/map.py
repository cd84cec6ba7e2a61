"""`Map`: one item in, one item out; singly, with a generator of its own, or n at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from streamshard.errors import DataError, UsageError
from streamshard.order.cursor import Cursor, Ref
from streamshard.order.random import stream_key
from streamshard.steps.step import Passing, Stage, StepContext, blame, check_callable, function_name, keep_ref
from streamshard.steps.threads import Call, Pools, run_ahead


@dataclass(frozen=True)
class Map:
    """Apply `function` to every item.

    With ``rng=True`` it is called as ``function(item, generator)``, the generator a ``numpy.random.Generator`` that
    depends on (seed, epoch, ref, output indices of earlier FlatMaps, this step's place) only: the same sample gets the
    same numbers on any rank, in any worker, after any resume, and others in the next epoch.

    With ``batch=n`` it gets a list of n items (fewer at the end of a finite epoch) and returns a list of as many: for
    tokenizers that encode lists. Together with ``rng=True`` it also gets a list of n generators.

    With ``threads=n`` it runs on n threads of each process, for functions that release the GIL (decoding images, reading
    files); the items leave in order all the same. Up to 2n items, and at least one a partition, are then on their way.

    The function must be deterministic. It enters the fingerprint by name, so give `version` a new value when its code
    changes in a way that must not go unnoticed on resume. Stored arrays arrive read-only; copy before writing into them.
    """

    function: Callable[..., Any]
    rng: bool = False
    batch: int | None = None
    threads: int | None = None
    version: str | int | None = None

    def __post_init__(self) -> None:
        check_callable("Map", self.function)
        if self.batch is not None and (not isinstance(self.batch, int) or self.batch < 1):
            raise UsageError(f"Map(batch={self.batch!r}): the number of items handed over at once must be an int >= 1")

        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise UsageError(f"Map(threads={self.threads!r}): the number of threads must be an int >= 1")
        if self.threads is not None and self.batch is not None:
            raise UsageError(
                f"Map(batch={self.batch}, threads={self.threads}): one or the other; a function of lists can use threads itself"
            )

    @property
    def label(self) -> str:
        return f"Map({function_name(self.function)})"

    def fingerprint(self) -> dict[str, Any]:
        return {
            "step": "Map", "function": function_name(self.function), "rng": self.rng, "batch": self.batch,
            "version": self.version,
        }  # fmt: skip

    def start(self, inner: Cursor) -> Cursor:
        return inner if self.batch is None else (inner, 0)

    def border(self, cursor: Cursor) -> bool:
        """Whether all outputs of a group have left."""
        return self.batch is None or bool(cursor[1] == 0)

    def inner(self, cursor: Cursor) -> Cursor:
        return cursor if self.batch is None else cursor[0]

    def left(self, upstream: int, cursor: Cursor) -> int:
        return upstream if self.batch is None else upstream - int(cursor[1])

    def open(self, upstream: Stage, cursor: Cursor, context: StepContext) -> Stage:
        if self.threads is not None and context.pools is not None:
            return _ThreadedMapStage(self, upstream, cursor, context, context.pools)
        if self.batch is None:
            return _MapStage(self, upstream, context)
        return _BatchedMapStage(self, upstream, cursor, context)


class _MapStage(Passing):
    def __init__(self, step: Map, upstream: Stage, context: StepContext) -> None:
        super().__init__(upstream)
        self._step = step
        self._context = context

    def __iter__(self) -> Iterator[Any]:
        function, upstream = self._step.function, self._upstream
        rng, provenance = self._step.rng, self._context.provenance
        for item in upstream:
            try:
                mapped = function(item, generator(upstream, self._context)) if rng else function(item)
            except Exception as error:
                self.blame(error, self._step.label)
                raise
            yield keep_ref(item, mapped) if provenance else mapped


class _ThreadedMapStage(Passing):
    """See `streamshard.steps.threads`. Cursor: the upstream's as it was after the item that left last."""

    def __init__(self, step: Map, upstream: Stage, cursor: Cursor, context: StepContext, pools: Pools) -> None:
        super().__init__(upstream)
        self._step = step
        self._context = context
        self._pools = pools
        self._counts = next(upstream.counters(), None) is not None
        self._last = Call(None, None, cursor, (), Ref("", -1, -1), tuple(upstream.counters()))

    def cursor(self) -> Cursor:
        return self._last.cursor

    def identity(self) -> tuple[Any, ...]:
        return self._last.identity

    def ref(self) -> Ref:
        return self._last.ref

    def counters(self) -> Iterator[tuple[str, int]]:
        yield from self._last.counters

    def __iter__(self) -> Iterator[Any]:
        calls = run_ahead(self._calls(), self._pools.ahead(self._step.threads or 1))
        try:
            for call in calls:
                if call.failure is not None:
                    raise call.failure
                assert call.result is not None  # it has one or the other
                try:
                    mapped = call.result.result()
                except Exception as error:
                    blame(error, self._step.label, call.ref)
                    raise
                self._last = call
                yield keep_ref(call.item, mapped) if self._context.provenance else mapped
        finally:
            calls.close()
        upstream = self._upstream  # what it dropped at the end is counted
        self._last = replace(self._last, cursor=upstream.cursor(), counters=tuple(upstream.counters()))

    def _calls(self) -> Iterator[Call]:
        step, upstream = self._step, self._upstream
        submit = self._pools.pool(self._context.place, step.threads or 1).submit
        try:
            for item in upstream:
                arguments = (item, generator(upstream, self._context)) if step.rng else (item,)
                counters = tuple(upstream.counters()) if self._counts else ()
                yield Call(
                    item,
                    submit(step.function, *arguments),
                    upstream.cursor(),
                    upstream.identity(),
                    upstream.ref(),
                    counters,
                )
        except Exception as error:  # noqa: BLE001  (raised when what came before it has left)
            yield Call(None, None, self._last.cursor, (), self._last.ref, (), error)


class _BatchedMapStage(Passing):
    """Cursor: (upstream cursor before the group, outputs of the group that have left).

    After the last output it is (cursor after, 0). Resuming re-reads the group and calls the function again on the whole of
    it, because an output may depend on its neighbours.
    """

    def __init__(self, step: Map, upstream: Stage, cursor: Cursor, context: StepContext) -> None:
        super().__init__(upstream)
        self._step = step
        self._context = context
        self._before: Cursor = cursor[0]
        self._left: int = cursor[1]
        self._identities: list[tuple[Any, ...]] = []
        self._refs: list[Ref] = []
        self._generators: list[np.random.Generator] = []

    def cursor(self) -> Cursor:
        return self._before, self._left

    def identity(self) -> tuple[Any, ...]:
        return self._identities[self._left - 1]  # after the last output, left is 0: the last item

    def ref(self) -> Ref:
        return self._refs[self._left - 1] if self._refs else self._upstream.ref()

    def __iter__(self) -> Iterator[Any]:
        upstream = iter(self._upstream)
        skip, self._left = self._left, 0
        while group := list(islice(self._noting(upstream), self._step.batch)):
            outputs = self._call(group)
            after = self._upstream.cursor()
            for number in range(skip, len(outputs)):
                self._left = number + 1
                if self._left == len(outputs):
                    self._before, self._left = after, 0
                yield outputs[number]
            skip = 0
        self._before, self._left = self._upstream.cursor(), 0  # what an upstream step dropped at the end is counted

    def _noting(self, upstream: Iterator[Any]) -> Iterator[Any]:
        """Remember who the items of the group are; they have gone by when the outputs leave."""
        self._identities, self._refs, self._generators = [], [], []
        for item in upstream:
            self._identities.append(self._upstream.identity())
            if self._context.refs:
                self._refs.append(self._upstream.ref())
            if self._step.rng:
                self._generators.append(generator(self._upstream, self._context))
            yield item

    def _call(self, group: list[Any]) -> list[Any]:
        try:
            outputs = self._step.function(group, self._generators) if self._step.rng else self._step.function(group)
        except Exception as error:
            self.blame(error, f"{self._step.label} on the {len(group)} items up to the one")
            raise
        if not isinstance(outputs, list) or len(outputs) != len(group):
            got = f"{len(outputs)} items" if isinstance(outputs, list) else f"a {type(outputs).__name__}"
            raise DataError(
                f"{self._step.label} got {len(group)} items and returned {got}; with batch=n it must return a list of as "
                f"many (use FlatMap to change the number)"
            )
        return [*map(keep_ref, group, outputs)] if self._context.provenance else outputs


def generator(upstream: Stage, context: StepContext) -> np.random.Generator:
    """The generator that belongs to the item `upstream` has just given."""
    _, epoch, _, *indices = upstream.identity()
    ref = upstream.ref()
    key = stream_key(context.seed, epoch, "map", context.place, ref.source, ref.shard, ref.row, *indices)
    return np.random.Generator(np.random.Philox(key=key))
