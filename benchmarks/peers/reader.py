"""Thirty lines that people write by hand: list, GET, decompress, unpack, a reservoir; no state, no retries, no checks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zstandard
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.peers.contender import BATCH, as_list
from benchmarks.peers.corpora import SHARD_BYTES, Corpus
from benchmarks.peers.place import BUCKET, Place

PACKAGE, REMOTE, RESUMES = "zstandard", True, False
DATA = "reader"
BUFFER = 1000


def write(samples: Iterator[dict], directory: Path, corpus: Corpus) -> None:
    packed, size, number = [], 0, 0
    compressor = zstandard.ZstdCompressor(level=3 if corpus.compressible else 1, write_checksum=True)
    for sample in samples:
        packed.append(msgpack.packb({k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in sample.items()}))
        size += len(packed[-1])
        if size > SHARD_BYTES * (2 if corpus.compressible else 1):
            (directory / f"{number:06d}.msgpack.zst").write_bytes(compressor.compress(b"".join(packed)))
            packed, size, number = [], 0, number + 1
    (directory / f"{number:06d}.msgpack.zst").write_bytes(compressor.compress(b"".join(packed)))


class Reader(IterableDataset):
    """Samples of plain .msgpack.zst shards through a reservoir."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.seed = place, seed

    def _open(self, key: str) -> Any:
        if self.place.remote:
            return self.place.client().get_object(Bucket=BUCKET, Key=key)["Body"]
        return Path(key).open("rb")

    def __iter__(self) -> Iterator[dict]:
        rng, worker = random.Random(self.seed), get_worker_info()  # noqa: S311  (shuffling)
        keys = self.place.names()
        rng.shuffle(keys)
        reservoir: list[dict] = []
        for key in keys if worker is None else keys[worker.id :: worker.num_workers]:
            unpacker = msgpack.Unpacker()
            with self._open(key) as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
                while piece := reader.read(1 << 20):
                    unpacker.feed(piece)
                    for sample in unpacker:
                        if "tokens" in sample:
                            sample["tokens"] = np.frombuffer(sample["tokens"], np.uint16)
                        if len(reservoir) < BUFFER:
                            reservoir.append(sample)
                            continue
                        slot = rng.randrange(BUFFER)
                        reservoir[slot], sample = sample, reservoir[slot]
                        yield sample
        rng.shuffle(reservoir)
        yield from reservoir


def load(place: Place, corpus: Corpus, workers: int, seed: int) -> Iterable[list[dict]]:  # noqa: ARG001  (all alike)
    return DataLoader(Reader(place, seed), batch_size=BATCH, num_workers=workers, collate_fn=as_list)
