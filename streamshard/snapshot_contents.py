"""The samples of a ``snapshot="contents"`` state: packed for a checkpoint, and back.

One zstd frame for all partitions of a holder, samples in reading order: separate frames would compress small buffers
badly. Contents are a cache {(source path, epoch, read): sample as stored} that a resume asks before the store, never a
second truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain

import numpy as np

from streamshard.errors import StateError, StreamshardError
from streamshard.prefetch.source import Kept
from streamshard.shard.compression import compress, decompress
from streamshard.shard.records import Sample, pack, unpack

_FRAME_BYTES = 128 << 20  # samples of one frame, uncompressed: one frame for most, several for large samples


def encode_contents(kept: Mapping[int, Sequence[Kept]]) -> bytes:
    """`kept` by partition, each source's in ascending (epoch, read), as msgpack: places, and frames of packed samples."""
    places = []
    for p, samples in kept.items():
        epochs: dict[tuple[str, int], list[int]] = {}
        for path, epoch, read, _ in samples:
            epochs.setdefault((path, epoch), []).append(read)
        places.append(
            [p, [[epoch, np.diff(reads, prepend=0).tolist(), path] for (path, epoch), reads in epochs.items()]]
        )
    packed = [sample.packed for samples in kept.values() for sample in samples]
    return pack({"places": places, "frames": [[len(plain), compress(plain)] for plain in _frames(packed)]})


def _frames(packed: list[bytes]) -> Iterator[bytes]:
    """Samples as msgpack arrays of at most `_FRAME_BYTES` (one sample may have more)."""
    start = size = 0
    for end, sample in enumerate(packed):
        if end > start and size + len(sample) > _FRAME_BYTES:
            yield _array(packed[start:end])
            start, size = end, 0
        size += len(sample)
    yield _array(packed[start:])


def _array(packed: list[bytes]) -> bytes:
    return b"".join([b"\xdd", len(packed).to_bytes(4, "big"), *packed])


def decode_contents(blob: bytes) -> dict[int, dict[tuple[str, int, int], Sample]]:
    """{partition: {(source path, epoch, read): sample}}. Raises `StateError` for damaged bytes."""
    contents: dict[int, dict[tuple[str, int, int], Sample]] = {}
    try:
        stored = unpack(blob)
        samples = chain.from_iterable(unpack(decompress(frame, size)) for size, frame in stored["frames"])
        for p, epochs in stored["places"]:
            found = contents.setdefault(p, {})
            for epoch, steps, *path in epochs:
                for read in accumulate(steps):
                    found[path[0] if path else "", epoch, read] = next(samples)
    except (StreamshardError, TypeError, KeyError, ValueError, OverflowError, StopIteration) as error:
        raise StateError(
            f"the contents of the state are damaged ({error}); resume from an earlier checkpoint"
        ) from error
    return contents
