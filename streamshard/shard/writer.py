"""Samples into finished shards. Pure: bytes come out, nobody is told where they go."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamshard.errors import UsageError
from streamshard.shard.compression import MAX_BLOCK_BYTES, compress, digest64
from streamshard.shard.layout import encode_index, encode_seek_table, seek_table_bytes
from streamshard.shard.records import pack_sample
from streamshard.shard.schema import Schema, extend


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """A shard's bytes (dropped once stored, when `size` remembers how many) and its row in the manifest."""

    data: bytes
    samples: int
    index_bytes: int
    index_digest: int
    length_sum: int
    size: int


class ShardWriter:
    """Collects samples into blocks and blocks into a shard. Not thread-safe.

    A block closes when its uncompressed bytes reach `block_bytes`; a shard is `full` when the finished object would
    reach `shard_bytes`. One sample is never cut, so either may be exceeded by one sample.
    """

    def __init__(
        self, *, length_field: str | None, shard_bytes: int, block_bytes: int, level: int, schema: Schema
    ) -> None:
        self._length_field = length_field
        self._shard_bytes = shard_bytes
        self._block_bytes = block_bytes
        self._level = level
        self._schema = schema
        self._reset()

    def _reset(self) -> None:
        self._open: list[bytes] = []
        self._open_bytes = 0
        self._frames: list[bytes] = []
        self._blocks: list[tuple[int, int, int, int]] = []
        self._frame_bytes = 0
        self._lengths: list[int] | None = None if self._length_field is None else []
        self.samples = 0

    @property
    def full(self) -> bool:
        """Whether the shard should be finished now (the open block counts as incompressible)."""
        overhead = 256 + 20 * len(self._blocks) + seek_table_bytes(len(self._blocks))
        return self._frame_bytes + overhead >= self._shard_bytes

    def add(self, sample: Mapping[str, Any]) -> int:
        """Append one sample; returns its packed size in bytes. A refused sample leaves everything as it was."""
        length = self._length(sample)
        packed = pack_sample(sample)
        if len(packed) > MAX_BLOCK_BYTES - self._block_bytes:
            raise UsageError(f"the sample has {len(packed)} bytes packed; a sample may have at most {MAX_BLOCK_BYTES}")
        extend(self._schema, sample)  # last of the checks: nothing is learnt from a refused sample
        self._open.append(packed)
        self._open_bytes += len(packed)
        if self._lengths is not None:
            self._lengths.append(length)
        self.samples += 1
        if self._open_bytes >= self._block_bytes:
            self._close_block()
        return len(packed)

    def _length(self, sample: Mapping[str, Any]) -> int:
        if self._length_field is None:
            return 0
        value = sample.get(self._length_field)
        try:
            length = len(value) if hasattr(value, "__len__") else operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            length = -1
        if isinstance(value, bool) or not 0 <= length < 1 << 32:
            raise UsageError(
                f"length_field={self._length_field!r} is {value!r} in this sample; it must be a count from 0 to 2**32 - 1 or "
                f"something with a length"
            )
        return length

    def _close_block(self) -> None:
        plain = b"".join(self._open)
        frame = compress(plain, self._level)
        self._frames.append(frame)
        self._frame_bytes += len(frame)
        self._blocks.append((len(self._open), len(frame), len(plain), digest64(frame)))
        self._open, self._open_bytes = [], 0

    def finish(self) -> FinishedShard:
        """Close the shard and start an empty one."""
        if self._open:
            self._close_block()
        index = encode_index(self._schema, self._blocks, self._lengths)
        data = b"".join([index, *self._frames, encode_seek_table(len(index), self._blocks)])
        finished = FinishedShard(data, self.samples, len(index), digest64(index), sum(self._lengths or ()), len(data))
        self._reset()
        return finished
