"""`Cached`: pieces of objects kept on the local disk. Wraps a store's stack; has its verbs.

Only ranges that name the version of their content (`Range.version`: for shards, the digest that the manifest has of the
index, which has one of every block) are cached: such a name is right for ever and costs no request. Objects are cut into
aligned pieces, so that the ranges of another epoch, partition or budget find what this one has fetched. What comes from here
is verified twice, by the file's digest and by the blocks' hashes; `fresh` ranges go past it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from streamshard.errors import StorageError
from streamshard.storage.disk import Disk
from streamshard.storage.engine import Engine
from streamshard.storage.resilience import Resilient, Tally
from streamshard.storage.store import ObjectStat, Range, Reply

PIECE = 1 << 20  # a small one, because until the first batch every stripe asks for one
_WRITERS = 4  # at a time: reads must find a free thread
_BACKLOG = 64  # pieces on their way to the disk; when it is slower than the network, further ones are not kept


class Cached:
    """Ranges from the disk where it has them, from `inner` where not."""

    def __init__(self, inner: Resilient, disk: Disk, engine: Engine, *, place: str, tally: Tally) -> None:
        self._inner = inner
        self._disk = disk
        self._engine = engine
        self._place = place
        self._tally = tally
        self._coming: dict[str, asyncio.Future[memoryview]] = {}  # pieces being fetched, or not on the disk yet
        self._writers = asyncio.Semaphore(_WRITERS)
        self._writes: set[asyncio.Future[bool]] = set()

    def __repr__(self) -> str:
        return f"Cached({self._inner!r}, {self._disk!r})"

    async def get(self, wanted: Range) -> Reply:
        """The range; pieces that are missing are fetched whole, neighbours together, each by one request at a time."""
        if not wanted.version or not wanted.size:
            return await self._inner.get(wanted)
        numbers = range(wanted.start // PIECE, (wanted.stop - 1) // PIECE + 1)
        names = {number: self._name(wanted, number) for number in numbers}
        if wanted.fresh:  # what is here is wrong, though its digest may be right
            for name in names.values():
                self._coming.pop(name, None)
                await self._engine.blocking(self._disk.remove, name)
            return await self._inner.get(wanted)
        coming = {n: self._coming[name] for n, name in names.items() if name in self._coming}
        on_disk = await self._engine.blocking(self._read, [name for n, name in names.items() if n not in coming])
        self._tally.cache_hits += len(on_disk)
        wanting = [n for n, name in names.items() if n not in coming and name not in on_disk]
        coming |= {n: self._coming[names[n]] for n in wanting if names[n] in self._coming}  # begun since
        missing = [n for n in wanting if n not in coming]
        fetched: dict[str, memoryview] = {}
        tag = ""
        for first, last in _runs(missing):
            tag = await self._fetch(wanted, first, last, names, fetched)
        failed = []
        for number, piece in coming.items():
            try:
                fetched[names[number]] = await asyncio.shield(piece)
            except (asyncio.CancelledError, StorageError):
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                failed.append(number)  # whoever asked for it has gone, or failed: ask ourselves
        for first, last in _runs(failed):
            tag = await self._fetch(wanted, first, last, names, fetched)
        parts = [on_disk.get(name) or fetched[name] for name in names.values()]
        offset = numbers[0] * PIECE
        whole = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        return Reply(whole[wanted.start - offset : wanted.stop - offset], tag, wanted.size)

    async def _fetch(
        self, wanted: Range, first: int, last: int, names: dict[int, str], into: dict[str, memoryview]
    ) -> str:
        """Pieces `first` to `last` in one request, and the tag of the object; others who want them meanwhile, wait for it."""
        self._tally.cache_misses += last - first + 1
        start, stop = first * PIECE, min(wanted.size, (last + 1) * PIECE)
        asked = asyncio.ensure_future(self._inner.get(replace(wanted, start=start, stop=stop)))
        for number in range(first, last + 1):
            part = self._coming[names[number]] = asyncio.ensure_future(_part(asked, number * PIECE - start))
            part.add_done_callback(_ignore)  # perhaps nobody else wants it
        try:
            reply = await asked
        except BaseException:
            asked.cancel()
            for number in range(first, last + 1):
                self._coming.pop(names[number], None)
            raise
        data = memoryview(reply.data)
        for number in range(first, last + 1):
            piece = into[names[number]] = data[number * PIECE - start : (number + 1) * PIECE - start]
            self._keep(names[number], piece)
        return reply.tag

    def _read(self, names: list[str]) -> dict[str, memoryview]:
        return {name: piece for name in names if (piece := self._disk.read(name)) is not None}

    def _name(self, wanted: Range, number: int) -> str:
        identity = "\0".join((self._place, wanted.key, wanted.version, str(wanted.size), str(PIECE), str(number)))
        return hashlib.sha256(identity.encode()).hexdigest()

    async def _write(self, name: str, piece: memoryview) -> bool:
        async with self._writers:
            return await self._engine.blocking(self._disk.write, name, piece)

    def _keep(self, name: str, piece: memoryview) -> None:
        """Write a piece to the disk; until it is there, it is found in `_coming`."""
        if len(self._writes) >= _BACKLOG:
            self._coming.pop(name, None)
            return
        writing = asyncio.ensure_future(self._write(name, piece))
        self._writes.add(writing)

        def written(done: asyncio.Future[bool]) -> None:
            self._writes.discard(done)
            self._coming.pop(name, None)
            _ignore(done)

        writing.add_done_callback(written)

    async def stat(self, key: str) -> ObjectStat:
        return await self._inner.stat(key)

    async def list(self, prefix: str) -> list[ObjectStat]:
        return await self._inner.list(prefix)

    async def put(self, key: str, data: bytes) -> None:
        await self._inner.put(key, data)

    async def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        return await self._inner.put_if(key, data, tag)

    async def delete(self, key: str) -> None:
        await self._inner.delete(key)


def _ignore(done: asyncio.Future[Any]) -> None:
    """Take note of a failure that nobody waited for."""
    if not done.cancelled():
        done.exception()


async def _part(asked: asyncio.Future[Reply], offset: int) -> memoryview:
    """One piece of an answer, for those who did not ask for it."""
    return memoryview((await asyncio.shield(asked)).data)[offset : offset + PIECE]


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each run of consecutive `numbers`."""
    for number in numbers:
        if number - 1 not in numbers:
            last = number
            while last + 1 in numbers:
                last += 1
            yield number, last
