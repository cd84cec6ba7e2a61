"""Indexes and blocks of one dataset version, out of a store; the place where failures get the shard's name."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from streamshard.errors import DataError, StorageError
from streamshard.prefetch.plan import BlockPiece
from streamshard.shard.layout import ShardIndex, decode_index
from streamshard.shard.manifest import Manifest
from streamshard.shard.reader import decode_block
from streamshard.shard.records import Sample
from streamshard.storage.store import Store

_INDEXES_KEPT = 1024  # an index is a few KB; a reader touches partitions x interleave shards at a time


class ShardAccess:
    """Reads shards of one manifest. Thread-safe; indexes are cached, and each is fetched by one thread only."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self.requested_bytes = 0
        self.requests = 0
        self._indexes: OrderedDict[int, ShardIndex] = OrderedDict()
        self._locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:  # locks and counters stay in their process
        return ShardAccess, (self.store, self.manifest)

    def index(self, shard: int) -> ShardIndex:
        """The verified index of a shard."""
        with self._lock:
            found = self._indexes.get(shard)
            if found is not None:
                self._indexes.move_to_end(shard)
                return found
            fetching = self._locks.setdefault(shard, threading.Lock())
        with fetching:
            found = self._indexes.get(shard)
            if found is None:
                found = self._fetch_index(shard)
                with self._lock:
                    self._indexes[shard] = found
                    self._locks.pop(shard, None)
                    if len(self._indexes) > _INDEXES_KEPT:
                        self._indexes.popitem(last=False)
        return found

    def _fetch_index(self, shard: int) -> ShardIndex:
        manifest = self.manifest
        size, key = int(manifest.index_bytes[shard]), manifest.key(shard)
        with self._naming(shard):
            stat = self.store.stat(key)
            expected = int(manifest.bytes[shard])
            if stat.size != expected:
                raise DataError(f"the object has {stat.size} bytes where the manifest says {expected}")
            frame = self._get(key, 0, size)
            index = decode_index(
                frame, size=size, digest=int(manifest.index_digests[shard]), samples=int(manifest.samples[shard])
            )
            if index.shard_bytes != expected:
                raise DataError(f"the index describes {index.shard_bytes} bytes where the object has {expected}")
        return index

    def fetch(self, unit: list[BlockPiece]) -> list[memoryview]:
        """Compressed bytes of each block of `unit` (neighbours in one shard), with one ranged GET."""
        shard, offsets = unit[0].shard, unit[0].index.offsets
        start = int(offsets[unit[0].block])
        with self._naming(shard):
            data = memoryview(self._get(self.manifest.key(shard), start, int(offsets[unit[-1].block + 1])))
        return [data[int(offsets[p.block]) - start : int(offsets[p.block + 1]) - start] for p in unit]

    def decode(self, piece: BlockPiece, frame: memoryview, buffer: bytearray) -> list[Sample]:
        """All samples of a fetched block; `buffer` is scratch memory that grows to the largest block."""
        with self._naming(piece.shard):
            return decode_block(piece.index, piece.block, frame, buffer)

    def _get(self, key: str, start: int, stop: int) -> bytes:
        with self._lock:
            self.requests += 1
            self.requested_bytes += stop - start
        return self.store.get(key, start, stop)

    @contextmanager
    def _naming(self, shard: int) -> Iterator[None]:
        """Failures inside name the shard, the dataset and the cure."""
        try:
            yield
        except DataError as error:
            raise DataError(
                f"shard {shard} ({self._where(shard)}) is not what manifest version {self.manifest.version[:12]} pins: "
                f"{error}. Restore the object, or write the dataset again"
            ) from error
        except StorageError as error:
            raise StorageError(
                f"shard {shard} ({self._where(shard)}), listed by manifest version {self.manifest.version[:12]}, "
                f"cannot be read: {error}",
                kind=error.kind,
            ) from error

    def _where(self, shard: int) -> str:
        return f"{self.store.url}/{self.manifest.key(shard)}"
