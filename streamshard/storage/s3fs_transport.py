"""S3 and compatibles on the client that s3fs configures: credentials, endpoints and addressing are its business.

The client is asked directly, not through s3fs's file verbs: those retry by themselves, accept short answers, and cannot pin
a version. Errors are told apart by what botocore's carry, without importing it.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from streamshard.storage.body import PIECE, collect
from streamshard.storage.fault import (
    CHANGED,
    DENIED,
    TIMEOUT,
    TRANSIENT,
    StorageFault,
    check_answer,
    from_status,
)
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.store import ObjectStat, Range, Reply

_TIMEOUTS = ("ReadTimeoutError", "ConnectTimeoutError", "AioReadTimeoutError", "ServerTimeoutError")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
                   "SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError")  # fmt: skip
_CONFIGURATION = (
    "ParamValidationError",
    "UnsupportedSignatureVersionError",
    "EndpointProviderError",
    "InvalidConfigError",
)


class S3fsTransport:
    """`Transport` over the aiobotocore client of an s3fs file system."""

    def __init__(self, filesystem: Any, url: str, policy: StoragePolicy) -> None:
        bucket, _, prefix = url.partition("://")[2].partition("/")
        self._filesystem = filesystem
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._policy = policy
        self._url = url
        self._stale: list[Any] = []
        given = filesystem.client_kwargs.get("endpoint_url") or filesystem.endpoint_url
        self.endpoint = f"{given or 's3.amazonaws.com'}/{bucket}"

    def __repr__(self) -> str:
        return f"S3fsTransport({self._url!r})"

    async def _client(self) -> Any:
        await self._filesystem.set_session()
        return await self._filesystem.get_s3(self._bucket)

    async def _call(self, verb: str, **arguments: Any) -> Any:
        """One request, within the time for an answer."""
        if self._filesystem.requester_pays:
            arguments["RequestPayer"] = "requester"
        patience = self._policy.first_byte_s + len(arguments.get("Body", b"")) / max(1.0, self._policy.floor_bytes_s)
        try:
            async with asyncio.timeout(patience):
                client = await self._client()
                return await getattr(client, verb)(Bucket=self._bucket, **arguments)
        except TimeoutError as error:
            raise StorageFault(TIMEOUT, f"no answer within {patience:g} s") from error
        except Exception as error:
            raise _translate(error) from error

    async def stat(self, key: str) -> ObjectStat:
        found = await self._call("head_object", Key=self._prefix + key)
        return ObjectStat(key, int(found["ContentLength"]), str(found.get("ETag", "")))

    async def get(self, wanted: Range) -> Reply:
        asked = (wanted.start, wanted.stop)
        pin = {"IfMatch": wanted.tag} if wanted.tag else {}
        span = f"bytes={wanted.start}-{wanted.stop - 1}"
        answer = await self._call("get_object", Key=self._prefix + wanted.key, Range=span, **pin)
        body, tag = answer["Body"], str(answer.get("ETag", ""))
        try:
            size = check_answer(
                asked, wanted.tag, status=answer["ResponseMetadata"]["HTTPStatusCode"],
                content_range=answer.get("ContentRange"), tag=tag, has_length=answer.get("ContentLength") is not None,
            )  # fmt: skip
            data = await collect(
                lambda: body.read(4 * PIECE), wanted.stop - wanted.start, self._policy, tag, _translate
            )
        except BaseException:
            body.close()  # the connection is not fit for another request
            raise
        return Reply(data, tag, size)

    async def list(self, prefix: str) -> list[ObjectStat]:
        stats: list[ObjectStat] = []
        more: dict[str, Any] = {}
        full = self._prefix + prefix + ("/" if prefix and not prefix.endswith("/") else "")
        while True:
            page = await self._call("list_objects_v2", Prefix=full, **more)
            for entry in page.get("Contents", ()):
                key = entry["Key"].removeprefix(self._prefix)
                if not key.endswith("/"):  # a folder's marker
                    stats.append(ObjectStat(key, int(entry["Size"]), str(entry.get("ETag", ""))))
            if not page.get("IsTruncated"):
                return sorted(stats, key=lambda stat: stat.key)
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def put(self, key: str, data: bytes) -> None:
        await self._call("put_object", Key=self._prefix + key, Body=data)

    async def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            await self._call("put_object", Key=self._prefix + key, Body=data, **condition)
        except StorageFault as fault:
            if fault.kind == CHANGED or fault.status == 409:  # ConditionalRequestConflict: another one is being written
                return False
            raise
        return True

    async def delete(self, key: str) -> None:
        await self._call("delete_object", Key=self._prefix + key)

    async def make_bucket(self, name: str) -> None:
        """Create a bucket, for test servers."""
        client = await self._client()
        await client.create_bucket(Bucket=name)

    def refresh(self) -> bool:
        """New credentials come with a new session, unless they were given as values."""
        filesystem = self._filesystem
        if filesystem.key or filesystem.anon or "aws_access_key_id" in filesystem.client_kwargs:
            return False
        credentials = getattr(filesystem.session, "_credentials", None)
        if getattr(credentials, "method", "") == "env":
            return False
        self._stale.append(filesystem._s3creator)  # noqa: SLF001  (requests under way still use it; closed with the rest)
        filesystem._s3 = None  # noqa: SLF001
        if filesystem._session_is_owned:  # noqa: SLF001
            filesystem.session = None
        return True

    async def close(self) -> None:
        for creator in (*self._stale, getattr(self._filesystem, "_s3creator", None)):
            if creator is not None:
                await creator.__aexit__(None, None, None)


def _translate(error: Exception) -> StorageFault:  # noqa: PLR0911  (a table)
    """What botocore, aiobotocore, aiohttp and the system raise, by their values and names."""
    if isinstance(error, StorageFault):
        return error
    answer = getattr(error, "response", None)
    if isinstance(answer, dict) and "Error" in answer:
        meta = answer.get("ResponseMetadata", {})
        said = answer["Error"]
        return from_status(
            int(meta.get("HTTPStatusCode", 0)), str(said.get("Code", "")), str(said.get("Message", "")),
            retry_after=meta.get("HTTPHeaders", {}).get("retry-after"),
        )  # fmt: skip
    names = {kind.__name__ for kind in type(error).__mro__}
    text = f"{type(error).__name__}: {error}"
    if names & set(_NO_CREDENTIALS):
        return StorageFault(
            DENIED, text, cure="pass key and secret, or anon=True, in storage_options, or set up the environment"
        )
    if names & set(_CONFIGURATION):
        return StorageFault(DENIED, text, cure="check storage_options")
    if "SSLError" in names or isinstance(error.__cause__, ssl.SSLError):
        cure = "for a private certificate authority pass client_kwargs={'verify': '/path/ca.pem'}"
        return StorageFault(DENIED, text, cure=cure)
    if names & set(_TIMEOUTS) or isinstance(error, TimeoutError):
        return StorageFault(TIMEOUT, text)
    return StorageFault(TRANSIENT, text)
