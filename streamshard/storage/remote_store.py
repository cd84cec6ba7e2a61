"""`RemoteStore`: the blocking face of a stack of transports, for every thread of every process.

    RemoteStore -> Cached (if asked for) -> Resilient -> ObstoreTransport or S3fsTransport ...

The stack is built at first use in each process and belongs to that process's event loop: clients never cross a fork.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from streamshard.errors import StorageError, UsageError
from streamshard.observe.events import Hook, StorageCounters
from streamshard.storage import obstore_store
from streamshard.storage.cache import Cached
from streamshard.storage.disk import Disk
from streamshard.storage.engine import Engine, current_engine, is_current, keep_inherited
from streamshard.storage.fsspec_store import connect_fsspec
from streamshard.storage.gate import Endpoint
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.resilience import Resilient, Tally
from streamshard.storage.store import ObjectStat, Range, Reply, Transport

_logger = logging.getLogger("streamshard")
_told = {"fork": False}
_LOOK_AHEAD = 256 << 20  # a second and more at what one process decodes: stores answer late now and then
_REPLACED = 4  # times that a small object may be replaced between looking at it and reading it
T = TypeVar("T")


class RemoteStore:
    """Objects below a URL. Thread-safe; picklable: options travel, clients do not."""

    def __init__(
        self,
        url: str,
        options: dict[str, Any],
        *,
        transport: str | None = None,
        policy: StoragePolicy | None = None,
        hook: Hook | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._options = options
        self._transport = transport
        self._policy = policy or StoragePolicy()
        self._hook = hook
        self._disk = disk
        self.tally = Tally()
        self._built: _Built | None = None

    def __repr__(self) -> str:
        return f"RemoteStore({self._built.stack if self._built else self._url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None, "tally": Tally()}

    @property
    def url(self) -> str:
        return self._url

    def _stack(self) -> _Built:
        """The stack of this process."""
        engine = current_engine()
        built = self._built
        if built is not None and built.engine is engine:
            return built
        with engine.lock:
            built = self._built
            if built is None or built.engine is not engine:
                if built is not None:  # the parent's
                    keep_inherited(built)
                    self.tally = Tally()
                built = self._built = self._build(engine)
                weakref.finalize(self, _close, engine, built.inner)
        return built

    def _build(self, engine: Engine) -> _Built:
        """Clients are made here and open connections later; what throttles as one endpoint is shared by the process."""
        inner = self._connect(engine)
        name = (inner.endpoint, self._policy)
        endpoint: Endpoint | None = engine.shared.get(name)
        if endpoint is None:
            endpoint = engine.shared[name] = Endpoint(inner.endpoint, self._policy, engine.loop)
        resilient = Resilient(inner, endpoint, self._policy, url=self._url, tally=self.tally, hook=self._hook)
        if self._disk is None:
            return _Built(engine, resilient, endpoint, inner)
        place = f"{inner.endpoint}\0{self._url}"
        cached = Cached(resilient, self._disk, engine, place=place, tally=self.tally)
        return _Built(engine, cached, endpoint, inner)

    def _connect(self, engine: Engine) -> Transport:
        """The transport that was asked for, or the best there is: obstore if it can say what the options say."""
        if self._use_obstore():
            return obstore_store.ObstoreTransport(self._url, self._options, self._policy)
        return connect_fsspec(self._url, self._options, self._policy, engine)

    def _use_obstore(self) -> bool:
        asked = self._transport
        if asked == "fsspec" or (asked is None and not obstore_store.available()):
            return False
        try:
            obstore_store.translate_options(self._url, self._options, self._policy)
        except UsageError:
            if asked == "obstore":
                raise
            return False
        if asked is None and obstore_store.is_emulator(self._url, self._options):
            return False
        if obstore_store.unusable_here():
            if not _told["fork"]:
                _logger.warning(
                    "obstore was used in the parent of this forked process and would hang here: reading through fsspec. "
                    "Start workers with multiprocessing_context='forkserver' to keep obstore"
                )
            _told["fork"] = True
            return False
        return True

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._stack().engine.run(work)

    def stat(self, key: str) -> ObjectStat:
        return self._run(self._stack().stack.stat(key))

    def get(self, key: str, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        return bytes(self._run(self._stack().stack.get(Range(key, start, stop))).data)

    def fetch(self, wanted: Range) -> Future[Reply]:
        built = self._stack()
        return built.engine.submit(built.stack.get(wanted))

    def allowance(self) -> float:
        return self._stack().endpoint.limiter.limit if self._built is not None else float(self._policy.limit_start)

    def read(self, key: str) -> bytes:
        stack = self._stack().stack

        async def whole() -> bytes:
            # As a checked and pinned range: a plain read has no length to be checked against.
            stat = await stack.stat(key)
            return bytes((await stack.get(Range(key, 0, stat.size, tag=stat.tag))).data) if stat.size else b""

        for _ in range(_REPLACED):
            try:
                return self._run(whole())
            except StorageError as error:
                if error.kind != "changed":  # manifest.json is replaced by every commit: look again
                    raise
        return self._run(whole())

    def list(self, prefix: str) -> list[ObjectStat]:
        return self._run(self._stack().stack.list(prefix))

    def put(self, key: str, data: bytes) -> None:
        self._run(self._stack().stack.put(key, data))

    def put_if(self, key: str, data: bytes, *, tag: str | None) -> bool:
        """Looks first, then writes under a condition where the protocol has one (S3, GCS, Azure)."""
        try:
            current: str | None = self.stat(key).tag
        except StorageError as error:
            if error.kind != "missing":
                raise
            current = None
        return current == tag and self._run(self._stack().stack.put_if(key, data, tag))

    def delete(self, key: str) -> None:
        self._run(self._stack().stack.delete(key))

    def look_ahead(self, streams: int) -> int:  # noqa: ARG002  (how late a store may answer does not depend on it)
        return _LOOK_AHEAD

    def counters(self) -> StorageCounters:
        """What this store has done in this process so far."""
        tally = self.tally
        limiter = self._built.endpoint.limiter if self._built is not None else None
        return StorageCounters(
            requests=tally.requests, bytes=tally.bytes, retries=dict(tally.retries),
            throttled=tally.throttled, hedges=tally.hedges, hedge_wins=tally.hedge_wins,
            cache_hits=tally.cache_hits, cache_misses=tally.cache_misses,
            limit=limiter.limit if limiter else 0.0, in_flight=limiter.in_flight if limiter else 0,
        )  # fmt: skip


class _Built:
    """A stack and the engine that it belongs to."""

    def __init__(self, engine: Engine, stack: Resilient | Cached, endpoint: Endpoint, inner: Transport) -> None:
        self.engine = engine
        self.stack = stack
        self.endpoint = endpoint
        self.inner = inner


def _close(engine: Engine, inner: Transport) -> None:
    """End a store's connections, if this is still the process that opened them. Knows nothing that knows the store."""
    if is_current(engine):
        engine.submit(inner.close())
    else:
        keep_inherited(inner)
