"""Whose turn it is, and who owns what: the two rules that make the order independent of ranks and workers.

A partition's *turn* is the number of items it has emitted; the slot of its next item is ``turn * P + p``. Whoever holds
a set of partitions always takes next the live one with the least (turn, p). The global order is the order of slots, so
any split of the partitions over readers that follows this rule delivers the same sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import lcm
from typing import Any, Generic, Protocol, TypeVar

from streamshard.errors import UsageError

_END = object()


class Turning(Protocol):
    """A partition that is being read: `items` yields, and `turn` counts what was yielded."""

    @property
    def p(self) -> int: ...
    @property
    def turn(self) -> int: ...
    @property
    def items(self) -> Iterator[Any]: ...


@dataclass(frozen=True, slots=True)
class Reader:
    """One place where samples are read: worker `worker` of `workers` in rank `rank` of `ranks`."""

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    @property
    def readers(self) -> int:
        """R x workers, the number of places over which partitions are divided."""
        return self.ranks * self.workers


def resolve_partitions(asked: int | None, reader: Reader, *, shuffle: bool) -> int:
    """The number of partitions for a first start, refused unless the readers divide it.

    The default lcm(16, R x workers) leaves room to change the number of readers later; in file order
    (``shuffle=False``) more partitions than readers would only interleave the file.
    """
    readers = reader.readers
    parts = asked if asked is not None else (lcm(16, readers) if shuffle else readers)
    check_divides(parts, reader)
    return parts


def check_divides(parts: int, reader: Reader) -> None:
    """Refuse readers that cannot share the partitions evenly."""
    if parts % reader.readers:
        raise UsageError(
            f"partitions={parts} cannot be divided among {reader.ranks} ranks x {reader.workers} workers = "
            f"{reader.readers} readers; for a new run pass partitions={lcm(parts, reader.readers)}"
            f" (or any multiple of {reader.readers}), for a resumed one choose "
            f"ranks x workers out of {divisors(parts)}"
        )


def divisors(number: int) -> str:
    """The divisors of `number` as text, for messages: the first eight and the last."""
    found = [d for d in range(1, number + 1) if number % d == 0]
    shown = [str(d) for d in found]
    return ", ".join(shown if len(shown) <= 9 else [*shown[:8], "...", shown[-1]])


def slot_order(turns: Mapping[int, int], parts: int) -> list[int]:
    """Partitions by the slot of their next item."""
    return sorted(turns, key=lambda p: turns[p] * parts + p)


def owned(turns: Mapping[int, int], done: Collection[int], parts: int, reader: Reader) -> tuple[list[int], list[int]]:
    """(live, finished) partitions of `reader` when an iteration starts from a full state.

    Live partitions are dealt out by their place in slot order, first to ranks and then to the rank's workers. Finished
    ones are carried unchanged by a fixed holder, so that a merged state stays complete.
    """
    live = slot_order({p: turn for p, turn in turns.items() if p not in done}, parts)
    mine = live[reader.rank :: reader.ranks][reader.worker :: reader.workers]
    carried = [p for p in sorted(done) if carrier(p, reader) == (reader.rank, reader.worker)]
    return mine, carried


def carrier(p: int, reader: Reader) -> tuple[int, int]:
    """(rank, worker) that carries the finished partition `p`."""
    return p % reader.ranks, (p // reader.ranks) % reader.workers


def raggedness(turns: Mapping[int, int], done: Collection[int], parts: int) -> int:
    """By how many items live partitions are ahead of the least slot: 0 at an aligned moment.

    Ranks saved at different steps give a ragged state. It resumes exactly once; the partitions that are ahead wait for the
    others, so the order differs from an uninterrupted run's until they have caught up.
    """
    live = {p: turn for p, turn in turns.items() if p not in done}
    least = min((turn * parts + p for p, turn in live.items()), default=0)
    return sum(turn + (p - least) // parts for p, turn in live.items())


Run = TypeVar("Run", bound=Turning)


class Rotation(Generic[Run]):
    """Items of `runs` in slot order until all are exhausted: one at a time by iterating, or many at a time with `take`.

    Within one pass every run with the least turn gives one item, in order of p. Once all turns are equal they stay
    equal, so the common case is a plain walk over the live runs without any comparison. Use one way or the other, in
    one thread.
    """

    def __init__(self, runs: Collection[Run]) -> None:
        self.stopped = False  # set from any thread: `take` ends early, and what it has so far is of no use
        self._live = sorted(runs, key=lambda run: run.p)
        self._pass: list[Run] = []  # the runs whose turn it is
        self._takes: list[Iterator[Any]] = []  # their items
        self._place = 0  # how far the pass has come
        self._turn = -1  # the turn that the pass gives
        self._ended: list[Run] = []

    def __iter__(self) -> Iterator[Any]:
        while self._next_pass():
            if len(self._live) == 1:
                yield from self._takes[0]
                self._ended = self._live
                continue
            for place, items in enumerate(self._takes):
                item = next(items, _END)
                if item is _END:
                    self._ended.append(self._pass[place])
                else:
                    yield item

    def take(self, count: int) -> tuple[list[Any], list[Run]]:
        """(items, runs that changed): the next `count` items, fewer only when all runs are exhausted."""
        items: list[Any] = []
        changed: list[Run] = []
        while len(items) < count and not self.stopped:
            if len(self._live) == 1 and self._pass == self._live and not self._ended:
                run = self._live[0]
                got = list(islice(run.items, count - len(items)))
                if len(got) < count - len(items):
                    self._ended, self._place = self._live, 1
                runs = [run]
            else:
                got, _, runs = self.step(count - len(items))
            if not runs:
                break
            items += got
            changed += runs
        return items, changed

    def step(self, count: int) -> tuple[list[Any], int, list[Run]]:
        """(items, turn, runs): at most `count` items of one pass, so that none of the runs gives two.

        The first runs gave the items, in this order and in that turn, so that the slot of an item of run p is
        ``turn * P + p``. One more may have found its end. No runs: all are exhausted.
        """
        if self._place >= len(self._pass) and not self._next_pass():
            return [], -1, []
        start = self._place
        got = list(map(next, self._takes[start : start + count]))  # ends where a run ends
        self._place += len(got)
        if len(got) < count and self._place < len(self._pass):
            self._ended.append(self._pass[self._place])
            self._place += 1
        return got, self._turn, self._pass[start : self._place]

    def _next_pass(self) -> bool:
        if not self._ended and self._pass and len(self._pass) == len(self._live):
            self._turn += 1  # all gave one: the same again
        else:
            self._live = [run for run in self._live if run not in self._ended]
            self._ended = []
            self._turn = min((run.turn for run in self._live), default=-1)
            self._pass = [run for run in self._live if run.turn == self._turn]
            self._takes = [run.items for run in self._pass]
        self._place = 0
        return bool(self._pass)
