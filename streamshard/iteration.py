"""One pass over the partitions that a reader holds: partition runs, the book of epochs, and the state in between."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamshard.observe.events import StorageCounters
from streamshard.order.cursor import Cursor, Ref, innermost
from streamshard.order.partition import EpochOrder, OrderSpec
from streamshard.order.rotation import Reader, Rotation
from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.scheduler import ReadAhead
from streamshard.prefetch.source import PartitionSource
from streamshard.snapshot_contents import encode_contents
from streamshard.state import PartitionState
from streamshard.steps.pipeline import open_stages, still_needed
from streamshard.steps.step import Stage, Step, StepContext
from streamshard.steps.threads import Pools

Needed = Callable[[Cursor], frozenset[tuple[int, int]]]
Mark = tuple[int, bool, Cursor]  # turn, done and cursor of a partition: a `PartitionState` that costs a tuple to make


@dataclass(frozen=True, slots=True)
class Share:
    """What one reader has at the start of an iteration: plain values that can be sent to a worker process."""

    reader: Reader
    parts: int  # P
    history: tuple[tuple[int, str], ...]  # (first epoch, dataset version) if there was more than one version
    epoch: int
    live: dict[int, PartitionState]
    carried: dict[int, PartitionState]
    contents: dict[str, bytes]
    batches: int = 0  # that a loader handed out earlier in this epoch


class Book:
    """Which dataset version an epoch reads, and its order. A dataset that grew has one entry per version.

    `timeline` holds (first epoch, shards) in ascending order, the first entry from epoch 0.
    """

    def __init__(self, spec: OrderSpec, timeline: Sequence[tuple[int, ShardAccess]]) -> None:
        self.repeat = spec.repeat
        self._spec = spec
        self._timeline = timeline
        self._orders: dict[int, EpochOrder] = {}

    def epoch(self, number: int) -> tuple[EpochOrder, ShardAccess]:
        """The order of epoch `number` and the shards it is about."""
        place = bisect_right([first for first, _ in self._timeline], number) - 1
        access = self._timeline[place][1]
        if number not in self._orders:
            if len(self._orders) > 3:  # partitions are at most an epoch or two apart
                del self._orders[min(self._orders)]
            self._orders[number] = EpochOrder(self._spec, access.manifest.sample_counts, number, self._offset(number))
        return self._orders[number], access

    def _offset(self, number: int) -> int:
        """Samples in all epochs before `number`."""
        total = 0
        for place, (first, access) in enumerate(self._timeline):
            end = self._timeline[place + 1][0] if place + 1 < len(self._timeline) else number
            total += max(0, min(end, number) - first) * access.manifest.total_samples
        return total


class PartitionRun:
    """A partition being read through its steps. `cursor` and `turn` describe the last item that left, also when the next
    one failed half-way.

    needed: which samples before a cursor a resume reads again; given where samples are kept, and nobody else lets them go.
    """

    def __init__(
        self, p: int, state: PartitionState, source: PartitionSource, stage: Stage, needed: Needed | None = None
    ) -> None:
        self.p = p
        self.turn = state.turn
        self.done = False
        self.cursor = state.cursor
        self.source = source
        self.stage = stage
        self._needed = needed
        self.items = self._items()

    def _items(self) -> Generator[Any, None, None]:
        stage = self.stage
        for item in stage:
            self.cursor = stage.cursor()
            self.turn += 1
            if self._needed is not None:
                self.source.forget(innermost(self.cursor), self._needed(self.cursor))
            yield item
        self.cursor = stage.cursor()
        self.done = True

    def mark(self) -> Mark:
        return self.turn, self.done, self.cursor


class PlainRun:
    """A partition being read without steps: the source's own position is the state, and no cursor is made per sample."""

    def __init__(self, p: int, state: PartitionState, source: PartitionSource, *, forgets: bool) -> None:
        self.p = p
        self.source = source
        self.stage: Stage = source
        self._first_turn = state.turn
        self.items = self._forgetting() if forgets else iter(source)

    def _forgetting(self) -> Generator[Any, None, None]:
        for item in self.source:
            self.source.forget((self.source.epoch, self.source.k))
            yield item

    @property
    def turn(self) -> int:
        return self._first_turn + self.source.emitted

    @property
    def done(self) -> bool:
        return self.source.finished

    def mark(self) -> Mark:
        source = self.source
        return self._first_turn + source.emitted, source.finished, (source.epoch, source.k)


class _Finished:
    """Stands for the source of a finished partition, of which only the counters are of interest."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def cursor(self) -> Cursor:
        return self._cursor

    def identity(self) -> tuple[Any, ...]:
        return "", *self._cursor

    def ref(self) -> Ref:
        raise LookupError("a finished partition has no current sample")

    def again(self, identities: Sequence[tuple[Any, ...]]) -> _Finished:  # noqa: ARG002  (the protocol's)
        return self

    def ref_of(self, identity: tuple[Any, ...]) -> Ref:  # noqa: ARG002  (the protocol's)
        return self.ref()

    def counters(self) -> Iterator[tuple[str, int]]:
        return iter(())


def dropped(steps: Sequence[Step], context: StepContext, states: Iterable[PartitionState]) -> dict[str, int]:
    """What the steps had dropped, by step, in partitions that stand so: cursors carry it."""
    total: Counter[str] = Counter()
    for state in states:
        total.update(dict(open_stages(steps, state.cursor, context, _Finished).counters()))
    return dict(total)


class Iteration:
    """The partitions of one reader from a given state on. Iterate it once; `close` it when done.

    lent: a loader reads it ahead of what it hands out, and says by `acknowledge` what that is.
    """

    def __init__(
        self,
        book: Book,
        steps: Sequence[Step],
        context: StepContext,
        live: Mapping[int, PartitionState],
        carried: Mapping[int, PartitionState],
        *,
        budget: int,
        interleave: int,
        keep: bool,
        contents: Mapping[int, Mapping[tuple[int, int], Any]],
        lent: bool = False,
        report: Callable[[Iteration], None] | None = None,
    ) -> None:
        self.carried = dict(carried)
        self.exhausted = False
        self._finished_counters = dropped(steps, context, carried.values())
        self._keep = keep
        self._needed: Needed = partial(still_needed, steps)
        self._pools = Pools(len(live))
        context = replace(context, pools=self._pools)
        tell = None if report is None else partial(report, self)
        self._ahead = ReadAhead(budget, max(1, len(live) * interleave), tell)
        self.runs: list[PartitionRun | PlainRun] = []
        self._sources: dict[int, PartitionSource] = {}
        forgets = keep and not lent
        for p, state in live.items():
            source = PartitionSource(
                book, self._ahead, p, innermost(state.cursor),
                tracked=context.refs, provenance=context.provenance, keep=keep, contents=contents.get(p),
            )  # fmt: skip
            self._sources[p] = source
            if not steps:
                self.runs.append(PlainRun(p, state, source, forgets=forgets))
                continue
            stage = open_stages(steps, state.cursor, context, lambda _, source=source: source)  # type: ignore[misc]
            self.runs.append(PartitionRun(p, state, source, stage, self._needed if forgets else None))
        self._rotation = Rotation(self.runs)

    def open(self) -> Rotation[PartitionRun | PlainRun]:
        """The items in slot order, the first blocks of all partitions requested together."""
        for run in self.runs:
            run.source.open()
        return self._rotation

    def begin_speculation(self) -> None:
        """Call it after the first item has been handed out; see `ReadAhead`."""
        self._ahead.begin_speculation()

    def interrupt(self) -> None:
        """From another thread: the one that reads stops waiting for the store or for threads, with an error."""
        self._rotation.stopped = True
        self._ahead.close()
        self._pools.close()

    def close(self) -> None:
        """Cancel the requests in flight and let go of what was read ahead; the state stays readable."""
        self._ahead.close()
        self._pools.close()
        for run in self.runs:
            run.source.close()
            run.items.close()  # a run and its generator refer to each other: waiting for the collector would hold blocks

    def partitions(self) -> dict[int, PartitionState]:
        """Where every held partition stands."""
        return {**self.carried, **{run.p: PartitionState(*run.mark()) for run in self.runs}}

    def acknowledge(self, marks: Mapping[int, Mark]) -> None:
        """Where partitions stood when something of theirs was handed out: no earlier place will be asked for again.

        Only for iterations made with `lent`. May be called while another thread reads.
        """
        for p, (_, _, cursor) in marks.items() if self._keep else ():
            self._sources[p].forget(innermost(cursor), self._needed(cursor))

    def contents(self) -> dict[str, bytes]:
        """The samples of a contents snapshot under the list of their partitions; {} unless they are kept.

        May be called while another thread reads.
        """
        if not self._keep:
            return {}
        kept = {run.p: samples for run in self.runs if (samples := run.source.kept())}
        return {",".join(map(str, kept)): encode_contents(kept)} if kept else {}

    def storage_counters(self, store: StorageCounters) -> StorageCounters:
        """`store`'s counters completed by what this iteration has waited for."""
        return self._ahead.counters(store)

    def counters(self) -> dict[str, int]:
        """What the steps have dropped in the partitions read here."""
        total = Counter(self._finished_counters)
        for run in self.runs:
            total.update(dict(run.stage.counters()))
        return dict(total)
