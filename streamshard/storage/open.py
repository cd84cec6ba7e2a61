"""From a URL to a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamshard.errors import UsageError
from streamshard.storage.fsspec_store import FsspecStore
from streamshard.storage.local_store import LocalStore
from streamshard.storage.store import Store


def open_store(url: str, storage_options: Mapping[str, Any] | None = None) -> Store:
    """The store for `url`: a path or ``file://`` is a directory, everything else goes through fsspec.

    No request is sent yet. `storage_options` are those of the fsspec filesystem (``key``, ``secret``,
    ``endpoint_url``, ``anon``, ``token`` ...).
    """
    url = str(url)
    if not url:
        raise UsageError("the dataset URL is empty; pass a directory or a URL such as s3://bucket/corpus")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        if storage_options:
            raise UsageError(
                f"storage_options={sorted(storage_options)} mean nothing for the directory {url!r}; leave them out"
            )
        return LocalStore(rest if separator else url)
    return FsspecStore(url, dict(storage_options or {}))
