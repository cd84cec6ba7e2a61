"""Things dealt out so that every hand costs the same. Pure.

The dearest thing goes to the hand that has cost least so far and still has room, and so on down (longest processing time first;
Graham 1969: at most 4/3 of the best possible, and far closer for many things a hand).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np


def dealt(costs: Sequence[int], sizes: Sequence[int], hands: int, room: int) -> list[list[int]] | None:
    """Places of things for each hand, ascending, whose sizes add up to at most `room`; None if they do not all fit this way."""
    found: list[list[int]] = [[] for _ in range(hands)]
    left = [room] * hands
    queue = [(0, hand) for hand in range(hands)]  # cost so far
    heapify(queue)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        size, full = sizes[place], []
        while queue and left[queue[0][1]] < size:
            full.append(heappop(queue))
        if not queue:
            return None
        cost, hand = heappop(queue)
        found[hand].append(place)
        left[hand] -= size
        heappush(queue, (cost + costs[place], hand))
        for entry in full:  # they may have room for a smaller one
            heappush(queue, entry)
    return [sorted(places) for places in found]


def next_step(lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """A global step: the longest run of items from the first one on that can be dealt out to ranks, at most `budget` tokens
    each, and how: places in `lengths` for each rank. An item costs the square of its length, as attention does.

    Every length is at most `budget`, so that at least one item goes.
    """
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    count = int(np.searchsorted(ends, ranks * budget, side="right"))
    costs = [length * length for length in lengths[:count]]
    while True:
        found = dealt(costs[:count], lengths[:count], ranks, budget)
        if found is not None:
            return found
        count -= 1
