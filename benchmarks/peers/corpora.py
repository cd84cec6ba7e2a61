"""The samples of the three corpora, the same for every contender."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.corpora import images, token_documents

SHARD_BYTES = 64 << 20


@dataclass(frozen=True)
class Corpus:
    """payload: the field that holds the data. compressible: whether shards are compressed (zstd where a peer can)."""

    name: str
    samples: Callable[[int], Iterator[dict]]
    count: int
    payload: str
    compressible: bool

    def bytes_of(self, sample: dict) -> int:
        """Size of the payload."""
        value = sample[self.payload]
        return value.nbytes if isinstance(value, np.ndarray) else len(value)


def records(count: int) -> Iterator[dict]:
    """1 KB of letters out of sixteen: zstd halves it."""
    rng = np.random.default_rng(0)
    for number in range(count):
        yield {"id": f"record-{number}", "data": (rng.integers(0, 16, 1000, dtype=np.uint8) + 65).tobytes()}


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus("tokens", token_documents, 100_000, "tokens", compressible=True),
        Corpus("records", records, 100_000, "data", compressible=True),
        Corpus("images", images, 4_000, "image", compressible=False),
    )
}
