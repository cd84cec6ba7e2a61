"""Indexes and blocks of one dataset version, out of a store; the place where failures get the shard's name."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from streamshard.errors import CorruptError, DataError, StorageError
from streamshard.prefetch.plan import BlockPiece, Request
from streamshard.shard.layout import ShardIndex, decode_index
from streamshard.shard.manifest import Manifest
from streamshard.shard.reader import decode_block
from streamshard.shard.records import Sample
from streamshard.storage.store import Range, Reply, Store

_INDEXES_KEPT = 1024  # an index is a few KB; a reader touches partitions x interleave shards at a time


class ShardAccess:
    """Reads shards of one manifest. Thread-safe; indexes are kept, with the version of the object that they came from: every
    later range of the shard must be of the same version.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self.requested_bytes = 0
        self.requests = 0
        self._known: OrderedDict[int, tuple[ShardIndex, str]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:  # locks and counters stay in their process
        return ShardAccess, (self.store, self.manifest)

    def known_index(self, shard: int) -> ShardIndex | None:
        """The verified index of a shard, if it has been read."""
        with self._lock:
            found = self._known.get(shard)
            if found is None:
                return None
            self._known.move_to_end(shard)
            return found[0]

    def sizes(self, shard: int) -> tuple[int, int, int]:
        """(bytes of the index frame, bytes of the object, samples), as the manifest has them."""
        manifest = self.manifest
        return int(manifest.index_bytes[shard]), int(manifest.bytes[shard]), int(manifest.samples[shard])

    def index(self, shard: int) -> ShardIndex:
        """The verified index of a shard, read if need be."""
        found = self.known_index(shard)
        if found is not None:
            return found
        head = Request(shard, 0, self.sizes(shard)[0], 0)
        with self._naming(shard):
            reply = self.send(head, urgent=True).result()
        try:
            return self.learn(head, reply)
        except CorruptError:
            with self._naming(shard):
                reply = self.send(head, urgent=True, fresh=True).result()
            return self.learn(head, reply)

    def send(self, request: Request, *, urgent: bool, fresh: bool = False) -> Future[Reply]:
        """Begin to fetch. The failure of the future is not yet named: take it inside `naming`."""
        manifest, shard = self.manifest, request.shard
        with self._lock:
            self.requests += 1
            self.requested_bytes += request.size
            tag = self._known[shard][1] if shard in self._known else ""
        version = f"{int(manifest.index_digests[shard]):016x}"  # pins the index, which pins every block
        return self.store.fetch(
            Range(
                manifest.key(shard), request.start, request.stop, tag=tag, version=version, size=self.sizes(shard)[1],
                urgent=urgent, fresh=fresh,
            )
        )  # fmt: skip

    def learn(self, head: Request, reply: Reply) -> ShardIndex:
        """Verify and keep the index that a request from byte 0 has brought."""
        index_bytes, expected, samples = self.sizes(head.shard)
        with self._naming(head.shard):
            if reply.size not in (None, expected):
                raise CorruptError(f"the object has {reply.size} bytes where the manifest says {expected}")
            frame = memoryview(reply.data)[:index_bytes]
            digest = int(self.manifest.index_digests[head.shard])
            index = decode_index(frame, size=index_bytes, digest=digest, samples=samples)
            if index.shard_bytes != expected:
                raise DataError(f"the index describes {index.shard_bytes} bytes where the object has {expected}")
        with self._lock:
            self._known[head.shard] = (index, reply.tag)
            if len(self._known) > _INDEXES_KEPT:
                self._known.popitem(last=False)
        return index

    def frames(self, request: Request, reply: Reply) -> list[memoryview]:
        """The compressed bytes of each piece of an answered request."""
        data = memoryview(reply.data)
        return [
            data[int(p.index.offsets[p.block]) - request.start : int(p.index.offsets[p.block + 1]) - request.start]
            for p in request.pieces
        ]

    def fetch(self, units: list[list[BlockPiece]]) -> Iterator[list[memoryview]]:
        """Compressed bytes of each block of each unit (neighbours in one shard), one ranged GET a unit, all at once."""
        requests = [Request(unit[0].shard, *_span(unit), 0, unit) for unit in units]
        replies = [self.send(request, urgent=True) for request in requests]
        try:
            for request, reply in zip(requests, replies, strict=True):
                with self._naming(request.shard):
                    yield self.frames(request, reply.result())
        finally:
            for reply in replies:
                reply.cancel()

    def decode(
        self, piece: BlockPiece, frame: memoryview, buffer: bytearray, inflated: memoryview | None = None
    ) -> list[Sample]:
        """All samples of a fetched block; `buffer` is scratch memory that grows to the largest block, `inflated` the
        decompressed frame if there is one.

        Wrong bytes are read once more, past any cache, before they are an error.
        """
        with self._naming(piece.shard):
            try:
                return decode_block(piece.index, piece.block, frame, buffer, inflated)
            except CorruptError:
                request = Request(piece.shard, *_span([piece]), 0, [piece])
                again = memoryview(self.send(request, urgent=True, fresh=True).result().data)
                return decode_block(piece.index, piece.block, again, buffer)

    @contextmanager
    def _naming(self, shard: int) -> Iterator[None]:
        """Failures inside name the shard, the dataset and the cure."""
        try:
            yield
        except (DataError, StorageError) as error:
            raise self.named(shard, error) from error

    def named(self, shard: int, error: DataError | StorageError) -> DataError | StorageError:
        """`error`, saying which shard of which version it is about, and what to do."""
        version = self.manifest.version[:12]
        where = f"shard {shard} ({self.store.url}/{self.manifest.key(shard)})"
        wrong = (
            f"it is not what manifest version {version} pins: {error}. Restore the object, or write the dataset again"
        )
        if isinstance(error, StorageError) and error.kind == "corrupt":
            return CorruptError(f"{where} is corrupt: {wrong}")
        if isinstance(error, DataError):
            return DataError(f"{where} cannot be used: {wrong}")
        return StorageError(f"{where}, listed by manifest version {version}, cannot be read: {error}", kind=error.kind)


def _span(unit: list[BlockPiece]) -> tuple[int, int]:
    offsets = unit[0].index.offsets
    return int(offsets[unit[0].block]), int(offsets[unit[-1].block + 1])
