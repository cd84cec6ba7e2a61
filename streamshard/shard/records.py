"""Samples to msgpack and back. The only file that imports ``msgpack``.

A sample is a map of named fields: str, int, float, bool, None, bytes, numpy arrays, and lists and maps of these. Arrays
travel as extension type 1 with a header of fixed layout (docs/format.md), because a nested msgpack header costs twice
as much to decode. Nothing is ever pickled: object dtypes are refused on both sides.

Decoded arrays are read-only views of the decoded bytes: no copy is made, and a step that writes into its input cannot
change a sample that someone else (the shuffle buffer, a checkpoint) still holds. ``array.copy()`` gives a writable one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from streamshard.errors import DataError, UsageError

Sample = dict[str, Any]

ARRAY = 1  # msgpack extension type of arrays
DTYPES = tuple(
    np.dtype(name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_ITEM_SIZES = tuple(dtype.itemsize for dtype in DTYPES)
_DTYPE_COUNT = len(DTYPES)
_ONE_DIM = struct.Struct("<BBHI")  # dtype code, ndim, zero, length: the header of a vector, 8 bytes
_MAX_DIMS = 32


def pack_array(array: np.ndarray) -> msgpack.ExtType:
    """An array as extension data: dtype code u8, ndim u8, zero u16, u32 per dimension, zeros to a multiple of 8, data."""
    dtype = array.dtype.newbyteorder("=")
    if dtype not in _CODES or array.ndim > _MAX_DIMS or any(length >= 1 << 32 for length in array.shape):
        raise UsageError(
            f"an array of dtype {array.dtype} and shape {array.shape} cannot be stored; convert it to one of "
            f"{', '.join(map(str, DTYPES))} with at most {_MAX_DIMS} dimensions (object arrays would need pickle)"
        )
    header = struct.pack(f"<BBH{array.ndim}I", _CODES[dtype], array.ndim, 0, *array.shape)
    header += bytes(-len(header) % 8)
    return msgpack.ExtType(ARRAY, header + array.astype(dtype.newbyteorder("<"), copy=False).tobytes())


def unpack_array(data: bytes) -> np.ndarray:
    """The array of one extension value, read-only. Raises `DataError` for anything but an exact fit."""
    try:
        code, ndim, zero, _ = _ONE_DIM.unpack_from(data)
        shape = struct.unpack_from(f"<{ndim}I", data, 4)
        dtype = DTYPES[code]
    except (struct.error, IndexError) as error:
        raise DataError(f"an array of {len(data)} bytes has a damaged header {data[:8].hex()} ({error})") from error
    offset = 4 + 4 * ndim + (-(4 + 4 * ndim)) % 8
    if zero or ndim > _MAX_DIMS or len(data) != offset + math.prod(shape) * dtype.itemsize:
        raise DataError(f"an array header {data[:offset].hex()} does not fit its {len(data)} bytes")
    return (
        np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)
        if len(data) > offset
        else np.empty(shape, dtype)
    )


def _default(value: object) -> object:
    if isinstance(value, np.ndarray):
        return pack_array(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int):  # msgpack asks here first, and would call it unknown
        raise OverflowError(f"{value} has more than 64 bits")
    raise UsageError(
        f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be stored; use str, int, float, "
        f"bool, None, bytes, a numpy array (tensor.numpy()), or lists and maps of these"
    )


def _ext_hook(code: int, data: bytes, *, header: Any = _ONE_DIM.unpack_from, frombuffer: Any = np.frombuffer) -> object:
    """Called for every array of every sample: the common case, an exactly fitting vector, is kept short on purpose."""
    if code == ARRAY and len(data) >= 8:
        dtype_code, ndim, _, length = header(data)
        if ndim == 1 and dtype_code < _DTYPE_COUNT and length and len(data) == 8 + length * _ITEM_SIZES[dtype_code]:
            array: np.ndarray = frombuffer(data, DTYPES[dtype_code], length, 8)
            return array
    if code == ARRAY:
        return unpack_array(data)
    raise DataError(f"extension type {code} is unknown; this version reads type {ARRAY} (arrays) only")


def pack(value: object) -> bytes:
    """`value` as msgpack. Raises `UsageError` for values that cannot be stored."""
    try:
        data: bytes = msgpack.packb(value, default=_default)
    except UsageError:
        raise
    except (OverflowError, ValueError, TypeError, UnicodeEncodeError) as error:
        raise UsageError(
            f"a value cannot be stored as msgpack ({error}); integers must fit 64 bits, strings must be valid unicode"
        ) from error
    return data


def pack_sample(sample: Mapping[str, Any]) -> bytes:
    """One sample as a msgpack map."""
    return pack(sample if isinstance(sample, dict) else dict(sample))


_UNPACK_ERRORS = (ValueError, msgpack.UnpackException, RecursionError, TypeError)


def _named(error: Exception) -> str:
    return "too few bytes" if isinstance(error, msgpack.OutOfData) else f"{type(error).__name__}: {error}"


def unpack(data: bytes | memoryview) -> Any:
    """One msgpack value; `DataError` if the bytes are anything else."""
    try:
        return msgpack.unpackb(data, ext_hook=_ext_hook)
    except DataError:
        raise
    except _UNPACK_ERRORS as error:
        raise DataError(f"{len(data)} bytes do not decode as msgpack ({_named(error)})") from error


class BlockUnpacker:
    """Unpacks the samples of one block after another, a few at a time. Not thread-safe; made once and used again.

    Samples are made when they are taken and not a block at a time. Creating objects costs the same either way, but objects
    made in bursts leave the processor's cache before they are used (with 32 interleaved streams 7 to 17 % of all CPU,
    docs/decisions/0003-decode-in-the-consumer.md). One msgpack ``Unpacker`` keeps its memory from block to block.
    """

    def __init__(self, max_block_bytes: int) -> None:
        self._unpacker = msgpack.Unpacker(ext_hook=_ext_hook, max_buffer_size=max_block_bytes)
        self._end = 0

    def feed(self, block: bytes | memoryview) -> None:
        """Begin the next block. What is left of the one before must have been taken or skipped."""
        self._unpacker.feed(block)
        self._end += len(block)

    def take(self, count: int) -> list[Sample]:
        """The next `count` samples. Raises `DataError` where the bytes are something else or too few."""
        unpack_one = self._unpacker.unpack
        try:
            samples: list[Sample] = [unpack_one() for _ in range(count)]
        except DataError:
            raise
        except _UNPACK_ERRORS as error:
            raise DataError(f"it does not decode as msgpack ({_named(error)})") from error
        for sample in samples[:1]:
            if not isinstance(sample, dict):
                raise DataError(f"a sample is a {type(sample).__name__} where the format has maps")
        return samples

    def skip(self, count: int) -> None:
        """Pass over `count` samples without making them."""
        try:
            for _ in range(count):
                self._unpacker.skip()
        except _UNPACK_ERRORS as error:
            raise DataError(f"it does not decode as msgpack ({_named(error)})") from error

    def finish(self) -> None:
        """Check that the last sample taken ended where the block ends."""
        if self._unpacker.tell() != self._end:
            raise DataError(
                f"its samples end {self._end - self._unpacker.tell()} bytes before the block does: it holds more of them "
                f"than the index says"
            )
