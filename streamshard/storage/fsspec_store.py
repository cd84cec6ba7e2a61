"""Object stores through fsspec. The only file that imports it, at first use: a training script on a directory never does.

S3 and GCS have transports of their own beside this file, on the clients that s3fs and gcsfs configure; every other file
system goes through `FsspecTransport`, which knows the verbs that all of them share and therefore no versions and no pieces.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from typing import Any

from streamshard.errors import UsageError
from streamshard.storage.engine import Engine, current_engine
from streamshard.storage.fault import CORRUPT, DENIED, MISSING, TIMEOUT, TRANSIENT, StorageFault
from streamshard.storage.gcsfs_transport import GcsfsTransport
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.s3fs_transport import S3fsTransport
from streamshard.storage.store import ObjectStat, Range, Reply, Transport

GCS, S3 = ("gs", "gcs"), ("s3", "s3a")


def connect_fsspec(url: str, options: dict[str, Any], policy: StoragePolicy, engine: Engine) -> Transport:
    """The transport for `url`; sends no request. Raises `UsageError` for a scheme or options that do not exist."""
    protocol = url.partition("://")[0]
    options = {"use_listings_cache": False, **deepcopy(options)}  # s3fs changes the dictionaries it is given
    try:
        if protocol in S3:
            return S3fsTransport(_filesystem(url, _s3_options(options, policy)), url, policy)
        if protocol in GCS:
            if not logging.getLogger("gcsfs").level:
                # It logs the traceback of every failure that it also raises; ours carries it as its cause.
                logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
            return GcsfsTransport(_gcs_filesystem({"requests_timeout": 3600, **options}), url, policy)
        filesystem, root = import_module("fsspec.core").url_to_fs(url, **options)
        return FsspecTransport(filesystem, url, root.rstrip("/"), engine, policy)
    except ImportError as error:
        package = "streamshard[gcs]" if protocol in GCS else f"the fsspec driver for {protocol}"
        raise UsageError(f"{url} needs a package that is not installed ({error}); pip install {package}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{url} cannot be opened ({error}); check the URL's scheme and storage_options") from error


def _filesystem(url: str, options: dict[str, Any]) -> Any:
    return import_module("fsspec.core").url_to_fs(url, asynchronous=True, skip_instance_cache=True, **options)[0]


def _s3_options(options: dict[str, Any], policy: StoragePolicy) -> dict[str, Any]:
    """s3fs and botocore with their own retries and pools out of the way: one GET is one request."""
    ours = {
        "max_pool_connections": policy.limit_max + 16,  # hedges and writes have room beside the limit
        "connect_timeout": policy.connect_s,
        "read_timeout": policy.deadline_s,  # ours are shorter, and know the difference between slow and dead
    }
    given = options.get("config_kwargs", {})
    options["config_kwargs"] = {**ours, **given, "retries": {"total_max_attempts": 1, "mode": "standard"}}
    return options


def _gcs_filesystem(options: dict[str, Any]) -> Any:
    """Gcsfs asks every bucket over gRPC what kind it is, and at an emulator, which does not answer, it waits for a minute;
    its plain filesystem class does not ask, and reading needs no more.
    """
    plain = import_module("gcsfs.core").GCSFileSystem
    emulated = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    if emulated and "project" not in options:
        options["project"] = "emulated"
    return plain(asynchronous=True, skip_instance_cache=True, **options)


def make_bucket(protocol: str, name: str, options: dict[str, Any]) -> None:
    """Create a bucket: for test servers and demonstrations, nothing else here ever does."""
    engine = current_engine()

    async def make() -> None:
        transport: Any = connect_fsspec(f"{protocol}://{name}", options, StoragePolicy(), engine)
        try:
            await transport.make_bucket(name)
        finally:
            await transport.close()

    engine.run(make())


class FsspecTransport:
    """Any fsspec file system, by the verbs that all have. Blocking ones run on threads beside the loop."""

    def __init__(self, filesystem: Any, url: str, root: str, engine: Engine, policy: StoragePolicy) -> None:
        self.endpoint = url.partition("://")[0] + "://" + url.partition("://")[2].partition("/")[0]
        self._filesystem = filesystem
        self._root = root
        self._url = url
        self._engine = engine
        self._patience = policy.deadline_s

    def __repr__(self) -> str:
        return f"FsspecTransport({self._url!r})"

    async def _call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """One blocking verb of the file system (those of asynchronous ones wait for fsspec's own loop)."""
        method: Callable[..., Any] = getattr(self._filesystem, verb)
        try:
            async with asyncio.timeout(self._patience):  # the call itself cannot be ended; its thread is given up
                return await self._engine.blocking(lambda: method(*arguments, **options))
        except Exception as error:
            raise _translate(error) from error

    async def stat(self, key: str) -> ObjectStat:
        info = await self._call("info", f"{self._root}/{key}")
        return ObjectStat(key, int(info["size"]), _tag(info))

    async def get(self, wanted: Range) -> Reply:
        data: bytes = await self._call("cat_file", f"{self._root}/{wanted.key}", start=wanted.start, end=wanted.stop)
        if len(data) != wanted.stop - wanted.start:
            raise StorageFault(
                CORRUPT,
                f"asked for bytes {wanted.start} to {wanted.stop}, got {len(data)}: the object has fewer bytes "
                f"than the manifest says, or the store ignores ranges",
            )
        return Reply(data, "", None)

    async def list(self, prefix: str) -> list[ObjectStat]:
        path = f"{self._root}/{prefix}"
        root = path[: len(path) - len(prefix)]
        found = await self._call("find", path, detail=True)
        root = root.lstrip("/") if found and not next(iter(found)).startswith(root) else root
        stats = [ObjectStat(name.removeprefix(root), int(info["size"]), _tag(info)) for name, info in found.items()]
        return sorted(stats, key=lambda stat: stat.key)

    async def put(self, key: str, data: bytes) -> None:
        path = f"{self._root}/{key}"
        await self._call("makedirs", path.rpartition("/")[0], exist_ok=True)
        await self._call("pipe_file", path, data)

    async def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        """Looks first, then writes: these file systems have no conditional writes."""
        try:
            current: str | None = (await self.stat(key)).tag
        except StorageFault as fault:
            if fault.kind != MISSING:
                raise
            current = None
        if current != tag:
            return False
        await self.put(key, data)
        return True

    async def delete(self, key: str) -> None:
        await self._call("rm_file", f"{self._root}/{key}")

    def refresh(self) -> bool:
        return False

    async def close(self) -> None:
        return None


def _tag(info: dict[str, Any]) -> str:
    for name in ("generation", "ETag", "etag", "mtime", "LastModified", "created"):
        if info.get(name):
            return str(info[name])
    return ""


def _translate(error: Exception) -> StorageFault:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, FileNotFoundError):
        return StorageFault(MISSING, text)
    if isinstance(error, PermissionError):
        return StorageFault(DENIED, text, cure="check the credentials in storage_options or the environment")
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return StorageFault(TIMEOUT, text)
    return StorageFault(TRANSIENT, text)
