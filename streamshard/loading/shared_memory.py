"""Memory that two processes see: anonymous files, so that no crash leaves a name in /dev/shm or /tmp behind.

A memfd counts as shared memory but not against the size of /dev/shm, which is 64 MB in many containers.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

from streamshard.staging.buffers import copy, shaped, size_of

_ALIGN = 64  # a cache line
_LEAST = 1 << 20


def anonymous_file() -> int:
    """A descriptor of a new file in memory (on Linux) that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("streamshard", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Segment:
    """One such file, mapped here. One process writes into it with `empty` and `place`, the other reads with `view`.

    Takes over the descriptor. It grows as needed and never shrinks. Not thread-safe.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._offsets: dict[int, int] = {}  # address of a tensor given out -> its offset

    @property
    def size(self) -> int:
        """Bytes mapped."""
        return self._memory.numel()

    def begin(self) -> None:
        """The other side is done with what was written."""
        self._used = 0
        self._offsets = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the segment, its contents undefined."""
        offset = self._used
        end = offset + size_of(shape, dtype)
        if end > self.size:
            self._grow(end)
        self._used = -(-end // _ALIGN) * _ALIGN
        tensor = shaped(self._memory[offset:], shape, dtype)
        self._offsets[tensor.data_ptr()] = offset
        return tensor

    def place(self, tensor: torch.Tensor) -> int:
        """The offset of `tensor` in the segment: it is copied in unless `empty` gave it."""
        shape = tuple(tensor.shape)
        offset = self._offsets.get(tensor.data_ptr()) if tensor.numel() and tensor.is_contiguous() else None
        if offset is None:
            offset = self._used
            copy(self.empty(shape, tensor.dtype), tensor)
        return offset

    def written(self) -> torch.Tensor:
        """All of it that was given out since `begin`, as bytes."""
        return self._memory[: self._used]

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> torch.Tensor:
        """What the other side placed at `offset` when the segment had `size` bytes."""
        if size > self.size:
            self._map(size)
        return shaped(self._memory[offset:], shape, dtype)

    def _grow(self, needed: int) -> None:
        size = max(_LEAST, 2 * self.size, -(-needed // _LEAST) * _LEAST)
        os.ftruncate(self._descriptor, size)
        self._map(size)  # tensors given out before keep the old mapping of the same pages

    def _map(self, size: int) -> None:
        self._memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)

    def close(self) -> None:
        """Let go of the file; tensors given out keep their mapping."""
        os.close(self._descriptor)
