"""One iteration of a loader: its source, the thread that reads it, the staging, and the position of what was handed out."""

from __future__ import annotations

from collections.abc import Mapping
from queue import SimpleQueue

import torch

from streamshard.loading.formed import Formed, Source
from streamshard.loading.handover import Handover
from streamshard.loading.position import Position
from streamshard.loading.producer import JOIN_S, Producer
from streamshard.staging.buffers import Buffers
from streamshard.staging.device import Device
from streamshard.staging.stager import Stager
from streamshard.staging.tree import map_tensors


def no_buffers() -> None:
    """Each batch in memory of its own."""


class BufferPool:
    """`count` sets of host buffers that batches are collated into, each used again when its batch has been copied."""

    def __init__(self, device: Device, count: int) -> None:
        self._free: SimpleQueue[Buffers | None] = SimpleQueue()
        for _ in range(count):
            self._free.put(Buffers(device.host))

    def next(self) -> Buffers | None:
        """Buffers for the next batch, waiting for them; None when the run is closed."""
        return self._free.get()

    def give_back(self, buffers: Buffers) -> None:
        """They are to be used again, once their `busy` is over."""
        self._free.put(buffers)

    def close(self) -> None:
        """Whoever waits goes on without."""
        self._free.put(None)


class Run:
    """A source being read ahead. `take` and `close` are for the thread of the training loop."""

    def __init__(self, source: Source, position: Position, prefetch: int, *, pin: bool = False) -> None:
        self.position = position
        self._source = source
        self._producer = Producer(source, prefetch, _pin if pin else None)
        self._ready: Handover[Formed] = self._producer.ready
        self._stager: Stager[Formed] | None = None
        self._pool: BufferPool | None = None
        self._closed = False
        self.take = self._producer.ready.take

    def stage(
        self, device: Device, pool: BufferPool | None, *, slots: int, static: bool, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Hand out batches on `device` from now on. Called before the first is taken."""
        self._pool = pool
        self._ready = Handover(slots + 1)
        self._stager = Stager(
            self._producer.ready.take, device, self._ready, pool.give_back if pool is not None else _forget,
            slots=slots, static=static, dtypes=dtypes,
        )  # fmt: skip
        self.take = self._stager.take

    def acknowledge(self, marks: Mapping[int, tuple[int, bool, tuple[object, ...]]]) -> None:
        """`marks` became part of the state."""
        self._source.acknowledge(marks)

    def contents(self) -> dict[str, bytes]:
        """What a resume need not read again."""
        return self._source.contents({})

    def waited(self) -> tuple[int, float]:
        """How often, and how many seconds in all, a batch was waited for."""
        return self._ready.waits, self._ready.waited_s

    def close(self) -> None:
        """End the threads; may be called again."""
        if self._closed:
            return
        self._closed = True
        if self._stager is not None:
            self._stager.stop()
        if self._pool is not None:
            self._pool.close()
        self._producer.close()
        if self._stager is not None:
            self._stager.join(JOIN_S)


def _forget(_: Buffers) -> None:
    """Buffers of a run that uses none again."""


def _pin(formed: Formed) -> None:
    formed.batch = map_tensors(formed.batch, lambda _, tensor: tensor.pin_memory())


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """New pinned memory; torch keeps what is freed for the next batch."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)
