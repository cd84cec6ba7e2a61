"""The samples of a ``snapshot="contents"`` state: packed for a checkpoint, and back.

One zstd frame for all partitions of a holder, samples in reading order: separate frames would compress small buffers
badly. Contents are a cache {(epoch, read): sample as stored} that a resume asks before the store, never a second truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from streamshard.errors import StateError, StreamshardError
from streamshard.prefetch.source import Kept
from streamshard.shard.compression import compress, decompress
from streamshard.shard.records import Sample, pack, unpack

_SIZE = 8  # bytes of each of two sizes in front of the frame: of its content, and of the places in it


def encode_contents(kept: Mapping[int, Sequence[Kept]]) -> bytes:
    """`kept` by partition, each in ascending (epoch, read): a map of places, then the packed samples."""
    places = []
    for p, samples in kept.items():
        epochs: dict[int, list[int]] = {}
        for epoch, read, _ in samples:
            epochs.setdefault(epoch, []).append(read)
        places.append([p, [[epoch, np.diff(reads, prepend=0).tolist()] for epoch, reads in epochs.items()]])
    packed = [sample.packed for samples in kept.values() for sample in samples]
    head = pack(places)
    plain = b"".join([head, b"\xdd", len(packed).to_bytes(4, "big"), *packed])
    return len(plain).to_bytes(_SIZE, "little") + len(head).to_bytes(_SIZE, "little") + compress(plain)


def decode_contents(blob: bytes) -> dict[int, dict[tuple[int, int], Sample]]:
    """{partition: {(epoch, read): sample}}. Raises `StateError` for damaged bytes."""
    try:
        size, head = int.from_bytes(blob[:_SIZE], "little"), int.from_bytes(blob[_SIZE : 2 * _SIZE], "little")
        plain = decompress(blob[2 * _SIZE :], size)
        places, samples = unpack(plain[:head]), iter(unpack(plain[head:]))
    except (StreamshardError, TypeError) as error:
        raise StateError(
            f"the contents of the state are damaged ({error}); resume from an earlier checkpoint"
        ) from error
    contents: dict[int, dict[tuple[int, int], Sample]] = {}
    for p, epochs in places:
        found = contents.setdefault(p, {})
        for epoch, steps in epochs:
            read = 0
            for step in steps:
                read += step
                found[epoch, read] = next(samples)
    return contents
