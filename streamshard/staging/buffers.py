"""Memory that is used again for batch after batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


class Buffers:
    """Tensors for the leaves of one batch at a time, always in the same order and out of the same memory.

    Leaf i of every batch lies at the same address, unless it outgrows what is there. allocate: bytes -> uint8 tensor.
    Not thread-safe: whoever holds the batch holds its buffers.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._memory: list[torch.Tensor] = []
        self._next = 0

    def begin(self) -> None:
        """The next batch: whatever is in the buffers may be overwritten."""
        self._next = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor for the next leaf, its contents undefined."""
        size = math.prod(shape) * dtype.itemsize
        place, self._next = self._next, self._next + 1
        if place == len(self._memory):
            self._memory.append(self._allocate(size))
        elif self._memory[place].numel() < size:
            self._memory[place] = self._allocate(size)
        return self._memory[place][:size].view(dtype).view(shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in these buffers."""
        start = tensor.untyped_storage().data_ptr()
        return any(memory.untyped_storage().data_ptr() == start for memory in self._memory)
