"""One pass over the partitions that a reader holds: partition runs, the book of epochs, and the state in between."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from streamshard.observe.events import StorageCounters
from streamshard.order.cursor import Cursor, Ref, innermost, with_innermost
from streamshard.order.partition import EpochOrder, OrderSpec
from streamshard.order.rotation import Reader, Rotation
from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.scheduler import ReadAhead
from streamshard.prefetch.source import Contents, Kept, PartitionSource
from streamshard.snapshot_contents import decode_contents, encode_contents
from streamshard.state import PartitionState
from streamshard.steps.pipeline import Needed, at_border, open_stages, still_needed
from streamshard.steps.step import SourceStage, Stage, Step, StepContext
from streamshard.steps.threads import Pools

_logger = logging.getLogger("streamshard")
_LONG = 1000  # items of a partition within which a window has left, and all outputs of a sample

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
    mixture: list[Any] = field(default_factory=list)  # versions of a mixture's parameters
    batches: int = 0  # that a loader handed out earlier in this epoch


class Book:
    """Which dataset version an epoch reads, and its order. A dataset that grew has one entry per version.

    `timeline` holds (first epoch, shards) in ascending order, the first entry from epoch 0. base: slots before the first
    epoch's.
    """

    def __init__(self, spec: OrderSpec, timeline: Sequence[tuple[int, ShardAccess]], *, base: int = 0) -> None:
        self.slots = spec.buffer
        self.repeat = spec.repeat
        self._base = base
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
        """Slots before epoch `number`."""
        total = self._base
        for place, (first, access) in enumerate(self._timeline):
            end = self._timeline[place + 1][0] if place + 1 < len(self._timeline) else number
            total += max(0, min(end, number) - first) * access.manifest.total_samples
        return total


class OpenSource(SourceStage, Protocol):
    """The first stage of a partition that is being read."""

    def open(self) -> None:
        """Request the first blocks now, so that the partitions of a process wait for the store together."""

    def close(self) -> None:
        """Let go of what was requested and not begun."""

    def forget(self, base: Cursor, needed: Needed) -> None:
        """No cursor before `base` will be asked for again, but for the samples `needed`."""

    def kept(self) -> list[Kept]:
        """What a contents snapshot has of it."""


@dataclass(frozen=True, slots=True)
class Kit:
    """What a partition's source is opened with."""

    ahead: ReadAhead
    context: StepContext
    keep: bool = False
    contents: Contents | None = None


class Origin(Protocol):
    """Where partitions get their samples from: a dataset, or a mixture of several."""

    @property
    def stripes(self) -> int:
        """Places that a partition reads in rotation."""

    def open(self, p: int, cursor: Cursor, kit: Kit) -> OpenSource:
        """The source of partition `p` from `cursor` on."""

    def finished(self, cursor: Cursor) -> SourceStage:
        """Stands for a source at `cursor` that is not read, of which only the counters are of interest."""

    def adopted(self, p: int, cursor: Cursor) -> Cursor | None:
        """Where partition `p` goes on under changed parameters; None if `cursor` is up to date."""


class Plain:
    """One dataset."""

    def __init__(self, book: Book, interleave: int) -> None:
        self.stripes = interleave
        self._book = book

    def open(self, p: int, cursor: Cursor, kit: Kit) -> PartitionSource:
        return open_leaf(self._book, p, cursor, kit, last=None if self._book.repeat else cursor[0])

    def finished(self, cursor: Cursor) -> SourceStage:
        return Finished(cursor)

    def adopted(self, p: int, cursor: Cursor) -> None:
        """Nothing can change."""


def open_leaf(
    book: Book, p: int, cursor: Cursor, kit: Kit, *, last: int | None, path: str = "", share: float = 1.0
) -> PartitionSource:
    """Partition `p` of one dataset, called `path`, up to the epoch `last`. About that share of what is read comes of it."""
    context = kit.context
    return PartitionSource(
        book, kit.ahead, p, cursor, tracked=context.refs, provenance=context.provenance, keep=kit.keep,
        contents=kit.contents, path=path, first=int(context.window * share), last=last,
    )  # fmt: skip


class PartitionRun:
    """A partition being read through its steps. `cursor` and `turn` describe the last item that left, also when the next
    one failed half-way. forgets: samples are kept, and nobody else lets them go.
    """

    def __init__(self, p: int, state: PartitionState, reading: Reading, *, forgets: bool) -> None:
        self.p = p
        self.turn = state.turn
        self.done = False
        self.cursor = state.cursor
        self._reading = reading
        self._forgets = forgets
        self._waited = 0
        self.cursor, self.source, self.stage, self._behind = reading.begin(p, state.cursor)
        self.items = self._items()

    def _items(self) -> Generator[Any, None, None]:
        while not self.done:
            yield from self._of_one_kind()

    def _of_one_kind(self) -> Generator[Any, None, None]:
        """Items up to the end, or up to where other parameters take effect."""
        stage = self.stage
        for item in stage:
            self.cursor = stage.cursor()
            self.turn += 1
            if self._forgets:
                self.source.forget(innermost(self.cursor), self._reading.needed(self.cursor))
            yield item
            if self._behind and not at_border(self._reading.steps, self.cursor):
                self._tell_if_behind_for_long()
            elif self._behind:
                kept = self.source.kept()
                self.source.close()
                self.cursor, self.source, self.stage, self._behind = self._reading.begin(self.p, self.cursor, kept)
                return
        self.cursor = stage.cursor()
        self.done = True

    def _tell_if_behind_for_long(self) -> None:
        self._waited += 1
        if self._waited == _LONG:
            _logger.warning(
                "a change of the Mixture has not taken effect in partition %d after %d items: it waits for a moment when no "
                "step is in the middle of something, and there was none yet (as when a Filter drops the last output of every "
                "FlatMap's item)",
                self.p, self._waited,
            )  # fmt: skip

    def mark(self) -> Mark:
        return self.turn, self.done, self.cursor


class PlainRun:
    """A partition being read without steps: the source's own position is the state, and no cursor is made per sample."""

    def __init__(self, p: int, state: PartitionState, reading: Reading, *, forgets: bool) -> None:
        self.p = p
        _, source, _, _ = reading.begin(p, state.cursor)
        assert isinstance(source, PartitionSource)  # else another kind of run reads it
        self.source = source
        self.stage: Stage = source
        self._first_turn = state.turn
        self.items = self._forgetting() if forgets else source.__iter__()

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


class LazyRun:
    """A partition of a mixture being read without steps: its cursor, which is long, is made when it is asked for."""

    def __init__(self, p: int, state: PartitionState, reading: Reading, *, forgets: bool) -> None:
        self.p = p
        self.turn = state.turn
        self.done = False
        self._forgets = forgets
        self._needed = reading.needed
        _, self.source, self.stage, _ = reading.begin(p, state.cursor)  # without steps no parameters are behind
        self.items = self._items()

    def _items(self) -> Generator[Any, None, None]:
        for item in self.stage:
            self.turn += 1
            if self._forgets:
                cursor = self.stage.cursor()
                self.source.forget(cursor, self._needed(cursor))
            yield item
        self.done = True

    def mark(self) -> Mark:
        return self.turn, self.done, self.stage.cursor()


class Reading:
    """How the partitions of an iteration are opened: their origin, and the steps over it."""

    def __init__(self, origin: Origin, steps: Sequence[Step], kit: Kit, contents: Mapping[int, Contents]) -> None:
        self.steps = steps
        self._origin = origin
        self._kit = kit
        self._contents = contents

    def needed(self, cursor: Cursor) -> Needed:
        """Samples before `cursor` that a resume from it reads again."""
        return still_needed(self.steps, cursor)

    def begin(self, p: int, cursor: Cursor, kept: Sequence[Kept] = ()) -> tuple[Cursor, OpenSource, Stage, bool]:
        """(cursor, source, last stage, whether other parameters wait) of partition `p` from `cursor` on. They take effect
        where no step is in the middle of something that was planned under the earlier ones.
        """
        adopted = self._origin.adopted(p, innermost(cursor))
        if adopted is not None and at_border(self.steps, cursor):
            cursor, adopted = with_innermost(cursor, adopted), None
        held = decode_contents(encode_contents({p: kept}))[p] if kept else self._contents.get(p)
        source = self._origin.open(p, innermost(cursor), replace(self._kit, contents=held))
        stage = open_stages(self.steps, cursor, self._kit.context, lambda _: source)
        return cursor, source, stage, adopted is not None


class Finished:
    """Stands for a source that is not read, of which only the counters are of interest."""

    def __init__(self, cursor: Cursor, counters: Sequence[tuple[str, int]] = ()) -> None:
        self._cursor = cursor
        self._counters = counters

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def cursor(self) -> Cursor:
        return self._cursor

    def identity(self) -> tuple[Any, ...]:
        return "", *self._cursor

    def ref(self) -> Ref:
        raise LookupError("a finished partition has no current sample")

    def again(self, identities: Sequence[tuple[Any, ...]]) -> Finished:  # noqa: ARG002  (the protocol's)
        return self

    def ref_of(self, identity: tuple[Any, ...]) -> Ref:  # noqa: ARG002  (the protocol's)
        return self.ref()

    def counters(self) -> Iterator[tuple[str, int]]:
        return iter(self._counters)


def dropped(
    finished: Callable[[Cursor], SourceStage],
    steps: Sequence[Step],
    context: StepContext,
    states: Iterable[PartitionState],
) -> dict[str, int]:
    """What the steps had dropped, by step, in partitions that stand so: cursors carry it."""
    total: Counter[str] = Counter()
    for state in states:
        total.update(dict(open_stages(steps, state.cursor, context, finished).counters()))
    return dict(total)


Run = PartitionRun | PlainRun | LazyRun


class Iteration:
    """The partitions of one reader from a given state on. Iterate it once; `close` it when done.

    lent: a loader reads it ahead of what it hands out, and says by `acknowledge` what that is.
    """

    def __init__(
        self,
        origin: Origin,
        steps: Sequence[Step],
        context: StepContext,
        live: Mapping[int, PartitionState],
        carried: Mapping[int, PartitionState],
        *,
        budget: int,
        keep: bool,
        contents: Mapping[int, Contents],
        lent: bool = False,
        report: Callable[[Iteration], None] | None = None,
    ) -> None:
        self.carried = dict(carried)
        self.exhausted = False
        self._finished_counters = dropped(origin.finished, steps, context, carried.values())
        self._keep = keep
        self._pools = Pools(len(live))
        context = replace(context, pools=self._pools)
        tell = None if report is None else partial(report, self)
        self._ahead = ReadAhead(budget, max(1, len(live) * origin.stripes), tell)
        self._reading = Reading(origin, steps, Kit(self._ahead, context, keep), contents)
        kind = PartitionRun if steps else PlainRun if isinstance(origin, Plain) else LazyRun
        self.runs = [kind(p, state, self._reading, forgets=keep and not lent) for p, state in live.items()]
        self._by_partition = {run.p: run for run in self.runs}
        self._rotation = Rotation(self.runs)

    def open(self) -> Rotation[Run]:
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
            self._by_partition[p].source.forget(innermost(cursor), self._reading.needed(cursor))

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
