"""litdata: `optimize` with `chunk_bytes` and zstd, `StreamingDataset(shuffle=True)` in a `StreamingDataLoader`, as
its README shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")

import litdata
from litdata.streaming import downloader

from benchmarks.peers.contender import BATCH, as_list, resume, state
from benchmarks.peers.corpora import SHARD_BYTES, Corpus
from benchmarks.peers.place import Place

__all__ = ["load", "resume", "state", "write"]

PACKAGE, REMOTE, RESUMES = "litdata", True, True
DATA = "peer_litdata"

# It downloads with obstore and client options of its own, which leave no other way to allow plain HTTP.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001


def _same(sample: dict) -> dict:
    return sample


def write(samples: Iterator[dict], directory: Path, corpus: Corpus) -> None:
    litdata.optimize(
        fn=_same, inputs=list(samples), output_dir=str(directory), chunk_bytes=SHARD_BYTES, num_workers=1, verbose=False,
        compression="zstd" if corpus.compressible else None,
    )  # fmt: skip


def load(place: Place, corpus: Corpus, workers: int, seed: int) -> Iterable[list[dict]]:  # noqa: ARG001  (all alike)
    options: dict[str, Any] = {}
    if place.remote:
        options["storage_options"] = {
            "endpoint_url": place.endpoint, "aws_access_key_id": place.key, "aws_secret_access_key": place.secret,
            "region_name": "us-east-1",
        }  # fmt: skip
    dataset = litdata.StreamingDataset(
        place.url, shuffle=True, drop_last=False, seed=seed, cache_dir=place.cache, **options
    )
    return litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, collate_fn=as_list, drop_last=False,
        prefetch_factor=2 if workers else None,
    )  # fmt: skip
