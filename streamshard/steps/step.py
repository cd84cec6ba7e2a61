"""What a step is: an immutable description (`Step`) that opens a stateful iterator (`Stage`) in each partition.

A stage pulls from its upstream and never runs ahead, so the cursor asked for after an item describes that item. Cursors
nest: a stage that keeps something of its own returns a tuple whose first element is its upstream's cursor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from streamshard.errors import UsageError
from streamshard.order.cursor import REF_FIELD, Cursor, Ref
from streamshard.steps.counts import Counts
from streamshard.steps.threads import Pools


class Past(Protocol):
    """Items that a step has had from its upstream before, for steps that hold items back."""

    def items(self, identities: Sequence[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], Any, Ref]]:
        """(identity, item, ref), made again, for all items that come of the stored samples of `identities`, in order.

        What has to be read is asked of the store when the iteration opens, if this was called before it.
        """

    def ref(self, identity: tuple[Any, ...]) -> Ref:
        """The stored sample that an item came from."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a stage may know of its surroundings.

    `place` is the step's position in the pipeline, from 0; for steps of a mixture's source a name that begins with `prefix`.
    `refs` says that refs of single items will be asked for, `provenance` that samples carry theirs in a field. `pools` has the
    threads of steps that use some. `past`: see there. `sources`: datasets that are read. `window`: samples that a step
    takes before the first item leaves.
    """

    seed: int
    partitions: int
    place: int | str = 0
    prefix: str = ""
    refs: bool = False
    provenance: bool = False
    pools: Pools | None = None
    past: Past | None = None
    sources: int = 1
    window: int = 0


class Stage(Protocol):
    """A step, or the source, at work in one partition. Iterated once; not thread-safe."""

    def __iter__(self) -> Iterator[Any]:
        """Items, pulled one at a time."""

    def cursor(self) -> Cursor:
        """Where to go on after the last item that left."""

    def identity(self) -> tuple[Any, ...]:
        """(source path, epoch, k, one index per FlatMap passed) of the last item."""

    def ref(self) -> Ref:
        """The stored sample that the last item came from."""

    def counters(self) -> Iterator[tuple[str, int]]:
        """(name, count) of everything dropped so far, upstream first."""


class SourceStage(Stage, Protocol):
    """The first stage, which can also give again what it has given."""

    def again(self, identities: Sequence[tuple[Any, ...]]) -> SourceStage:
        """A stage that gives the samples of `identities` (the first three of each matter) once more, in order."""

    def ref_of(self, identity: tuple[Any, ...]) -> Ref:
        """The stored sample of an identity."""


class Step(Protocol):
    """A transformation inside a partition: `Map`, `Filter`, `FlatMap`, `Batch`. Immutable and picklable."""

    @property
    def label(self) -> str:
        """The step as a person would write it: for messages and counters."""

    def fingerprint(self) -> dict[str, Any]:
        """Name and parameters, JSON-safe: what must be equal for a state to fit."""

    def start(self, inner: Cursor) -> Cursor:
        """The cursor of a fresh stage whose upstream stands at `inner`."""

    def inner(self, cursor: Cursor) -> Cursor:
        """Where the upstream must stand for a stage resumed at `cursor`."""

    def left(self, upstream: int, cursor: Cursor) -> int | None:
        """Items still to come at `cursor` of a finite epoch when `upstream` are to come above; None: only reading tells."""

    def open(self, upstream: Stage, cursor: Cursor, context: StepContext) -> Stage:
        """A stage that goes on from `cursor`."""


@runtime_checkable
class Counting(Protocol):
    """Of steps that count what leaves."""

    def counts(self, cursor: Cursor) -> Counts | None:
        """What had left at `cursor`, whose last element has it as `Tally` does; None if this one does not count."""


@runtime_checkable
class Holding(Protocol):
    """Of steps that hold items back, which a resume makes again: `Pack`, `BucketBatch`."""

    @property
    def label(self) -> str: ...

    def carried(self, cursor: Cursor) -> Sequence[Any]:
        """What a stage at `cursor` holds: records with an `identity`."""

    def reached(self, cursor: Cursor) -> int:
        """The epoch up to which something may have left at `cursor`, if that is another than the upstream's."""


class Passing:
    """Base of stages that hand on their upstream's position and identity; `Map` needs no more than this."""

    def __init__(self, upstream: Stage) -> None:
        self._upstream = upstream

    def cursor(self) -> Cursor:
        return self._upstream.cursor()

    def identity(self) -> tuple[Any, ...]:
        return self._upstream.identity()

    def ref(self) -> Ref:
        return self._upstream.ref()

    def counters(self) -> Iterator[tuple[str, int]]:
        yield from self._upstream.counters()

    def blame(self, error: Exception, label: str) -> None:
        """Note on a user function's exception which sample it met."""
        blame(error, label, self._upstream.ref())


def blame(error: Exception, label: str, ref: Ref) -> None:
    """Note on an exception that the step `label` met it at `ref`."""
    source = f"source {ref.source!r}, " if ref.source else ""
    error.add_note(f"in {label} at {source}shard {ref.shard}, row {ref.row}")


def keep_ref(item: Any, output: Any) -> Any:
    """`output` of a user's function with the ref that `item` carries: a new dictionary must not lose its provenance."""
    if isinstance(output, dict) and isinstance(item, dict) and REF_FIELD in item and REF_FIELD not in output:
        return {**output, REF_FIELD: item[REF_FIELD]}  # a new one: the function may hand out the same dictionary again
    return output


def function_name(function: Callable[..., Any]) -> str:
    """The name under which a callable enters the fingerprint: its qualified name without the module.

    The module is left out because a script's functions live in ``__main__`` when it is run and elsewhere when imported.
    """
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name


def check_callable(step: str, function: object) -> None:
    """Refuse at construction what could only fail in a worker."""
    if not callable(function):
        raise UsageError(f"{step}(...) needs a function, got {function!r} of type {type(function).__name__}")
