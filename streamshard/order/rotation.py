"""Whose turn it is, and who owns what: the two rules that make the order independent of ranks and workers.

A partition's *turn* is the number of items it has emitted; the slot of its next item is ``turn * P + p``. Whoever holds
a set of partitions always takes next the live one with the least (turn, p). The global order is the order of slots, so
any split of the partitions over readers that follows this rule delivers the same sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, Protocol

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


def rotate(runs: Collection[Turning]) -> Iterator[Any]:
    """Items of `runs` in slot order until all are exhausted.

    Within one pass every run with the least turn gives one item, in order of p. Once all turns are equal they stay
    equal, so the common case is a plain loop over the live runs without any comparison.
    """
    live = sorted(runs, key=lambda run: run.p)
    while len(live) > 1:
        least = min(run.turn for run in live)
        behind = [run for run in live if run.turn == least]
        takes = [run.items for run in behind]
        ended: list[Any] = []
        while True:
            for items in takes:
                item = next(items, _END)
                if item is _END:
                    ended.append(items)
                else:
                    yield item
            if ended or len(behind) < len(live):
                break
        live = [run for run in live if run.items not in ended]
    for run in live:
        yield from run.items
