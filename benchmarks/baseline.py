"""What people write by hand: stream, unpack, reservoir, no state. Committed and fixed, so that figures stay comparable."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgpack
import numpy as np
import zstandard


def read_plain(paths: list[str], buffer: int, seed: int = 0) -> Iterator[dict]:
    """Samples of plain .msgpack.zst files through a reservoir of `buffer` samples."""
    rng = random.Random(seed)  # noqa: S311  (shuffling)
    paths = list(paths)
    rng.shuffle(paths)
    reservoir: list[dict] = []
    for path in paths:
        unpacker = msgpack.Unpacker()
        with open(path, "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
            while piece := reader.read(1 << 20):
                unpacker.feed(piece)
                for sample in unpacker:
                    sample["tokens"] = np.frombuffer(sample["tokens"], np.uint16)
                    if len(reservoir) < buffer:
                        reservoir.append(sample)
                        continue
                    slot = rng.randrange(buffer)
                    reservoir[slot], sample = sample, reservoir[slot]
                    yield sample
    rng.shuffle(reservoir)
    yield from reservoir
