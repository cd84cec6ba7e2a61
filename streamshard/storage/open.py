"""From a URL to a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamshard.errors import UsageError
from streamshard.observe.events import Hook
from streamshard.storage.local_store import LocalStore
from streamshard.storage.obstore_store import available
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.remote_store import RemoteStore
from streamshard.storage.store import Store


def open_store(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    transport: str | None = None,
    policy: StoragePolicy | None = None,
    hook: Hook | None = None,
) -> Store:
    """The store for `url`: a path or ``file://`` is a directory, everything else is remote.

    No request is sent yet. `storage_options` are those of the fsspec filesystem (``key``, ``secret``,
    ``endpoint_url``, ``anon``, ``token`` ...), whatever the transport.
    transport: ``"obstore"`` or ``"fsspec"``; default obstore where it is installed, knows the scheme and has a word for
        every option, else fsspec.
    policy: retries, limits and time-outs. hook: receives the records of `streamshard.observe.events`.
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
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        if storage_options:
            raise UsageError(
                f"storage_options={sorted(storage_options)} mean nothing for the directory {url!r}; leave them out"
            )
        return LocalStore(rest if separator else url)
    return RemoteStore(url, dict(storage_options or {}), transport=transport, policy=policy, hook=hook)
