"""Blocks of a shard into samples, and which blocks hold which rows. No I/O: bytes come in, samples go out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from streamshard.errors import DataError
from streamshard.shard.compression import MAX_BLOCK_BYTES, decompress_into, digest64
from streamshard.shard.layout import ShardIndex
from streamshard.shard.records import BlockUnpacker, Sample


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows [first, last) of one block, `first` counted from the start of the block."""

    block: int
    first: int
    last: int


def locate_rows(index: ShardIndex, start: int, stop: int) -> Iterator[BlockRows]:
    """The pieces of blocks that hold rows [start, stop) of the shard, in order."""
    ends = index.row_ends
    block = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        end = int(ends[block])
        begin = end - int(index.samples[block])
        upto = min(stop, end)
        yield BlockRows(block, start - begin, upto - begin)
        start, block = upto, block + 1


class BlockReader:
    """Delivers rows of blocks out of their compressed bytes. Made once per stream and used again; not thread-safe.

    Every check of the format comes before anything is trusted: the bytes against their hash, zstd's header against the
    index, and after the last row the end of the data against the end of the block. Raises `DataError` naming block and rows.
    `scratch` is memory for one decompressed block; readers used by one thread may share it.
    """

    def __init__(self, scratch: bytearray) -> None:
        self._scratch = scratch
        self._unpacker = BlockUnpacker(MAX_BLOCK_BYTES)
        self._index: ShardIndex | None = None
        self._block = 0
        self._row = self._rows = 0

    def open(self, index: ShardIndex, block: int, frame: bytes | memoryview) -> None:
        """Begin with block `block`. The one before is left behind, wherever it stands."""
        if self._row < self._rows:
            self._unpacker = BlockUnpacker(MAX_BLOCK_BYTES)
        self._index, self._block = index, block
        self._row, self._rows = 0, int(index.samples[block])
        try:
            self._decompress(index, frame)
        except DataError as error:
            raise self._named(error) from error

    def _decompress(self, index: ShardIndex, frame: bytes | memoryview) -> None:
        found, expected = digest64(frame), int(index.hashes[self._block])
        if len(frame) != int(index.compressed[self._block]) or found != expected:
            raise DataError(
                f"its {len(frame)} bytes have hash {found:016x} where the index has {index.compressed[self._block]} bytes "
                f"with {expected:016x}: the object is damaged or was replaced"
            )
        size = int(index.uncompressed[self._block])
        if len(self._scratch) < size <= MAX_BLOCK_BYTES:
            self._scratch.extend(bytes(size - len(self._scratch)))
        with memoryview(self._scratch)[:size] as plain:
            decompress_into(frame, plain)
            self._unpacker.feed(plain)

    def rows(self, first: int, last: int) -> list[Sample]:
        """Rows [first, last) of the open block; `first` is not before the end of the rows taken earlier."""
        try:
            if first > self._row:
                self._unpacker.skip(first - self._row)
            samples = self._unpacker.take(last - first)
            self._row = last
            if last == self._rows:
                self._unpacker.finish()
        except DataError as error:
            raise self._named(error) from error
        return samples

    def _named(self, error: DataError) -> DataError:
        assert self._index is not None  # only called with a block open
        end = int(self._index.row_ends[self._block])
        return DataError(f"block {self._block} (rows {end - self._rows} to {end - 1}): {error}")
