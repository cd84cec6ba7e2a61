"""Reading the body of an answer piece by piece, so that a stall is noticed and nothing that arrived is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

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
) -> bytes:
    """Exactly `size` bytes out of `next_piece`, which returns b"" at the end.

    Raises `StorageFault` carrying what had been received: the body was cut, broke, stalled, or ran below the floor.
    """
    now = asyncio.get_running_loop().time
    meter = Meter(policy.floor_bytes_s, policy.stall_s, now())
    pieces: list[bytes] = []
    try:
        async with asyncio.timeout_at(meter.arrived(0, now())) as limit:
            while piece := await next_piece():
                pieces.append(piece)
                limit.reschedule(meter.arrived(len(piece), now()))
    except TimeoutError:
        fault = StorageFault(
            TIMEOUT,
            f"the answer came at less than {policy.floor_bytes_s:.0f} bytes/s for {policy.stall_s:g} s "
            f"({meter.received} of {size} bytes)",
        )
    except Exception as error:  # noqa: BLE001  (libraries' errors have no common base; translate knows them)
        fault = translate(error)
    else:
        if meter.received == size:
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        kind = "cut short" if meter.received < size else "too long"
        fault = StorageFault(CORRUPT, f"the answer was {kind}: {meter.received} of {size} bytes")
    fault.received, fault.tag = b"".join(pieces)[:size] if fault.kind != CORRUPT else b"", tag
    raise fault
