"""What the rest asks of an object store: a few verbs, bytes in and out. Every transport and wrapper has these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """Key, size in bytes, and a tag that changes when the object is replaced (ETag, generation, inode and mtime)."""

    key: str
    size: int
    tag: str


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
