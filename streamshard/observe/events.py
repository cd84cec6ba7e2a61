"""The records that a hook receives. Frozen values without behaviour: exporters (a log, a metrics server) are the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class ThrottlingBegan:
    """An endpoint answered that it is asked too often; `limit` is the number of requests in flight allowed from now on."""

    endpoint: str
    cause: str
    limit: float


@dataclass(frozen=True, slots=True)
class ThrottlingEnded:
    """An endpoint has not throttled for a while: `answers` throttled answers came within `seconds`."""

    endpoint: str
    seconds: float
    answers: int
    limit: float


@dataclass(frozen=True, slots=True)
class StorageCounters:
    """What one dataset's store has done in this process so far. Times in seconds, sizes in bytes.

    retries: by cause (transient, timeout, corrupt, expired). throttled: answers that said so.
    hedges, hedge_wins: second requests sent, and those that were faster. limit, in_flight: of the endpoint, just now.
    cache_hits, cache_misses: pieces of objects found on the local disk, and not.
    stalls: how often the consumer had to wait for storage; waiting_storage_s: how long; decoding_s: time it spent in
    decompressing and unpacking. lookahead_bytes, lookahead_peak: compressed bytes waiting or in flight, now and at most.
    """

    requests: int = 0
    bytes: int = 0
    retries: Mapping[str, int] = field(default_factory=dict)
    throttled: int = 0
    hedges: int = 0
    hedge_wins: int = 0
    limit: float = 0.0
    in_flight: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    stalls: int = 0
    waiting_storage_s: float = 0.0
    decoding_s: float = 0.0
    lookahead_bytes: int = 0
    lookahead_peak: int = 0


def add_counters(one: StorageCounters, other: StorageCounters) -> StorageCounters:
    """Of two stores together; `limit` is the lower one."""
    added = {
        f.name: getattr(one, f.name) + getattr(other, f.name)
        for f in fields(StorageCounters)
        if f.name not in ("retries", "limit")
    }
    causes = {*one.retries, *other.retries}
    retries = {cause: one.retries.get(cause, 0) + other.retries.get(cause, 0) for cause in sorted(causes)}
    return StorageCounters(retries=retries, limit=min(one.limit, other.limit), **added)


@dataclass(frozen=True, slots=True)
class LoaderCounters:
    """One iteration of a loader so far: batches handed out; how often, and how many seconds in all, they were waited for; and
    what steps have dropped of what was handed out, by step. remainder_dropped, remainder_padded: rows of this rank (items
    without a ``batch_size``) that ``remainder="drop"`` left out at the end of the epoch, and that ``"pad"`` added.
    """

    batches: int = 0
    waits: int = 0
    waiting_s: float = 0.0
    dropped: Mapping[str, int] = field(default_factory=dict)
    remainder_dropped: int = 0
    remainder_padded: int = 0


Event = ThrottlingBegan | ThrottlingEnded | StorageCounters
Hook = Callable[[Event], None]
