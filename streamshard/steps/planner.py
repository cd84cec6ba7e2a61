"""Which pieces share a row: best-fit-decreasing over a window. Pure: lengths come in, rows of indices go out.

Longest first, each piece goes into the fullest row that still has room for it. All that is emitted of a window are its fullest
rows; the pieces of the others are carried and planned again together with the next window, so that no row has to be closed half
empty because its window ended (docs/packing.md has the figures).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from streamshard.order.balance import dealt

_PLACE = 32  # bits for a row's number below its free room: one int sorts by room, then by age of the row


def best_fit(lengths: Sequence[int], capacity: int, most: int | None = None) -> list[list[int]]:
    """Rows of at most `capacity`, as lists of indices into `lengths`, which are taken in the order given.

    Each piece goes into the row with the least room that suffices, of equal ones the oldest; or into a new one. At most `most`
    pieces a row. Costs about a microsecond a piece.
    """
    rows: list[list[int]] = []
    room: list[int] = []  # free room << 32 | row, ascending; full rows have left it
    for index, length in enumerate(lengths):
        place = bisect_left(room, length << _PLACE)
        if place == len(room):
            row, free = len(rows), capacity - length
            rows.append([index])
        else:
            entry = room.pop(place)
            row = entry & ((1 << _PLACE) - 1)
            free = (entry >> _PLACE) - length
            rows[row].append(index)
        if free and len(rows[row]) != most:
            insort(room, free << _PLACE | row)
    return rows


def balanced(costs: Sequence[int], size: int) -> list[int]:
    """An order of rows in which each `size` of them cost about the same together; what is over comes last.

    Within a group rows keep their order.
    """
    groups = len(costs) // size
    # The cheapest rows are left over: the groups of dearer ones can be balanced, and so can the next window's.
    by_cost = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    chosen, over = sorted(by_cost[: groups * size]), sorted(by_cost[groups * size :])
    hands = dealt([costs[row] for row in chosen], [1] * len(chosen), groups, size)
    assert hands is not None  # there is room for exactly these
    return [chosen[place] for hand in hands for place in hand] + over
