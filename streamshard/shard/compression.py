"""zstd, and nothing else of it than one frame in and one frame out. The only file that imports ``zstandard``.

Two traps of the library decide how it is used. Its one-shot ``decompress`` ignores ``max_output_size`` whenever the
frame header states a size, so the header is compared with the index *before* decoding. Its stream readers return partial
data for a truncated frame without an error, so what was filled is compared with the index *after* decoding.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import xxhash
import zstandard

from streamshard.errors import DataError

MAX_BLOCK_BYTES = 1 << 30  # a block above this is refused unread: the writer's own limit is far below

DECOMPRESSES_MANY = hasattr(zstandard.ZstdDecompressor, "multi_decompress_to_buffer")  # not with the cffi backend

_local = threading.local()  # a (de)compressor keeps a context and must not be used by two threads at once


def digest64(data: bytes | memoryview) -> int:
    """XXH3-64 of `data`: fast enough (about 10 GB/s) to check every block that is read."""
    return xxhash.xxh3_64_intdigest(data)


def compress(data: bytes, level: int = 3) -> bytes:
    """One frame with content size and checksum.

    The checksum costs about 9 % of decoding speed; without it most single-bit flips decode to wrong data silently in
    tools that know nothing of our index.
    """
    compressors = _local.__dict__.setdefault("compressors", {})
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    frame: bytes = compressors[level].compress(data)
    return frame


def decompress(frame: bytes | memoryview, size: int) -> bytes:
    """The content of one frame that must hold exactly `size` bytes. Raises `DataError` otherwise."""
    content = bytearray(size)
    decompress_into(frame, memoryview(content))
    return bytes(content)


def decompress_into(frame: bytes | memoryview, target: memoryview) -> None:
    """Fill `target` with the content of one frame, which must fit exactly. Raises `DataError` otherwise.

    Into memory of the caller's, because fresh memory for every block costs more in page faults than decoding saves.
    """
    size = len(target)
    try:
        _check_declared(frame, size)
        with _decompressor().stream_reader(frame, read_size=len(frame)) as reader:
            filled = 0
            while filled < size and (got := reader.readinto(target[filled:])):
                filled += got
            beyond = reader.read(1)  # reads the frame's end as well: this is what verifies the checksum
    except (zstandard.ZstdError, MemoryError) as error:
        raise DataError(f"the zstd frame of {len(frame)} bytes does not decode ({error})") from error
    if filled != size or beyond:
        raise DataError(f"the zstd frame decodes to {filled}{'+' if beyond else ''} bytes where the index says {size}")


def decompress_many(frames: Sequence[memoryview], sizes: Sequence[int]) -> list[memoryview]:
    """The contents of frames that must hold exactly so many bytes, by one call that holds no lock of the interpreter.

    In new memory, where the contents of all lie together and live as long as any of them. Raises `DataError` if one of the
    frames does not fit or does not decode; it does not say which.
    """
    if not frames:
        return []
    try:
        for frame, size in zip(frames, sizes, strict=True):
            _check_declared(frame, size)
        packed = b"".join(size.to_bytes(8, sys.byteorder) for size in sizes)
        known: list[Any] = list(frames)
        found: Any = _decompressor().multi_decompress_to_buffer(known, decompressed_sizes=packed)
    except (zstandard.ZstdError, MemoryError, ValueError) as error:
        raise DataError(f"one of {len(frames)} zstd frames does not decode ({error})") from error
    return [memoryview(found[place]) for place in range(len(frames))]


def _check_declared(frame: bytes | memoryview, size: int) -> None:
    """Before anything is decoded: what the frame's header says is what the index says."""
    if size > MAX_BLOCK_BYTES:
        raise DataError(f"the index claims a block of {size} bytes, above the limit of {MAX_BLOCK_BYTES}")
    declared = zstandard.get_frame_parameters(frame).content_size
    if declared != size:
        raise DataError(f"the zstd header declares {declared} bytes where the index says {size}")


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found
