"""From a URL to a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from streamshard.errors import UsageError
from streamshard.observe.events import Hook
from streamshard.storage.cache import PIECE
from streamshard.storage.disk import Disk
from streamshard.storage.local_store import LocalStore
from streamshard.storage.obstore_store import available
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.remote_store import RemoteStore
from streamshard.storage.store import Store

CACHE_BYTES = 32 << 30
LEAST_CACHE = 4 * PIECE
CACHE_FOLDER = "streamshard-cache-1"  # inside of cache_dir, which may hold other things


def open_store(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    transport: str | None = None,
    policy: StoragePolicy | None = None,
    hook: Hook | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> Store:
    """The store for `url`: a path or ``file://`` is a directory, everything else is remote.

    No request is sent yet. `storage_options` are those of the fsspec filesystem (``key``, ``secret``,
    ``endpoint_url``, ``anon``, ``token`` ...), whatever the transport.
    transport: ``"obstore"`` or ``"fsspec"``; default obstore where it is installed, knows the scheme and has a word for
        every option, else fsspec.
    policy: retries, limits and time-outs. hook: receives the records of `streamshard.observe.events`.
    cache_dir, cache_bytes: keep what is read of shards in this directory, at most so many bytes of it.
    """
    url = str(url)
    if not url:
        raise UsageError("the dataset URL is empty; pass a directory or a URL such as s3://bucket/corpus")
    if transport not in (None, "obstore", "fsspec"):
        raise UsageError(f"transport={transport!r}: choose 'obstore' or 'fsspec', or leave it out")
    if transport == "obstore" and not available():
        raise UsageError("transport='obstore' needs the package obstore; pip install streamshard[fast]")
    if policy is not None and not isinstance(policy, StoragePolicy):
        raise UsageError(f"policy={policy!r} of type {type(policy).__name__} must be a StoragePolicy")
    if not isinstance(cache_bytes, int) or isinstance(cache_bytes, bool) or cache_bytes < LEAST_CACHE:
        raise UsageError(f"cache_bytes={cache_bytes!r} must be an int >= {LEAST_CACHE} (a few pieces of {PIECE} bytes)")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        if storage_options:
            raise UsageError(
                f"storage_options={sorted(storage_options)} mean nothing for the directory {url!r}; leave them out"
            )
        if cache_dir is not None:
            raise UsageError(f"cache_dir={str(cache_dir)!r} for the directory {url!r} would copy it; leave it out")
        return LocalStore(rest if separator else url)
    disk = (
        None
        if cache_dir is None
        else Disk(os.path.join(os.path.abspath(os.path.expanduser(cache_dir)), CACHE_FOLDER), cache_bytes)
    )
    return RemoteStore(url, dict(storage_options or {}), transport=transport, policy=policy, hook=hook, disk=disk)
