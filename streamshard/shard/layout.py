"""The bytes around the blocks: skippable frames, the index and the seek table. Pure; docs/format.md is the specification.

    [skippable frame 0x184D2A50: index] [zstd frame: block 0] ... [skippable frame 0x184D2A5E: seek table]

The index comes first, so that one ranged GET can bring it with the first blocks. It pins every byte that is read
afterwards: sizes and XXH3-64 of each block's compressed bytes; its own size and digest are in the manifest.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import CorruptError, DataError
from streamshard.shard.compression import MAX_BLOCK_BYTES, compress, decompress, digest64
from streamshard.shard.records import pack, unpack
from streamshard.shard.schema import Schema

FORMAT_VERSION = 1
_INDEX_MAGIC = 0x184D2A50
_SEEK_MAGIC = 0x184D2A5E
_SEEKABLE_MAGIC = 0x8F92EAB1
_FRAME_HEADER = struct.Struct("<II")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ShardIndex:
    """What the index frame says: per block its samples, compressed and uncompressed size, and hash; and row lengths.

    Arrays have one entry per block; `lengths` (uint32, one per row) is None unless the dataset has a length field.
    """

    schema: Schema
    samples: Ints
    compressed: Ints
    uncompressed: Ints
    hashes: NDArray[np.uint64]
    lengths: NDArray[np.uint32] | None
    index_bytes: int

    @cached_property
    def row_ends(self) -> Ints:
        """Row number after the last row of each block."""
        return np.cumsum(self.samples)

    @cached_property
    def offsets(self) -> Ints:
        """Byte offset of each block in the shard, and after the last one: shape ``(blocks + 1,)``."""
        return self.index_bytes + np.concatenate([[0], np.cumsum(self.compressed)])

    @property
    def rows(self) -> int:
        """Samples in the shard."""
        return int(self.samples.sum())

    @property
    def shard_bytes(self) -> int:
        """Size of the finished object, seek table included."""
        return int(self.offsets[-1]) + seek_table_bytes(len(self.samples))


def encode_index(schema: Schema, blocks: list[tuple[int, int, int, int]], lengths: list[int] | None) -> bytes:
    """The index frame for `blocks` of (samples, compressed, uncompressed, hash)."""
    columns = list(zip(*blocks, strict=True)) or [(), (), (), ()]
    content: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "schema": schema,
        "samples": np.array(columns[0], "<u4").tobytes(),
        "compressed": np.array(columns[1], "<u4").tobytes(),
        "uncompressed": np.array(columns[2], "<u4").tobytes(),
        "hashes": np.array(columns[3], "<u8").tobytes(),
    }
    if lengths is not None:
        content["lengths"] = compress(np.array(lengths, "<u4").tobytes())
    return skippable(_INDEX_MAGIC, pack(content))


def decode_index(frame: bytes | memoryview, *, size: int, digest: int, samples: int) -> ShardIndex:
    """The index out of its frame, checked against what the manifest says of it.

    Raises `CorruptError` when `size` or `digest` do not fit, `DataError` when the format version or the counts do not.
    """
    if len(frame) != size or digest64(frame) != digest:
        raise CorruptError(
            f"the index frame ({len(frame)} bytes, digest {digest64(frame):016x}) is not the one the manifest pins "
            f"({size} bytes, digest {digest:016x})"
        )
    content = _index_content(frame)
    try:
        index = ShardIndex(
            schema=content["schema"],
            samples=np.frombuffer(content["samples"], "<u4").astype(np.int64),
            compressed=np.frombuffer(content["compressed"], "<u4").astype(np.int64),
            uncompressed=np.frombuffer(content["uncompressed"], "<u4").astype(np.int64),
            hashes=np.frombuffer(content["hashes"], "<u8"),
            lengths=_lengths(content.get("lengths"), samples),
            index_bytes=size,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the index lacks or garbles a column ({type(error).__name__}: {error})") from error
    _check_index(index, samples)
    return index


def _index_content(frame: bytes | memoryview) -> dict[str, Any]:
    magic, length = _FRAME_HEADER.unpack_from(frame) if len(frame) >= 8 else (0, 0)
    if magic != _INDEX_MAGIC or length != len(frame) - 8:
        raise DataError(f"the shard begins with magic {magic:#x} where an index frame has {_INDEX_MAGIC:#x}")
    content = unpack(bytes(frame[8:]))
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"the shard has format version {version}, this package reads {FORMAT_VERSION}; upgrade it")
    checked: dict[str, Any] = content
    return checked


def _lengths(packed: bytes | None, samples: int) -> NDArray[np.uint32] | None:
    if packed is None:
        return None
    return np.frombuffer(decompress(packed, 4 * samples), "<u4")


def _check_index(index: ShardIndex, samples: int) -> None:
    if len({len(index.samples), len(index.compressed), len(index.uncompressed), len(index.hashes)}) != 1:
        raise DataError("the index's columns have different numbers of blocks")
    if index.rows != samples:
        raise DataError(f"the index counts {index.rows} samples where the manifest says {samples}")
    if len(index.samples) and int(index.uncompressed.max()) > MAX_BLOCK_BYTES:
        raise DataError(f"the index claims a block of {index.uncompressed.max()} bytes, above {MAX_BLOCK_BYTES}")
    if (index.samples > index.uncompressed).any():
        raise DataError("the index claims more samples than a block has bytes")


def skippable(magic: int, content: bytes) -> bytes:
    """A zstd skippable frame, which every zstd decoder passes over."""
    return _FRAME_HEADER.pack(magic, len(content)) + content


def seek_table_bytes(blocks: int) -> int:
    """Size of the seek table frame of a shard with `blocks` blocks."""
    return 8 + 8 * (blocks + 1) + 9


def encode_seek_table(index_bytes: int, blocks: list[tuple[int, int, int, int]]) -> bytes:
    """Zstd's seekable format, version 0.1.0: one entry per frame, the leading index frame with content size 0."""
    entries = [(index_bytes, 0), *((compressed, plain) for _, compressed, plain, _ in blocks)]
    content = b"".join(_FRAME_HEADER.pack(*entry) for entry in entries)
    footer = struct.pack("<IBI", len(entries), 0, _SEEKABLE_MAGIC)
    return skippable(_SEEK_MAGIC, content + footer)
