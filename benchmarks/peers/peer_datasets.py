"""Hugging Face datasets: `load_dataset("parquet", streaming=True)`, a shuffle buffer of 1000 over one shard at a
time, torch's DataLoader; zstd parquet in row groups of 1000 (images: 100, uncompressed). Tokens are stored as binary:
lists of integers are converted one by one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.peers.contender import BATCH, as_list, resume, state
from benchmarks.peers.corpora import SHARD_BYTES, Corpus
from benchmarks.peers.place import BUCKET, Place

__all__ = ["load", "resume", "state", "write"]

PACKAGE, REMOTE, RESUMES = "datasets", True, True
DATA = "peer_datasets"
BUFFER, SHARDS = 1000, 1  # its default of 10 shards mixes better and is ten times slower

SCHEMAS = {
    "tokens": pa.schema([("id", pa.string()), ("tokens", pa.binary())]),
    "records": pa.schema([("id", pa.string()), ("data", pa.binary())]),
    "images": pa.schema([("id", pa.string()), ("image", pa.binary()), ("label", pa.int64())]),
}


def write(samples: Iterator[dict], directory: Path, corpus: Corpus) -> None:
    schema, rows = SCHEMAS[corpus.name], 1000 if corpus.compressible else 100
    options = {"compression": "zstd" if corpus.compressible else "none", "use_dictionary": False}
    number, writer, path, group = 0, None, directory, []

    def flush() -> None:
        columns = {name: [row[name] for row in group] for name in schema.names}
        writer.write_table(pa.Table.from_pydict(columns, schema=schema), row_group_size=rows)
        group.clear()

    for sample in samples:
        if writer is None:
            path = directory / f"{number:05d}.parquet"
            writer, number = pq.ParquetWriter(path, schema, **options), number + 1
        group.append({k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in sample.items()})
        if len(group) == rows:
            flush()
            if path.stat().st_size > SHARD_BYTES:
                writer.close()
                writer = None
    if group:
        flush()
    if writer is not None:
        writer.close()


def _with_arrays(items: list[dict]) -> list[dict]:
    for item in items:
        item["tokens"] = np.frombuffer(item["tokens"], np.uint16)
    return items


def load(place: Place, corpus: Corpus, workers: int, seed: int) -> Iterable[list[dict]]:
    files = [f"s3://{BUCKET}/{key}" for key in place.names()] if place.remote else place.names()
    stream = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, storage_options=place.s3fs_options or None
    )
    stream = stream.shuffle(seed=seed, buffer_size=BUFFER, max_buffer_input_shards=SHARDS)
    # with a state where it is asked for: without one it is as fast, since none is taken
    return StatefulDataLoader(
        stream, batch_size=BATCH, num_workers=workers, collate_fn=_with_arrays if corpus.name == "tokens" else as_list,
        prefetch_factor=2 if workers else None, snapshot_every_n_steps=100,
    )  # fmt: skip
