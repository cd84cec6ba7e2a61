"""Reading the body of an answer piece by piece, so that a stall is noticed and nothing that arrived is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from streamshard.storage.fault import CORRUPT, TIMEOUT, StorageFault
from streamshard.storage.policy import StoragePolicy

PIECE = 64 << 10  # bytes asked of a body at a time; at the floor of 16 KiB/s one arrives every four seconds


class Meter:
    """When a body is too slow. Pure: time comes in as an argument.

    A window begins with the body. Bytes that keep up with the floor over `stall` seconds begin the next one; a window that
    ends first ends the body. No bytes at all for `stall` seconds is the same thing sooner.
    """

    def __init__(self, floor: float, stall: float, now: float) -> None:
        self._goal = floor * stall
        self._stall = stall
        self._base = self.received = 0
        self._ends = now + stall

    def arrived(self, count: int, now: float) -> float:
        """Count bytes; returns the time at which the body is to be given up unless more has come."""
        self.received += count
        if self.received - self._base >= self._goal:
            self._base, self._ends = self.received, now + self._stall
        return self._ends


async def collect(
    next_piece: Callable[[], Awaitable[bytes]],
    size: int,
    policy: StoragePolicy,
    tag: str,
    translate: Callable[[Exception], StorageFault],
) -> memoryview:
    """Exactly `size` bytes out of `next_piece`, which returns b"" at the end.

    Raises `StorageFault` carrying what had been received: the body was cut, broke, stalled, or ran below the floor.
    """
    now = asyncio.get_running_loop().time
    meter = Meter(policy.floor_bytes_s, policy.stall_s, now())
    # One buffer of the right size: pieces kept and joined would need the memory twice, and leave the heap in pieces too.
    buffer = np.empty(size, np.uint8).data
    have = 0
    try:
        async with asyncio.timeout_at(meter.arrived(0, now())) as limit:
            while piece := await next_piece():
                stop = have + len(piece)
                if stop > size:
                    raise StorageFault(CORRUPT, f"the answer was too long: more than {size} bytes")
                buffer[have:stop] = piece
                have = stop
                limit.reschedule(meter.arrived(len(piece), now()))
    except TimeoutError:
        fault = StorageFault(
            TIMEOUT,
            f"the answer came at less than {policy.floor_bytes_s:.0f} bytes/s for {policy.stall_s:g} s "
            f"({have} of {size} bytes)",
        )
    except Exception as error:  # noqa: BLE001  (libraries' errors have no common base; translate knows them)
        fault = translate(error)
    else:
        if have == size:
            return buffer
        fault = StorageFault(CORRUPT, f"the answer was cut short: {have} of {size} bytes")
    if fault.kind != CORRUPT:
        fault.received, fault.tag = bytes(buffer[:have]), tag
    raise fault
