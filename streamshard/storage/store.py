"""What the rest asks of an object store, and what storage asks of a transport. A few verbs, bytes in and out."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from streamshard.observe.events import StorageCounters


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """Key, size in bytes, and a tag that changes when the object is replaced (ETag, generation, inode and mtime)."""

    key: str
    size: int
    tag: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A range of an object, the tag of the version it is from ("" where the store says none), and the object's size."""

    data: bytes | memoryview
    tag: str
    size: int | None


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, stop) of an object.

    tag: only of this version of the object; a different one is kind ``changed``.
    version: a name for the content that is known without asking the store (a digest in a manifest), with `size`, the
        object's: with both the range may come from a cache.
    urgent: somebody waits for it now; it goes before the others.
    fresh: not from a cache: what came from there was wrong.
    """

    key: str
    start: int
    stop: int
    tag: str = ""
    version: str = ""
    size: int = 0
    urgent: bool = True
    fresh: bool = False


class Store(Protocol):
    """Objects under one URL, by relative key.

    Implementations are picklable, open clients lazily in each process, and may be used by several threads. Every verb
    raises `StorageError`, whose ``kind`` says why.
    """

    @property
    def url(self) -> str:
        """Where this store's keys begin, without credentials: for messages."""

    def stat(self, key: str) -> ObjectStat:
        """Size and tag of an object."""

    def get(self, key: str, start: int, stop: int) -> bytes:
        """Exactly the bytes [start, stop) of an object; a short or long answer is kind ``corrupt``."""

    def fetch(self, wanted: Range) -> Future[Reply]:
        """Begin to get a range. Cancelling the future ends the request."""

    def allowance(self) -> float:
        """How many requests may be in flight just now, 1.0 or more; it falls while the store throttles."""

    def look_ahead(self, streams: int) -> int:
        """Bytes worth fetching ahead of a reader of so many places at once, where the user has not said."""

    def counters(self) -> StorageCounters:
        """What was asked of the store in this process so far."""

    def read(self, key: str) -> bytes:
        """A whole object (manifests and other small ones)."""

    def list(self, prefix: str) -> list[ObjectStat]:
        """Objects below the folder `prefix`, by key."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object whole: readers see the old content or the new one, never a part."""

    def put_if(self, key: str, data: bytes, *, tag: str | None) -> bool:
        """Write an object only if its tag is still `tag` (None: only if there is no object); False otherwise.

        Decides a race between two processes where the store has conditional writes; docs/format.md says which do.
        """

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine."""


class Transport(Protocol):
    """One library's way to a store. Every verb is one attempt: one request, no retries; failures are `StorageFault`.

    Used on one event loop. Wrappers (`Resilient`, `Cached`) have the verbs on objects and raise `StorageError`.
    """

    endpoint: str  # what throttles as one, for messages and limits

    async def stat(self, key: str) -> ObjectStat: ...
    async def get(self, wanted: Range) -> Reply: ...
    async def list(self, prefix: str) -> list[ObjectStat]: ...
    async def put(self, key: str, data: bytes) -> None: ...
    async def put_if(self, key: str, data: bytes, tag: str | None) -> bool: ...
    async def delete(self, key: str) -> None: ...

    def refresh(self) -> bool:
        """Get new credentials for the next request; False where they are fixed."""

    async def close(self) -> None:
        """End connections."""
