"""Memory that is used again for batch after batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Protocol

import numpy as np
import torch


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has come to it."""


class Buffers:
    """Tensors for the leaves of one batch at a time, each leaf in the same memory every time.

    allocate: bytes -> uint8 tensor. A leaf that outgrows its memory gets new memory, unless `on_growth` is given, which is
    then called with (key, bytes there, bytes needed) and is expected to raise. `busy`: whoever still reads them; wait for it
    before `begin`. Not thread-safe: who holds the batch holds its buffers.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        on_growth: Callable[[Hashable, int, int], None] | None = None,
    ) -> None:
        self.busy: Event | None = None
        self._allocate = allocate
        self._on_growth = on_growth
        self._memory: dict[Hashable, torch.Tensor] = {}
        self._next = 0

    def begin(self) -> None:
        """The next batch: wait until nobody reads the last one, whose memory may then be overwritten."""
        if self.busy is not None:
            self.busy.synchronize()
            self.busy = None
        self._next = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor for the next leaf in order, its contents undefined."""
        self._next += 1
        return self.take(self._next, shape, dtype)

    def take(self, key: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor for the leaf `key`, its contents undefined."""
        size = size_of(shape, dtype)
        memory = self._memory.get(key)
        if memory is not None and memory.numel() < size and self._on_growth is not None:
            self._on_growth(key, memory.numel(), size)
        if memory is None or memory.numel() < size:
            room = size if memory is None else max(size, memory.numel() * 3 // 2)  # not anew for every row more
            memory = self._memory[key] = self._allocate(room)
        return shaped(memory, shape, dtype)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors of one shape in host memory.

    Not with torch where bytes are all that is to move: torch divides a copy of 64 KB and more among threads that then spin for
    a while, which costs the training loop more than it gains here.
    """
    if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        if target.numel():
            np.copyto(_bytes(target), _bytes(source))
    else:
        target.copy_(source)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def size_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def shaped(memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The beginning of `memory`, bytes, as a tensor."""
    return memory[: size_of(shape, dtype)].view(dtype).view(shape)
