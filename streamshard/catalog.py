"""Manifests in a store: find the current one, find an old version, publish a new one.

``manifest.json`` is the only mutable object of a dataset and is written last, so that a reader sees the dataset before or
after a commit and nothing in between. Every version also stays as ``manifests/<version>.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from streamshard.errors import DataError, StorageError, UsageError
from streamshard.shard.manifest import MANIFEST_KEY, Manifest, decode_manifest
from streamshard.storage.open import open_store
from streamshard.storage.store import Store


def open_manifest(url: str, *, storage_options: Mapping[str, Any] | None = None) -> Manifest:
    """The current manifest of the dataset at `url`.

    Raises `StorageError` (kind ``missing`` when there is no dataset) and `DataError` (a damaged or unknown manifest).
    """
    return load_manifest(open_store(url, storage_options))


def _read_manifest(store: Store, key: str, where: str) -> Manifest:
    """The manifest under `key`; wrong bytes are read once more before they are an error."""
    try:
        return decode_manifest(store.read(key), where=where)
    except DataError:
        return decode_manifest(store.read(key), where=where)


def load_manifest(store: Store, version: str | None = None) -> Manifest:
    """The manifest with `version` (SHA-256, hexadecimal), or the current one. It has at least one sample."""
    key = MANIFEST_KEY if version is None else version_key(version)
    where = f"{store.url}/{key}"
    try:
        manifest = _read_manifest(store, key, where)
    except StorageError as error:
        if error.kind != "missing":
            raise
        raise StorageError(
            f"{where} does not exist: there is no finished dataset here; check the URL, or write one with "
            f"streamshard.DatasetWriter (a writer publishes when it is closed, commit_writers for parallel ones)",
            kind="missing",
        ) from error
    if version is not None and manifest.version != version:
        raise DataError(
            f"{where} holds version {manifest.version}; restore the file, or start a run with the current version"
        )
    if manifest.total_samples == 0:
        raise DataError(f"{where} lists {len(manifest)} shards with 0 samples; write samples before reading")
    return manifest


def version_key(version: str) -> str:
    """Where a version's manifest is kept for good."""
    return f"manifests/{version}.json"


def current_tag(store: Store) -> str | None:
    """The tag of ``manifest.json``; None when there is no dataset yet."""
    try:
        return store.stat(MANIFEST_KEY).tag
    except StorageError as error:
        if error.kind == "missing":
            return None
        raise


def publish(store: Store, manifest: Manifest, *, tag: str | None) -> None:
    """Make `manifest` the current one, if ``manifest.json`` still has `tag` (None: does not exist).

    Raises `UsageError` when another commit came in between: nothing of either is lost, since shards are named by content.
    """
    data = manifest.encode(created=datetime.now(UTC).isoformat(timespec="seconds"))
    store.put(version_key(manifest.version), data)
    if not store.put_if(MANIFEST_KEY, data, tag=tag):
        raise UsageError(
            f"{store.url}/{MANIFEST_KEY} was written by another commit while this one was under way; its dataset is "
            f"intact and the shards written here are not part of it. Write them again with append=True"
        )
