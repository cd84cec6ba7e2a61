"""grain over ArrayRecord: a global shuffle, no reading threads (which are slower here), worker processes by
`mp_prefetch`. Local files only: ArrayRecord reads no object store without a mounted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grain
import msgpack
import numpy as np
from absl import flags
from array_record.python import array_record_module

from benchmarks.peers.contender import BATCH
from benchmarks.peers.corpora import SHARD_BYTES, Corpus
from benchmarks.peers.place import Place

PACKAGE, REMOTE, RESUMES = "grain", False, True
DATA = "peer_grain"
THREADS, BUFFER, PER_WORKER = 0, 0, 8  # its defaults (16, 500, 1) are half as fast here


def write(samples: Iterator[dict], directory: Path, corpus: Corpus) -> None:
    options = "group_size:1," + ("zstd" if corpus.compressible else "uncompressed")
    number, size, writer = 0, 0, None
    for sample in samples:
        if writer is None:
            path = str(directory / f"{number:05d}.array_record")
            writer, number, size = array_record_module.ArrayRecordWriter(path, options), number + 1, 0
        data = msgpack.packb({k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in sample.items()})
        writer.write(data)
        size += len(data)
        if size > SHARD_BYTES:
            writer.close()
            writer = None
    if writer is not None:
        writer.close()


def _parse(data: bytes) -> dict:
    sample = msgpack.unpackb(data)
    if "tokens" in sample:
        sample["tokens"] = np.frombuffer(sample["tokens"], np.uint16)
    return sample


def load(place: Place, corpus: Corpus, workers: int, seed: int) -> Iterable[list[dict]]:  # noqa: ARG001  (all alike)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["bench"])  # mp_prefetch reads absl's flags, which a plain script has not parsed
    source = grain.sources.ArrayRecordDataSource(place.names())
    items = grain.MapDataset.source(source).shuffle(seed=seed).map(_parse)
    stream = items.to_iter_dataset(grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=BUFFER))
    stream = stream.batch(BATCH, drop_remainder=False, batch_fn=list)
    return (
        stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=PER_WORKER))
        if workers
        else stream
    )


def state(loader: Any, iterator: Any) -> Any:  # noqa: ARG001  (all alike)
    return iterator.get_state()


def resume(loader: Any, state: Any) -> Iterator[list[dict]]:
    iterator = iter(loader)
    iterator.set_state(state)
    return iterator
