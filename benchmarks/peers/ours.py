"""streamshard: `StreamLoader` that mixes as much as the others do, with 1024 samples in its shuffle buffers out of as many
places as there are processes to read them (2 partitions of 512, interleave 1), and without a thread of its own where there are
no workers: the loop has nothing to do meanwhile, and the others have none either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import streamshard as ss
from benchmarks.peers.contender import BATCH, as_list, resume, state
from benchmarks.peers.corpora import SHARD_BYTES, Corpus
from benchmarks.peers.place import Place

__all__ = ["load", "resume", "state", "write"]

PACKAGE, REMOTE, RESUMES = "streamshard", True, True
DATA = "ours"


def write(samples: Iterator[dict], directory: Path, corpus: Corpus) -> None:
    length = corpus.payload if corpus.name == "tokens" else None
    with ss.DatasetWriter(str(directory), length_field=length, shard_bytes=SHARD_BYTES) as writer:
        for sample in samples:
            writer.write(sample)


def load(place: Place, corpus: Corpus, workers: int, seed: int) -> Iterable[list[dict]]:  # noqa: ARG001  (all alike)
    options = place.s3fs_options or None
    dataset = ss.StreamDataset(
        place.url, seed=seed, partitions=2, shuffle_buffer=512, interleave=1, storage_options=options
    )
    # fork, as torch's DataLoader does for the others on Linux: so that CPU seconds of workers are counted for all alike
    return ss.StreamLoader(
        dataset, batch_size=BATCH, collate=as_list, workers=workers, start_method="fork", prefetch=2 if workers else 0
    )
