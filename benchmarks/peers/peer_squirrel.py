"""squirrel-core: gzip MessagePack shards in a `SquirrelStore`, keys and items shuffled, `SplitByWorker`, torch's
DataLoader, as its documentation's tutorial on PyTorch has it. It has no zstd and no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from squirrel.driver import MessagepackDriver
from squirrel.iterstream.torch_composables import SplitByWorker, TorchIterable
from squirrel.serialization import MessagepackSerializer
from squirrel.store import SquirrelStore
from torch.utils.data import DataLoader

from benchmarks.peers.contender import BATCH, as_list
from benchmarks.peers.corpora import SHARD_BYTES, Corpus
from benchmarks.peers.place import Place

PACKAGE, REMOTE, RESUMES = "squirrel-core", True, False
DATA = "peer_squirrel"
BUFFER, KEYS = 1000, 100


def write(samples: Iterator[dict], directory: Path, corpus: Corpus) -> None:
    store, shard, size, number = SquirrelStore(str(directory), MessagepackSerializer()), [], 0, 0
    for sample in samples:
        shard.append(sample)
        size += corpus.bytes_of(sample)
        if size > SHARD_BYTES:
            store.set(shard, key=f"{number:06d}")
            shard, size, number = [], 0, number + 1
    if shard:
        store.set(shard, key=f"{number:06d}")


def load(place: Place, corpus: Corpus, workers: int, seed: int) -> Iterable[list[dict]]:  # noqa: ARG001  (all alike)
    driver = MessagepackDriver(place.url, storage_options=place.s3fs_options)
    stream = driver.get_iter(
        shuffle_key_buffer=KEYS, key_shuffle_kwargs={"seed": seed, "initial": KEYS}, key_hooks=[SplitByWorker],
        shuffle_item_buffer=BUFFER, item_shuffle_kwargs={"seed": seed},
    )  # fmt: skip
    batches = stream.batched(BATCH, drop_last_if_not_full=False).compose(TorchIterable)
    return DataLoader(
        batches, batch_size=None, collate_fn=as_list, num_workers=workers, prefetch_factor=2 if workers else None
    )
