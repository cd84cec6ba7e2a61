"""Object stores through obstore (Rust's object_store): requests that hold no GIL. The only file that imports it, at first
use.

obstore shows an error's HTTP status and code only in its text, and Retry-After not at all; hence its narrow version range,
and a test of every pattern below against real answers.

Its runtime does not survive a fork: a child of a process that has used it waits for ever for its first answer. So a fork
is noticed (`unusable_here`), and the child is given fsspec instead.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamshard.errors import UsageError
from streamshard.storage.body import PIECE, collect
from streamshard.storage.fault import (
    CHANGED,
    CORRUPT,
    DENIED,
    MISSING,
    TIMEOUT,
    TRANSIENT,
    StorageFault,
    check_range,
    from_status,
)
from streamshard.storage.obstore_options import StoreArguments, gcs_arguments, other_arguments, s3_arguments
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.store import ObjectStat, Range, Reply

SCHEMES = {
    "s3": "S3",
    "s3a": "S3",
    "gs": "GCS",
    "gcs": "GCS",
    "az": "Azure",
    "abfs": "Azure",
    "abfss": "Azure",
    "adl": "Azure",
}
_LIST_CHUNK = 1000
_PIECE_S, _MOST_PIECE = 0.1, 1 << 20
_process = {"forked_after_use": False}


def available() -> bool:
    """Whether obstore (the extra streamshard[fast]) is installed."""
    return find_spec("obstore") is not None


def unusable_here() -> bool:
    """Whether this process was forked from one in which obstore's runtime was running."""
    return _process["forked_after_use"]


def is_emulator(url: str, options: dict[str, Any]) -> bool:
    """Whether this is a GCS emulator: these rarely know the XML interface that obstore writes through."""
    emulated = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    return SCHEMES.get(url.partition("://")[0]) == "GCS" and bool(emulated)


def translate_options(url: str, options: dict[str, Any], policy: StoragePolicy) -> StoreArguments:
    """Obstore's arguments for `url`. Raises `UsageError` for a scheme or an option that obstore has no word for."""
    kind = SCHEMES.get(url.partition("://")[0])
    if kind is None:
        raise UsageError(f"{url}: obstore has no such scheme; it knows {sorted(SCHEMES)}. Pass transport='fsspec'")
    make = {"S3": s3_arguments, "GCS": gcs_arguments, "Azure": other_arguments}[kind]
    return make(options, policy)


class ObstoreTransport:
    """`Transport` over one obstore store."""

    def __init__(self, url: str, options: dict[str, Any], policy: StoragePolicy) -> None:
        scheme, _, rest = url.partition("://")
        self._kind = SCHEMES[scheme]
        self._bucket, _, prefix = rest.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._url = url
        self._policy = policy
        self._arguments = translate_options(url, options, policy)
        self._session: Any = None
        self._obstore = import_module("obstore")
        if self._kind == "S3":
            try:
                self._complete_s3(self._arguments)
            except Exception as error:  # botocore's: a profile or a certificate file that is not there
                raise UsageError(f"{url} cannot be opened ({error}); check storage_options and ~/.aws") from error
        self._rate = 0.0  # bytes/s of bodies, of late
        config = self._arguments.config
        where = (
            config.get("endpoint") or config.get("base_url") or {"S3": "s3.amazonaws.com"}.get(self._kind, self._kind)
        )
        self.endpoint = f"{where}/{self._bucket}"
        self._store = self._connect()

    def __repr__(self) -> str:
        return f"ObstoreTransport({self._url!r})"

    def _complete_s3(self, arguments: StoreArguments) -> None:
        """What botocore would find in the environment and ~/.aws, obstore is told: both transports mean the same."""
        self._session = session = import_module("botocore.session").Session(profile=arguments.profile)
        config = arguments.config
        if "endpoint" not in config:
            scoped = {} if arguments.profile is None and not session.profile else session.get_scoped_config()
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            if endpoint := endpoint or scoped.get("endpoint_url"):
                config |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        if "region" not in config:
            config["region"] = session.get_config_variable("region") or "us-east-1"
        bundle = session.get_config_variable("ca_bundle")
        if bundle and "root_certificate" not in arguments.client:
            arguments.client["root_certificate"] = Path(bundle).read_bytes()

    def _connect(self) -> Any:
        made = self._arguments
        provider = _BotocoreCredentials(self._session) if made.chain else None
        self._lacking = provider is not None and provider.missing
        kinds = {"S3": "S3Store", "GCS": "GCSStore", "Azure": "AzureStore"}
        try:
            return getattr(import_module("obstore.store"), kinds[self._kind])(
                self._bucket, config=made.config, client_options=made.client, retry_config={"max_retries": 0},
                **({"credential_provider": provider} if provider else {}),
            )  # fmt: skip
        except (self._obstore.exceptions.BaseError, ValueError, TypeError) as error:
            raise UsageError(f"{self._url} cannot be opened ({_first_line(error)}); check storage_options") from error

    async def _call(self, verb: str, *arguments: Any, size: int = 0, **options: Any) -> Any:
        """One request, within the time for an answer."""
        if self._lacking:
            cure = "pass key and secret, or anon=True, in storage_options, or set up the environment"
            raise StorageFault(DENIED, "no credentials were found", cure=cure)
        patience = self._policy.first_byte_s + size / max(1.0, self._policy.floor_bytes_s)
        try:
            async with asyncio.timeout(patience):
                return await getattr(self._obstore, f"{verb}_async")(self._store, *arguments, **options)
        except TimeoutError as error:
            raise StorageFault(TIMEOUT, f"no answer within {patience:g} s") from error
        except Exception as error:
            raise _translate(error, self._policy) from error

    def _tag(self, meta: Any) -> str:
        """What a range is pinned to: the generation on GCS, whose conditions on ETags are another interface's."""
        return str((meta["version"] if self._kind == "GCS" else meta["e_tag"]) or "")

    async def stat(self, key: str) -> ObjectStat:
        meta = await self._call("head", self._prefix + key)
        return ObjectStat(key, int(meta["size"]), self._tag(meta))

    async def get(self, wanted: Range) -> Reply:
        options: dict[str, Any] = {"range": (wanted.start, wanted.stop)}
        if wanted.tag:
            options["version" if self._kind == "GCS" else "if_match"] = wanted.tag
        answer = await self._call("get", self._prefix + wanted.key, options=options)
        meta = answer.meta
        tag = self._tag(meta)
        check_range((wanted.start, wanted.stop), tuple(answer.range), int(meta["size"]))
        if wanted.tag and tag and tag != wanted.tag:
            raise StorageFault(CHANGED, f"version {wanted.tag} has become {tag}")
        pieces = aiter(answer.stream(min_chunk_size=self._piece()))

        async def next_piece() -> bytes:
            return await anext(pieces, b"")

        def translate(error: Exception) -> StorageFault:
            return _translate(error, self._policy)

        began = time.monotonic()
        try:
            data = await collect(next_piece, wanted.stop - wanted.start, self._policy, tag, translate)
        except StorageFault:
            self._rate = 0.0
            raise
        seen = len(data) / max(1e-6, time.monotonic() - began)
        self._rate = min(seen, self._rate * 2 or PIECE / _PIECE_S)
        return Reply(data, tag, int(meta["size"]))

    def _piece(self) -> int:
        """Bytes of a body that obstore collects before it wakes Python: what comes in a tenth of a second.

        A wake-up costs some 50 us and a turn of the GIL. But what is being collected is not seen to arrive: a body that is
        suddenly a hundred times slower is cut though it may be above the floor, and goes on in small pieces.
        """
        least = max(1, min(PIECE, int(self._policy.floor_bytes_s * self._policy.stall_s / 2)))
        return max(least, min(_MOST_PIECE, int(self._rate * _PIECE_S)))

    async def list(self, prefix: str) -> list[ObjectStat]:
        full = self._prefix + prefix
        stats: list[ObjectStat] = []
        pages = aiter(self._obstore.list(self._store, full or None, chunk_size=_LIST_CHUNK))
        try:
            while True:
                async with asyncio.timeout(self._policy.first_byte_s):
                    page = await anext(pages, None)
                if page is None:
                    break
                stats += [ObjectStat(m["path"].removeprefix(self._prefix), int(m["size"]), self._tag(m)) for m in page]
        except TimeoutError as error:
            raise StorageFault(TIMEOUT, f"no answer within {self._policy.first_byte_s:g} s") from error
        except Exception as error:
            raise _translate(error, self._policy) from error
        return sorted(stats, key=lambda stat: stat.key)

    async def put(self, key: str, data: bytes) -> None:
        await self._call("put", self._prefix + key, data, size=len(data), use_multipart=False)

    async def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        mode = "create" if tag is None else {"version": tag} if self._kind == "GCS" else {"e_tag": tag}
        try:
            await self._call("put", self._prefix + key, data, size=len(data), mode=mode, use_multipart=False)
        except StorageFault as fault:
            if fault.kind == CHANGED:
                return False
            raise
        return True

    async def delete(self, key: str) -> None:
        await self._call("delete", self._prefix + key)

    def refresh(self) -> bool:
        """Ask botocore's chain again, unless credentials were given as values."""
        if not self._arguments.chain or _BotocoreCredentials(self._session).fixed:
            return False
        self._session = import_module("botocore.session").Session(profile=self._arguments.profile)
        self._store = self._connect()
        return True

    async def close(self) -> None:
        return None


class _BotocoreCredentials:
    """obstore's credential provider: botocore's chain (environment, profiles, SSO, web identity, instance metadata)."""

    def __init__(self, session: Any) -> None:
        self._credentials = session.get_credentials()

    @property
    def missing(self) -> bool:
        return self._credentials is None

    @property
    def fixed(self) -> bool:
        """Asking the chain again would give the same."""
        return self._credentials is None or self._credentials.method in ("env", "explicit")

    def __call__(self) -> dict[str, Any]:
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=5),  # botocore keeps them, and renews them before they end
        }  # fmt: skip


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _translate(error: Exception, policy: StoragePolicy) -> StorageFault:  # noqa: PLR0911  (a table)
    """Obstore's errors by type, then by what its text says."""
    if isinstance(error, StorageFault):
        return error
    text, line = str(error), _first_line(error)
    if found := re.search(r"status code: (\d{3})", text):
        code = re.search(r"<Code>([^<]*)</Code>|\"reason\": *\"([^\"]*)\"", text)
        said = re.search(r"<Message>([^<]*)</Message>|\"message\": *\"([^\"]*)\"", text)
        message = next(filter(None, said.groups()), "") if said else ""
        message = message or line.rpartition("status code: ")[2]
        fault = from_status(int(found[1]), next(filter(None, code.groups()), "") if code else "", message)
        if fault.kind == "throttle":  # it may have been told when to come back; we are not
            fault.retry_after = policy.hidden_retry_after_s
        return fault
    if isinstance(error, FileNotFoundError):
        return StorageFault(MISSING, line)
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"PreconditionError", "AlreadyExistsError"}:
        return StorageFault(CHANGED, line)
    if names & {"PermissionDeniedError", "UnauthenticatedError"}:
        return StorageFault(DENIED, line, cure="check the credentials in storage_options or the environment")
    if "BareRedirect" in text:
        return from_status(301, "PermanentRedirect", line)
    if re.search(r"UnexpectedRange|NotPartial|MissingContentLength|InvalidContentRange|ParseContentRange", text):
        return StorageFault(CORRUPT, line)
    if re.search(r"kind: Timeout|TimedOut", text):
        return StorageFault(TIMEOUT, line)
    if re.search(r"invalid peer certificate|CertificateError|InvalidCertificate|UnknownIssuer", text):
        cure = "for a private certificate authority pass client_kwargs={'verify': '/path/ca.pem'}"
        return StorageFault(DENIED, line, cure=cure)
    return StorageFault(TRANSIENT, line)


def _tokio_is_running() -> bool:
    """Whether obstore's runtime has threads here, whoever used it."""
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended since
            if task.read_text().startswith("tokio-rt-worker"):
                return True
    return False


_before_fork = {"running": False}


def _look_before_fork() -> None:
    _before_fork["running"] = _process["forked_after_use"] or ("obstore" in sys.modules and _tokio_is_running())


def _note_in_child() -> None:
    _process["forked_after_use"] = _before_fork["running"]


os.register_at_fork(before=_look_before_fork, after_in_child=_note_in_child)
