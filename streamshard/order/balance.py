"""Global steps whose ranks cost the same: consecutive items dealt out by their lengths. Pure, and the same on every rank.

The cost of an item is the square of its length, which attention costs. The dearest item goes to the rank that has cost least so
far and still has room, and so on down (longest processing time first; Graham 1969: at most 4/3 of the best possible, and far
closer for many items a rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np


def dealt(lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]] | None:
    """Places in `lengths` for each rank, at most `budget` tokens each; None if they do not all fit this way."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    room = [budget] * ranks
    queue = [(0, rank) for rank in range(ranks)]  # cost so far
    heapify(queue)
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        length, full = lengths[place], []
        while queue and room[queue[0][1]] < length:
            full.append(heappop(queue))
        if not queue:
            return None
        cost, rank = heappop(queue)
        found[rank].append(place)
        room[rank] -= length
        heappush(queue, (cost + length * length, rank))
        for entry in full:  # they may have room for a shorter one
            heappush(queue, entry)
    return [sorted(places) for places in found]


def next_step(lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """The longest run of items from the first one on that can be dealt out, and how: places in `lengths` for each rank.

    Every length is at most `budget`, so that at least one item goes.
    """
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    count = int(np.searchsorted(ends, ranks * budget, side="right"))
    while True:
        found = dealt(lengths[:count], ranks, budget)
        if found is not None:
            return found
        count -= 1
