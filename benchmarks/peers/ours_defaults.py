"""streamshard at its defaults: 16 partitions of 512 buffered samples, read in 32 places, by a thread. It mixes eight times as
many samples as `ours` and can be resumed on up to 16 readers.
"""

from __future__ import annotations

from collections.abc import Iterable

import streamshard as ss
from benchmarks.peers.contender import BATCH, as_list, resume, state
from benchmarks.peers.corpora import Corpus
from benchmarks.peers.ours import write
from benchmarks.peers.place import Place

__all__ = ["load", "resume", "state", "write"]

PACKAGE, REMOTE, RESUMES = "streamshard", True, True
DATA = "ours"


def load(place: Place, corpus: Corpus, workers: int, seed: int) -> Iterable[list[dict]]:  # noqa: ARG001  (all alike)
    dataset = ss.StreamDataset(place.url, seed=seed, storage_options=place.s3fs_options or None)
    return ss.StreamLoader(dataset, batch_size=BATCH, collate=as_list, workers=workers, start_method="fork")
