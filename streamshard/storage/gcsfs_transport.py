"""Google Cloud Storage on the session and credentials that gcsfs configures.

The JSON interface is asked directly: gcsfs's own verbs retry behind a decorator constant, accept short answers and wait for
ever. Objects are pinned by generation. Zonal ("rapid") buckets need gRPC and are not reached this way.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

from streamshard.storage.body import PIECE, collect
from streamshard.storage.fault import (
    CHANGED,
    DENIED,
    EXPIRED,
    MISSING,
    TIMEOUT,
    TRANSIENT,
    StorageFault,
    check_answer,
    from_status,
)
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.store import ObjectStat, Range, Reply

_BOUNDARY = "streamshard-boundary"


class GcsfsTransport:
    """`Transport` over the aiohttp session of a gcsfs file system."""

    def __init__(self, filesystem: Any, url: str, policy: StoragePolicy) -> None:
        bucket, _, prefix = url.partition("://")[2].partition("/")
        self._filesystem = filesystem
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._policy = policy
        self._url = url
        self._location = filesystem._location  # noqa: SLF001  (no public name for the endpoint in use)
        self.endpoint = f"{self._location}/{bucket}"

    def __repr__(self) -> str:
        return f"GcsfsTransport({self._url!r})"

    def _object(self, key: str, *, path: str = "/storage/v1") -> str:
        return f"{self._location}{path}/b/{self._bucket}/o/{quote(self._prefix + key, safe='')}"

    async def _send(self, method: str, url: str, *, data: Any = None, **options: Any) -> Any:
        """The answer to one request, headers read and body not; an error status is a fault."""
        filesystem = self._filesystem
        headers = options.pop("headers", None)
        params = {name: str(value) for name, value in options.items() if value is not None}
        if filesystem.requester_pays:
            params["userProject"] = filesystem.project
        patience = self._policy.first_byte_s + len(data or b"") / max(1.0, self._policy.floor_bytes_s)
        try:
            async with asyncio.timeout(patience):
                session = await filesystem._set_session()  # noqa: SLF001
                # Applying credentials may refresh them with a blocking request: not on the loop.
                ready = await asyncio.to_thread(filesystem._get_headers, headers)  # noqa: SLF001
                answer = await session.request(method, url, params=params, headers=ready, data=data, timeout=None)
                if answer.status >= 400:
                    text = await answer.text(errors="replace")
                    raise _from_answer(answer.status, text, answer.headers.get("Retry-After"))
        except TimeoutError as error:
            raise StorageFault(TIMEOUT, f"no answer within {patience:g} s") from error
        except Exception as error:
            raise _translate(error) from error
        return answer

    async def _json(self, method: str, url: str, **options: Any) -> Any:
        answer = await self._send(method, url, **options)
        try:
            async with asyncio.timeout(self._policy.stall_s):
                return json.loads(await answer.read() or b"{}")
        except TimeoutError as error:
            raise StorageFault(TIMEOUT, "the answer stalled") from error
        except Exception as error:
            raise _translate(error) from error
        finally:
            answer.release()

    async def stat(self, key: str) -> ObjectStat:
        found = await self._json("GET", self._object(key))
        return ObjectStat(key, int(found["size"]), str(found.get("generation", "")))

    async def get(self, wanted: Range) -> Reply:
        asked = (wanted.start, wanted.stop)
        answer = await self._send(
            "GET", self._object(wanted.key, path="/download/storage/v1"), alt="media",
            generation=wanted.tag or None, headers={"Range": f"bytes={wanted.start}-{wanted.stop - 1}"},
        )  # fmt: skip
        tag = str(answer.headers.get("x-goog-generation", ""))
        try:
            size = check_answer(
                asked, wanted.tag, status=answer.status, content_range=answer.headers.get("Content-Range"), tag=tag,
                has_length="Content-Length" in answer.headers,
            )  # fmt: skip
            content = answer.content
            data = await collect(
                lambda: content.read(4 * PIECE), wanted.stop - wanted.start, self._policy, tag, _translate
            )
        except BaseException:
            answer.close()  # the connection is not fit for another request
            raise
        return Reply(data, tag, size)

    async def list(self, prefix: str) -> list[ObjectStat]:
        full = self._prefix + prefix + ("/" if prefix and not prefix.endswith("/") else "")
        stats: list[ObjectStat] = []
        token = None
        while True:
            url = f"{self._location}/storage/v1/b/{self._bucket}/o"
            page = await self._json("GET", url, prefix=full, pageToken=token)
            for item in page.get("items", ()):
                key = item["name"].removeprefix(self._prefix)
                if not key.endswith("/"):
                    stats.append(ObjectStat(key, int(item["size"]), str(item.get("generation", ""))))
            token = page.get("nextPageToken")
            if not token:
                return sorted(stats, key=lambda stat: stat.key)

    async def put(self, key: str, data: bytes) -> None:
        await self._upload(key, data, None)

    async def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        try:
            await self._upload(key, data, "0" if tag is None else tag)
        except StorageFault as fault:
            if fault.kind == CHANGED:
                return False
            raise
        return True

    async def _upload(self, key: str, data: bytes, generation: str | None) -> None:
        name = json.dumps({"name": self._prefix + key})
        head = f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{name}\r\n--{_BOUNDARY}\r\n"
        body = f"{head}Content-Type: application/octet-stream\r\n\r\n".encode() + data + f"\r\n--{_BOUNDARY}--".encode()
        await self._json(
            "POST", f"{self._location}/upload/storage/v1/b/{self._bucket}/o", uploadType="multipart",
            ifGenerationMatch=generation, data=body,
            headers={"Content-Type": f'multipart/related; boundary="{_BOUNDARY}"'},
        )  # fmt: skip

    async def delete(self, key: str) -> None:
        await self._json("DELETE", self._object(key))

    def refresh(self) -> bool:
        """google-auth renews a token when it is told that it is expired; tokens given as values cannot be."""
        credentials = getattr(self._filesystem.credentials, "credentials", None)
        if credentials is None or not hasattr(credentials, "refresh"):
            return False
        if type(credentials).__name__ == "Credentials" and not getattr(credentials, "refresh_token", True):
            return False
        credentials.token = None
        return True

    async def close(self) -> None:
        session = self._filesystem._session  # noqa: SLF001
        if session is not None:
            await session.close()


def _from_answer(status: int, text: str, retry_after: str | None) -> StorageFault:
    """A fault from GCS's JSON error, or whatever text came."""
    try:
        said = json.loads(text)["error"]
        message, details = str(said.get("message", "")), said.get("errors") or [{}]
        code = str(details[0].get("reason", ""))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        message, code = text[:300], ""
    return from_status(status, code, message, retry_after=retry_after)


def _translate(error: Exception) -> StorageFault:  # noqa: PLR0911  (a table)
    """What aiohttp, google-auth and the system raise, by their names."""
    if isinstance(error, StorageFault):
        return error
    if isinstance(error, FileNotFoundError):
        return StorageFault(MISSING, str(error))
    names = {kind.__name__ for kind in type(error).__mro__}
    text = f"{type(error).__name__}: {error}"
    if "RefreshError" in names:
        return StorageFault(EXPIRED, text)
    if "DefaultCredentialsError" in names or "HttpError" in names:
        return StorageFault(DENIED, text, cure="pass token in storage_options, or set GOOGLE_APPLICATION_CREDENTIALS")
    if "ClientConnectorCertificateError" in names or "ClientConnectorSSLError" in names:
        return StorageFault(DENIED, text, cure="set SSL_CERT_FILE to the certificate authority's file")
    if isinstance(error, TimeoutError):
        return StorageFault(TIMEOUT, text)
    return StorageFault(TRANSIENT, text)
