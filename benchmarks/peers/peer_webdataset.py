"""webdataset: tar shards, `shardshuffle`, a shuffle buffer of 1000, batches formed in the workers, `WebLoader`. From
S3 through presigned URLs, for each of which it starts curl, as its documentation does. Tokens are stored as bytes,
which it reads faster than its own encoding of arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import webdataset as wds

from benchmarks.peers.contender import BATCH, as_list
from benchmarks.peers.corpora import SHARD_BYTES, Corpus
from benchmarks.peers.place import BUCKET, Place

PACKAGE, REMOTE, RESUMES = "webdataset", True, False
DATA = "peer_webdataset"
BUFFER, SHARDS = 1000, 100


def write(samples: Iterator[dict], directory: Path, corpus: Corpus) -> None:
    with wds.ShardWriter(str(directory / "%06d.tar"), maxsize=SHARD_BYTES, maxcount=10**9, verbose=0) as sink:
        for sample in samples:
            record = {"__key__": sample["id"]}
            if corpus.name == "tokens":
                record["tokens"] = sample["tokens"].tobytes()
            elif corpus.name == "records":
                record["bin"] = sample["data"]
            else:
                record.update(jpg=sample["image"], cls=sample["label"])
            sink.write(record)


def _decode(record: dict) -> dict:
    if "tokens" in record:
        return {"id": record["__key__"], "tokens": np.frombuffer(record["tokens"], np.uint16)}
    if "bin" in record:
        return {"id": record["__key__"], "data": record["bin"]}
    return {"id": record["__key__"], "image": record["jpg"], "label": int(record["cls"])}


def _urls(place: Place) -> list[str]:
    if not place.remote:
        return place.names()
    client, keys = place.client(), place.names()
    return [
        client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": key}, ExpiresIn=43_200) for key in keys
    ]


def load(place: Place, corpus: Corpus, workers: int, seed: int) -> Iterable[list[dict]]:  # noqa: ARG001  (all alike)
    dataset = wds.WebDataset(_urls(place), shardshuffle=SHARDS, detshuffle=True, seed=seed, empty_check=False)
    batches = dataset.shuffle(BUFFER, seed=seed).map(_decode).listed(BATCH)
    return wds.WebLoader(
        batches, batch_size=None, collate_fn=as_list, num_workers=workers, prefetch_factor=2 if workers else None
    )
