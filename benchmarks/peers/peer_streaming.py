"""streaming-community, the maintained mosaicml-streaming: MDS shards with zstd, `StreamingDataset` and
`StreamingDataLoader` at their defaults, from a remote (for the local corpus: a local directory as the remote) into an
empty cache, as its documentation has it.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # It imports torchvision for its vision classes, whose wheel does not load beside a CPU build of torch. Reading and writing
    # MDS never touches them.
    def _absent(name: str, **names: object) -> None:
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        vars(module).update(names, __version__="0")
        sys.modules[name] = module

    for _name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[_name]
    _absent("torchvision")
    _absent("torchvision.datasets", VisionDataset=object)
    _absent("torchvision.transforms")
    _absent("torchvision.transforms.functional", to_tensor=None)

import streaming
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from benchmarks.peers.contender import BATCH
from benchmarks.peers.corpora import SHARD_BYTES, Corpus
from benchmarks.peers.place import Place

PACKAGE, REMOTE, RESUMES = "streaming-community", True, True
DATA = "peer_streaming"
PREDOWNLOAD = (
    4096  # samples; its page on performance says to raise it when a loader waits: twice as fast here as the default
)

COLUMNS = {
    "tokens": {"id": "str", "tokens": "ndarray:uint16"},
    "records": {"id": "str", "data": "bytes"},
    "images": {"id": "str", "image": "bytes", "label": "int"},
}


def write(samples: Iterator[dict], directory: Path, corpus: Corpus) -> None:
    compression = "zstd" if corpus.compressible else None
    with MDSWriter(
        out=str(directory),
        columns=COLUMNS[corpus.name],
        compression=compression,
        size_limit=SHARD_BYTES,
        progress_bar=False,
    ) as out:
        for sample in samples:
            out.write(sample)


def _in_map(items: list[dict]) -> dict[str, list[dict]]:
    return {"samples": items}  # its loader counts samples by the first value of a map


class _Batches:
    def __init__(self, loader: StreamingDataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[dict]]:
        return (batch["samples"] for batch in self.loader)


def load(place: Place, corpus: Corpus, workers: int, seed: int) -> Iterable[list[dict]]:  # noqa: ARG001  (all alike)
    streaming.base.util.clean_stale_shared_memory()
    if place.remote:
        os.environ.update(
            S3_ENDPOINT_URL=str(place.endpoint), AWS_ACCESS_KEY_ID=place.key, AWS_SECRET_ACCESS_KEY=place.secret,
            AWS_DEFAULT_REGION="us-east-1",
        )  # fmt: skip
    dataset = StreamingDataset(
        remote=place.url, local=place.cache, shuffle=True, shuffle_seed=seed, batch_size=BATCH, predownload=PREDOWNLOAD
    )
    for stream in dataset.streams:
        # Forked workers share the connection that this client opened for the index, and then read each other's answers: one
        # epoch in four failed on S3, with damaged frames. Without it each worker makes its own.
        if hasattr(stream._downloader, "_s3_client"):  # noqa: SLF001
            stream._downloader._s3_client = None  # noqa: SLF001
    return _Batches(
        StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=workers, collate_fn=_in_map, prefetch_factor=2 if workers else None
        )
    )


def state(loader: Any, iterator: Any) -> Any:  # noqa: ARG001  (all alike)
    return loader.loader.state_dict()


def resume(loader: Any, state: Any) -> Iterator[list[dict]]:
    loader.loader.load_state_dict(state)
    return iter(loader)
