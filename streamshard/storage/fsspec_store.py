"""Object stores through fsspec: S3 and compatibles (s3fs), Google Cloud Storage (gcsfs), memory, and whatever else it has.

The only file that imports ``fsspec``. What it adds: a client per process (clients do not survive a fork), listings never
cached (a cached one hides what another process wrote), every answer's length checked (s3fs and gcsfs accept short ones),
conditional writes, and errors of one kind whatever the library raises.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from typing import Any

import fsspec

from streamshard.errors import StorageError, UsageError
from streamshard.storage.store import ObjectStat


class FsspecStore:
    """Objects below an fsspec URL. Thread-safe; picklable: options travel, clients do not."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._protocol = url.partition("://")[0]
        self._url = url.rstrip("/")
        self._options = options
        self._client: tuple[int, Any, str] | None = None

    def __repr__(self) -> str:
        return f"FsspecStore({self._url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    @property
    def url(self) -> str:
        return self._url

    def _open(self, key: str) -> tuple[Any, str]:
        """(filesystem, full path of `key`); the filesystem is made once per process."""
        if self._client is None or self._client[0] != os.getpid():
            self._client = (os.getpid(), *_connect(self._protocol, self._url, self._options))
        _, filesystem, root = self._client
        return filesystem, f"{root}/{key}"

    def stat(self, key: str) -> ObjectStat:
        with self._translated(key):
            filesystem, path = self._open(key)
            info = filesystem.info(path)
        return ObjectStat(key, int(info["size"]), _tag(info))

    def get(self, key: str, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        with self._translated(key):
            filesystem, path = self._open(key)
            data: bytes = filesystem.cat_file(path, start=start, end=stop)
        if len(data) != stop - start:
            raise StorageError(
                f"{self._url}/{key}: asked for bytes {start} to {stop}, got {len(data)}: the object is shorter than the "
                f"manifest says, or the store ignores ranges",
                kind="corrupt",
            )
        return data

    def read(self, key: str) -> bytes:
        with self._translated(key):
            filesystem, path = self._open(key)
            size = int(filesystem.info(path)["size"])
        # As a checked range: a plain read of an object over 50 MB can come back with zeroed holes (s3fs).
        return self.get(key, 0, size)

    def list(self, prefix: str) -> list[ObjectStat]:
        with self._translated(prefix):
            filesystem, path = self._open(prefix)
            root = path[: len(path) - len(prefix)]
            found = filesystem.find(path, detail=True)
        stats = [ObjectStat(name.removeprefix(root), int(info["size"]), _tag(info)) for name, info in found.items()]
        return sorted(stats, key=lambda stat: stat.key)

    def put(self, key: str, data: bytes) -> None:
        with self._translated(key):
            filesystem, path = self._open(key)
            if self._protocol not in ("s3", "s3a", "gs", "gcs"):  # object stores have no folders to make
                filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(path, data)

    def put_if(self, key: str, data: bytes, *, tag: str | None) -> bool:
        """Looks first, then writes under a condition where the protocol has one (S3, GCS)."""
        try:
            current: str | None = self.stat(key).tag
        except StorageError as error:
            if error.kind != "missing":
                raise
            current = None
        if current != tag:
            return False
        write = {"s3": _s3_put_if, "s3a": _s3_put_if, "gs": _gcs_put_if, "gcs": _gcs_put_if}.get(self._protocol)
        if write is None:
            self.put(key, data)
            return True
        with self._translated(key):
            filesystem, path = self._open(key)
            return write(filesystem, path, data, tag)

    def delete(self, key: str) -> None:
        try:
            with self._translated(key):
                filesystem, path = self._open(key)
                filesystem.rm_file(path)
        except StorageError as error:
            if error.kind != "missing":
                raise

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Whatever a transport raises becomes a `StorageError` that names the object and a cure."""
        try:
            yield
        except (StorageError, UsageError):
            raise
        except FileNotFoundError as error:
            raise StorageError(
                f"{self._url}/{key}: no such object; check the URL and the bucket's name", kind="missing"
            ) from error
        except PermissionError as error:
            raise StorageError(
                f"{self._url}/{key}: access denied ({error}); check the credentials in storage_options or the environment",
                kind="denied",
            ) from error
        except Exception as error:  # botocore, aiohttp and google errors have no common base; this is the boundary
            raise StorageError(
                f"{self._url}/{key}: {type(error).__name__}: {error}; check that the endpoint is right and reachable",
                kind="transient",
            ) from error


def _connect(protocol: str, url: str, options: dict[str, Any]) -> tuple[Any, str]:
    options = {"use_listings_cache": False, **deepcopy(options)}  # s3fs changes the dictionaries it is given
    if protocol in ("s3", "s3a"):
        options["config_kwargs"] = {"max_pool_connections": 64, **options.get("config_kwargs", {})}
    try:
        if protocol in ("gs", "gcs") and not logging.getLogger("gcsfs").level:
            # It logs the traceback of every failure that it also raises; ours carries it as its cause.
            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        if _emulates_gcs(protocol, options):
            plain = import_module("gcsfs.core").GCSFileSystem
            return plain(**options), plain._strip_protocol(url).rstrip("/")  # noqa: SLF001  (fsspec's own verb for it)
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = {"gs": "streamshard[gcs]", "gcs": "streamshard[gcs]"}.get(
            protocol, f"the fsspec driver for {protocol}"
        )
        raise UsageError(f"{url} needs a package that is not installed ({error}); pip install {package}") from error
    except ValueError as error:
        raise UsageError(f"{url} cannot be opened ({error}); check the URL's scheme and storage_options") from error
    return filesystem, root.rstrip("/")


def make_bucket(protocol: str, name: str, options: dict[str, Any]) -> None:
    """Create a bucket: for test servers and demonstrations, nothing else here ever does."""
    filesystem, _ = _connect(protocol, f"{protocol}://{name}", options)
    filesystem.mkdir(name)


def _emulates_gcs(protocol: str, options: dict[str, Any]) -> bool:
    """Whether a GCS URL means an emulator. gcsfs asks every bucket over gRPC what kind it is, and at an emulator, which does
    not answer, it waits for a minute; its plain filesystem class does not ask.
    """
    return protocol in ("gs", "gcs") and bool(options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST"))


def _tag(info: dict[str, Any]) -> str:
    for name in ("generation", "ETag", "etag", "mtime", "LastModified", "created"):
        if info.get(name):
            return str(info[name])
    return ""


def _s3_put_if(filesystem: Any, path: str, data: bytes, tag: str | None) -> bool:
    bucket, key, _ = filesystem.split_path(path)
    condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
    try:
        filesystem.call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)
    except FileExistsError:
        return False
    except OSError as error:
        if "PreconditionFailed" in repr(error.__cause__) or "PreconditionFailed" in str(error):
            return False
        raise
    return True


def _gcs_put_if(filesystem: Any, path: str, data: bytes, tag: str | None) -> bool:
    bucket, key, _ = filesystem.split_path(path)
    boundary = "streamshard-boundary"
    head = f'--{boundary}\nContent-Type: application/json; charset=UTF-8\n\n{{"name": "{key}"}}\n--{boundary}\n'
    body = f"{head}Content-Type: application/octet-stream\n\n".encode() + data + f"\n--{boundary}--".encode()
    try:
        filesystem.call(
            "POST",
            f"{filesystem._location}/upload/storage/v1/b/{bucket}/o",  # noqa: SLF001  (no public name for it)
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{boundary}"'},
            ifGenerationMatch=0 if tag is None else tag,
            data=body,
            json_out=True,
        )
    except FileExistsError:
        return False
    return True
