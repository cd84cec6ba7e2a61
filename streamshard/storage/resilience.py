"""`Resilient`: a transport whose requests are retried, continued, paced and hedged; what it gives up on is a `StorageError`.

One retry layer, this one: the libraries' own are turned off. For one range:

    enter the gate (limiter) -> one request (perhaps hedged) -> right bytes: done
      throttled      uses up no try; the endpoint pauses for everybody; only the deadline ends it
      broken body    what arrived is kept if it is pinned to a version; the next request asks for the rest
      transient, timeout, corrupt   back off and try again, six times without a byte gained, paid from the retry budget
      expired        new credentials, once, where they can be had
      missing, denied, changed      at once
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from streamshard.errors import StorageError
from streamshard.observe.events import Event, Hook, ThrottlingBegan, ThrottlingEnded
from streamshard.storage.fault import CHANGED, CORRUPT, DENIED, EXPIRED, MISSING, THROTTLE, StorageFault
from streamshard.storage.gate import Endpoint
from streamshard.storage.hedging import hedged
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.store import ObjectStat, Range, Reply, Transport

_logger = logging.getLogger("streamshard")
T = TypeVar("T")


@dataclass
class Tally:
    """What one store has done in this process; `observe.events.StorageCounters` is its frozen form."""

    requests: int = 0
    bytes: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    throttled: int = 0
    hedges: int = 0
    hedge_wins: int = 0
    cache_hits: int = 0
    cache_misses: int = 0


class Resilient:
    """Wraps a `Transport`; has its verbs."""

    def __init__(
        self, inner: Transport, endpoint: Endpoint, policy: StoragePolicy, *, url: str, tally: Tally, hook: Hook | None
    ) -> None:
        self.endpoint = inner.endpoint
        self._inner = inner
        self._shared = endpoint
        self._policy = policy
        self._url = url
        self._tally = tally
        self._hook = hook
        self._renewing = asyncio.Lock()
        self._renewed_at = 0.0

    def __repr__(self) -> str:
        return f"Resilient({self._inner!r})"

    async def stat(self, key: str) -> ObjectStat:
        return await _Effort(self, key).run(lambda: self._stat(key))

    async def _stat(self, key: str) -> ObjectStat:
        try:
            return await self._inner.stat(key)
        except StorageFault as fault:
            if fault.status == 400:  # the answer to a HEAD has no body that would say why (an expired token, say)
                await self._inner.get(Range(key, 0, 1))
            raise

    async def list(self, prefix: str) -> list[ObjectStat]:
        return await _Effort(self, prefix).run(lambda: self._inner.list(prefix))

    async def put(self, key: str, data: bytes) -> None:
        await _Effort(self, key).run(lambda: self._inner.put(key, data))

    async def put_if(self, key: str, data: bytes, tag: str | None) -> bool:
        written = await _Effort(self, key).run(lambda: self._inner.put_if(key, data, tag))
        if not written and data:
            # The answer to an earlier try may have been lost on its way (aiohttp, too, sends again by itself): then the object
            # is there, and it is ours.
            with suppress(StorageError):
                stat = await self.stat(key)
                same = stat.size == len(data)
                written = same and bytes((await self.get(Range(key, 0, stat.size, tag=stat.tag))).data) == data
        return written

    async def delete(self, key: str) -> None:
        try:
            await _Effort(self, key).run(lambda: self._inner.delete(key))
        except StorageError as error:
            if error.kind != MISSING:
                raise

    async def get(self, wanted: Range) -> Reply:
        """The range, through as many requests as it takes."""
        effort = _Effort(self, wanted.key, urgent=wanted.urgent)
        rest, parts = wanted, b""
        while True:
            try:
                reply = await effort.attempt(partial(self._ask, rest), hedge=True)
            except StorageFault as fault:
                if fault.received and fault.tag:  # pinned: what arrived stays, and the rest must be of the same version
                    parts += fault.received
                    rest = replace(rest, start=rest.start + len(fault.received), tag=fault.tag)
                    effort.progress()
                if fault.kind in (CHANGED, MISSING) and rest.tag:
                    fault = await self._name_versions(rest, fault)
                await effort.recover(fault)
                if rest.start == rest.stop:  # all had arrived before it broke
                    return Reply(parts, rest.tag, None)
            else:
                return replace(reply, data=parts + bytes(reply.data)) if parts else reply

    async def _ask(self, wanted: Range) -> Reply:
        reply = await self._inner.get(wanted)
        if len(reply.data) != wanted.stop - wanted.start:
            raise StorageFault(CORRUPT, f"asked for {wanted.stop - wanted.start} bytes, got {len(reply.data)}")
        self._tally.bytes += len(reply.data)
        return reply

    async def _name_versions(self, wanted: Range, fault: StorageFault) -> StorageFault:
        """The same fault, saying what the object was and what it is now (GCS calls a generation that is gone missing)."""
        now = "another version"
        try:
            now = (await self._inner.stat(wanted.key)).tag or now
        except StorageFault as gone:
            if gone.kind == MISSING:
                return gone
        return StorageFault(
            CHANGED,
            f"the object was replaced while it was being read: it was version {wanted.tag} and is now {now} ({fault})",
            cure="do not overwrite shards of a dataset that is in use; write a new version of it",
        )

    async def renew(self, asked_at: float) -> bool:
        """New credentials for whoever was told at `asked_at` that they have expired; False where there are none.

        Many requests hear it together: the first one renews (off the loop: it may ask a service), the others use that.
        """
        async with self._renewing:
            if self._renewed_at <= asked_at:
                if not await asyncio.to_thread(self._inner.refresh):
                    return False
                self._renewed_at = self._shared.now()
            return True

    def tell(self, event: Event) -> None:
        """Hand a record to the hook."""
        if self._hook is not None:
            try:
                self._hook(event)
            except BaseException:
                _logger.exception("the storage hook %r failed", self._hook)


class _Effort:
    """One verb on one object: tries, pauses, and the deadline."""

    def __init__(self, store: Resilient, key: str, *, urgent: bool = True) -> None:
        self._store = store
        self._key = key
        self._urgent = urgent
        self._policy = store._policy  # noqa: SLF001  (its other half)
        self._shared = store._shared  # noqa: SLF001
        self._tally = store._tally  # noqa: SLF001
        self._gained_at = self._shared.now()
        self._seen: Counter[str] = Counter()
        self._last: StorageFault | None = None
        self._refreshed = False
        self._sent_at = 0.0
        self.tries = 0

    async def run(self, request: Callable[[], Awaitable[T]]) -> T:
        """Try until it works or there is no hope."""
        while True:
            try:
                return await self.attempt(request)
            except StorageFault as fault:
                await self.recover(fault)

    def progress(self) -> None:
        """Bytes were gained: patience starts again."""
        self._gained_at = self._shared.now()
        self.tries = 0

    async def attempt(self, request: Callable[[], Awaitable[T]], *, hedge: bool = False) -> T:
        """One request when the endpoint lets it; raises the `StorageFault` that it ended in."""
        await self._enter()
        delay = self._shared.hedge.delay() if hedge else None
        if delay is None:
            return await self._send(request)
        result, won = await hedged(lambda: self._send(request), lambda: self._send(request), delay, self._may_hedge)
        self._tally.hedge_wins += won
        return result

    def _may_hedge(self) -> bool:
        """Take what a second request needs: no throttling, budget, a free place."""
        shared = self._shared
        if shared.limiter.throttled_since is not None or not shared.enter_at_once():
            return False
        if not shared.hedge.spend():
            shared.leave()
            return False
        self._tally.hedges += 1
        return True

    async def _enter(self) -> None:
        while True:
            deadline = self._gained_at + self._policy.deadline_s
            try:
                await self._shared.enter(deadline, urgent=self._urgent)
            except TimeoutError:
                # Waiting behind others that get answers is no lack of progress.
                if self._shared.limiter.last_good > self._gained_at:
                    self._gained_at = self._shared.limiter.last_good
                    continue
                none = StorageFault(THROTTLE, "the endpoint throttles others, and this request could not be sent")
                raise self._give_up(self._last or none) from self._last
            else:
                self._gained_at = max(self._gained_at, min(self._shared.limiter.last_good, self._shared.now()))
                return

    async def _send(self, request: Callable[[], Awaitable[T]]) -> T:
        """Do it, and tell limiter, budget and hedging how it went. The place at the gate is already taken."""
        shared = self._shared
        started = self._sent_at = shared.now()
        self._tally.requests += 1
        try:
            result = await request()
        except StorageFault as fault:
            now = shared.now()
            if fault.kind == THROTTLE:
                self._throttled(fault, started, now)
            elif fault.status is not None or fault.received:  # it did answer
                self._good(started, now)
            raise
        finally:
            shared.leave()
        now = shared.now()
        self._good(started, now)
        shared.budget.earn()
        shared.hedge.seen(now - started)
        return result

    def _throttled(self, fault: StorageFault, started: float, now: float) -> None:
        shared, limiter = self._shared, self._shared.limiter
        self._tally.throttled += 1
        limiter.throttled(started, now, fault.retry_after)
        if shared.episode.throttled(now):
            _logger.warning(
                "%s throttles (%s): requests pause, then come back slowly; at most %d in flight",
                shared.name, fault, max(1, int(limiter.limit)),
            )  # fmt: skip
            self._store.tell(ThrottlingBegan(shared.name, str(fault), limiter.limit))

    def _good(self, started: float, now: float) -> None:
        shared, limiter = self._shared, self._shared.limiter
        limiter.good(started, now)
        lasted = shared.episode.good(now)
        if lasted is not None:
            _logger.warning(
                "%s has stopped throttling: %d throttled answers in %.1f s", shared.name, shared.episode.answers, lasted
            )
            self._store.tell(ThrottlingEnded(shared.name, lasted, shared.episode.answers, limiter.limit))

    async def recover(self, fault: StorageFault) -> None:
        """Wait until it may be tried again; raises `StorageError` when that is hopeless."""
        self._seen[fault.kind] += 1
        self._last = fault
        if fault.kind == EXPIRED and not self._refreshed and await self._renewed(fault):
            self._refreshed = True
            self._tally.retries[EXPIRED] += 1
            return
        if fault.final or fault.kind == EXPIRED:
            raise self._give_up(fault) from fault
        left = self._gained_at + self._policy.deadline_s - self._shared.now()
        if fault.kind == THROTTLE:
            if left <= 0:
                raise self._give_up(fault) from fault
            return  # the gate makes it wait
        self.tries += 1
        if self.tries >= self._policy.attempts or left <= 0:
            raise self._give_up(fault) from fault
        self._tally.retries[fault.kind] += 1
        await asyncio.sleep(min(self._shared.budget.wait(fault.kind, self.tries - 1), max(0.0, left)))

    async def _renewed(self, fault: StorageFault) -> bool:
        try:
            return await self._store.renew(self._sent_at)
        except Exception as error:
            text = f"{fault}; renewing the credentials failed: {type(error).__name__}: {error}"
            raise self._give_up(StorageFault(EXPIRED, text)) from error

    def _give_up(self, fault: StorageFault) -> StorageError:
        where = f"{self._store._url}/{self._key}"  # noqa: SLF001
        tried = sum(self._seen.values())
        counts = ", ".join(f"{count} {kind}" for kind, count in self._seen.items())
        said: dict[str, str] = {
            MISSING: f"no such object; check the URL and the bucket's name ({fault})",
            DENIED: f"{'access denied' if fault.status in (None, 401, 403) else 'request refused'} ({fault}); {fault.cure}",
            EXPIRED: f"the credentials have expired ({fault}); pass fresh ones, or a source that renews them "
            f"(a profile, a role, credential_process)",
            CHANGED: f"{fault}; {fault.cure or 'read it again from the start'}",
            CORRUPT: f"{fault}; the answer is corrupt",
        }
        text = said.get(fault.kind) or (
            f"gave up on {self._store.endpoint} after {self._shared.now() - self._gained_at:.1f} s without progress and "
            f"{tried} failed requests ({counts}); the last: {fault}; check that the endpoint is right and reachable"
            + (", or ask for a higher request rate" if fault.kind == THROTTLE else "")
        )
        if fault.kind == CORRUPT and tried > 1:
            text += f" ({tried} requests, {counts})"
        return StorageError(f"{where}: {text}", kind=fault.kind)
