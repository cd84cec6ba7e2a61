"""A bounded directory of verified byte strings, shared by the processes of a machine. Plain file calls; no daemon.

The directory is ours alone: whatever else is in it would be counted, and removed in its turn.

A file's name is a hash of what it is a copy of, so a file is never changed, only written and removed. It appears by rename
and carries a digest of its content: what a killed process or a bad disk leaves behind is at worst removed by a reader. How
many bytes there are is kept in one file under a lock (released by the kernel when its holder dies) and is never less than
the truth; when it would pass the bound, the directory is counted anew and the files read longest ago are removed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from streamshard.storage.local_store import locked

_logger = logging.getLogger("streamshard")

_MAGIC = b"streamshard-cache-1\n"
_DIGEST = 16
_HEADER = len(_MAGIC) + _DIGEST
_KEEP = 0.9  # of the bound, after removing: not every write should have to look at the whole directory
_STALE_S = 600.0  # a temporary file as old as this belongs to a process that died
_PAUSE_S = 60.0  # after a failed write (disk full) nothing is written for so long


class Disk:
    """Byte strings by name, at most `limit` bytes of them. Safe for threads and processes; holds no open files."""

    def __init__(self, directory: str, limit: int) -> None:
        self._root = Path(directory)
        self._limit = limit
        self._off_until = 0.0

    def __repr__(self) -> str:
        return f"Disk({str(self._root)!r})"

    def read(self, name: str) -> memoryview | None:
        """The content, verified; None if it is not here (any more) or damaged, in which case it is removed."""
        path = self._root / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            with open(descriptor, "rb") as file:
                data = memoryview(file.read())
                with suppress(OSError):
                    os.utime(file.fileno())  # for the order of removal
            if bytes(data[: len(_MAGIC)]) == _MAGIC and bytes(data[len(_MAGIC) : _HEADER]) == _digest(data[_HEADER:]):
                return data[_HEADER:]
        except OSError as error:
            _logger.warning("cache file %s cannot be read (%s): fetching it again", path, error)
        self.remove(name)
        return None

    def remove(self, name: str) -> None:
        """Let go of a file, if it is here."""
        with suppress(OSError):
            (self._root / name).unlink()

    def write(self, name: str, data: memoryview | bytes) -> bool:
        """Keep a copy of `data`, making room if need be. False if it was not kept: too large, or the disk refuses."""
        path, size = self._root / name, len(data) + _HEADER
        if size > self._limit or time.monotonic() < self._off_until or path.exists():
            return False
        # Its size is in its name: what is being written counts whole from the start.
        temporary = self._root / f".tmp-{size}-{secrets.token_hex(8)}"
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._root / ".lock"):
                self._reserve(size)
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(_MAGIC + _digest(data))
                file.write(data)
            temporary.replace(path)
        except OSError as error:
            told, self._off_until = self._off_until, time.monotonic() + _PAUSE_S
            if told < time.monotonic():  # the first of several threads that fail together
                _logger.warning(
                    "the cache in %s cannot be written (%s): going on without it for a minute", self._root, error
                )
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return False
        return True

    def _reserve(self, size: int) -> None:
        """Count `size` more bytes, after removing others if they would not fit. The lock is held."""
        counter = self._root / ".bytes"
        try:
            total = int(counter.read_text())
        except (FileNotFoundError, ValueError):
            total = self._limit  # unknown: count
        if total + size > self._limit:
            total = self._make_room(size)
        counter.write_text(str(total + size))

    def _make_room(self, size: int) -> int:
        """Remove the longest unread files until `size` bytes fit; returns the bytes that are left."""
        files, total = [], 0
        for entry in os.scandir(self._root):
            if entry.name.startswith(".tmp-"):  # counts whole, also if it gets its final name just now
                total += int(entry.name.split("-")[1])
            with suppress(FileNotFoundError):
                stat = entry.stat(follow_symlinks=False)
                if entry.name.startswith(".tmp-") and time.time() - stat.st_mtime > _STALE_S:
                    os.unlink(entry.path)
                    total -= int(entry.name.split("-")[1])
                elif not entry.name.startswith("."):
                    total += stat.st_size
                    files.append((stat.st_mtime, stat.st_size, entry.path))
        allowed = self._limit - size if total + size <= self._limit else int(self._limit * _KEEP) - size
        for _, removed, path in sorted(files):
            if total <= allowed:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= removed
        return total


def _digest(data: memoryview | bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()
