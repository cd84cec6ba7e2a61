"""One iteration of a loader: its source, the thread that reads it, the staging, and the position of what was handed out."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from streamshard.iteration import Mark
from streamshard.loading.formed import Formed, Source
from streamshard.loading.handover import Handover
from streamshard.loading.position import Position
from streamshard.loading.producer import JOIN_S, Direct, Producer, Ready
from streamshard.staging.buffers import Buffers
from streamshard.staging.device import Device
from streamshard.staging.stager import Slot, Stager
from streamshard.staging.tree import map_tensors

_running: weakref.WeakSet[Run] = weakref.WeakSet()


class BufferPool:
    """`count` sets of host buffers that batches are collated into, each used again when its batch has been copied."""

    def __init__(self, device: Device, count: int) -> None:
        self._free: SimpleQueue[Buffers | None] = SimpleQueue()
        for _ in range(count):
            self._free.put(Buffers(device.host))

    def next(self) -> Buffers | None:
        """Buffers for the next batch, begun, waiting for them; None when the run is closed."""
        buffers = self._free.get()
        if buffers is not None:
            buffers.begin()
        return buffers

    def give_back(self, buffers: Buffers) -> None:
        """They are to be used again, once their `busy` is over."""
        self._free.put(buffers)

    def close(self) -> None:
        """Whoever waits goes on without."""
        self._free.put(None)


def no_buffers() -> None:
    """Each batch in memory of its own."""


@dataclass(frozen=True)
class Staging:
    """Where batches are moved to. `pool` has the buffers that they are collated into, if they are collated here."""

    device: Device
    slots: Sequence[Slot]
    dtypes: Mapping[str, torch.dtype]
    pool: BufferPool | None


class Run:
    """A source being read, `prefetch` batches ahead (0: when they are asked for). `take` and `close` are for the thread of
    the training loop.

    pin: hand out pinned host memory.
    """

    def __init__(
        self, source: Source, position: Position, prefetch: int, staging: Staging | None = None, *, pin: bool = False
    ) -> None:
        self.position = position
        self._source = source
        finish = _pin if pin else None
        self._producer = Producer(source, prefetch, finish) if prefetch else Direct(source, finish)
        self._ready: Ready = self._producer.ready
        self._take = self._ready.take
        self._stager: Stager[Formed] | None = None
        self._pool: BufferPool | None = None
        self._closed = False
        self._pid = os.getpid()
        if staging is not None:
            self._pool = staging.pool
            staged: Handover[Formed] = Handover(len(staging.slots) + 1)
            self._ready = staged
            give_back = _forget if staging.pool is None else staging.pool.give_back
            self._stager = Stager(
                self._take, staging.device, staged, give_back, slots=staging.slots, dtypes=staging.dtypes
            )
            self._take = self._stager.take
        _running.add(self)

    def start(self) -> None:
        """Begin to read ahead."""
        self._producer.start()

    def take(self) -> Formed | None:
        """The next batch; None at the end or when closed."""
        return self._take()

    def acknowledge(self, marks: Mapping[int, Mark]) -> None:
        """`marks` became part of the state."""
        self._source.acknowledge(marks)

    def contents(self) -> dict[str, bytes]:
        """What a resume need not read again."""
        return self._source.contents()

    def waited(self) -> tuple[int, float]:
        """How often, and how many seconds in all, a batch was waited for."""
        return self._ready.waits, self._ready.waited_s

    def close(self) -> None:
        """End the threads; may be called again."""
        if self._closed or self._pid != os.getpid():  # a forked child has no such threads
            return
        self._closed = True
        if self._stager is not None:
            self._stager.stop()
        if self._pool is not None:
            self._pool.close()
        self._producer.close()
        if self._stager is not None:
            self._stager.join(JOIN_S)


@atexit.register
def _close_all() -> None:
    """Threads end before the interpreter does: one that is killed inside native code would take the process down."""
    for run in list(_running):
        run.close()


def _forget(_: Buffers) -> None:
    """Buffers of a run that uses none again."""


def _pin(formed: Formed) -> None:
    formed.batch = map_tensors(formed.batch, lambda _, tensor: _pinned(tensor))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and tensor.layout == torch.strided else tensor


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """New pinned memory; torch keeps what is freed for the next batch."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)
