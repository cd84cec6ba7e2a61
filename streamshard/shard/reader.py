"""Blocks of a shard into samples, and which bytes hold which rows. Pure functions of values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from streamshard.errors import CorruptError, DataError
from streamshard.shard.compression import decompress_into, digest64
from streamshard.shard.layout import ShardIndex
from streamshard.shard.records import BLOCK_PREFIX, Sample, unpack_block


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


def decode_block(
    index: ShardIndex, block: int, frame: bytes | memoryview, buffer: bytearray, inflated: memoryview | None = None
) -> list[Sample]:
    """All samples of block `block`, out of its compressed bytes; every check of the format before anything is trusted.

    `buffer` is scratch memory, grown to the largest block and free again on return. `inflated` is what `frame` has been
    decompressed to, if somebody has done so. Raises `DataError` naming the block, as
    `CorruptError` if the bytes are not the ones that were written.
    """
    found = digest64(frame)
    expected = int(index.hashes[block])
    size = BLOCK_PREFIX + int(index.uncompressed[block])
    try:
        if len(frame) != int(index.compressed[block]) or found != expected:
            raise CorruptError(
                f"its {len(frame)} bytes have hash {found:016x} where the index has {index.compressed[block]} bytes "
                f"with {expected:016x}: the object is damaged or was replaced"
            )
        if len(buffer) < size:
            buffer.extend(bytes(size - len(buffer)))
        with memoryview(buffer)[:size] as prefixed:
            with prefixed[BLOCK_PREFIX:] as target:
                if inflated is None:
                    decompress_into(frame, target)
                else:
                    target[:] = inflated
            return unpack_block(prefixed, int(index.samples[block]))
    except DataError as error:
        end = int(index.row_ends[block])
        raise type(error)(f"block {block} (rows {end - int(index.samples[block])} to {end - 1}): {error}") from error
