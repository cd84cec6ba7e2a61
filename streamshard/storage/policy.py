"""Every number that decides how a store is treated, in one frozen record. docs/storage.md says when to change which."""

from __future__ import annotations

from dataclasses import dataclass, fields

from streamshard.errors import UsageError


@dataclass(frozen=True, slots=True)
class StoragePolicy:
    """How hard, how often and how patiently a store is asked. The defaults suit S3, GCS and MinIO.

    attempts: tries of one range for errors other than throttling; bytes gained start the count again.
    deadline_s: a request that has gained nothing for so long fails, whatever the reason.
    backoff_s, throttle_backoff_s, backoff_cap_s: full jitter U(0, min(cap, base * 2**n)); the second base is that of the
        endpoint's pause after throttling (bases of the AWS SDKs of 2026).
    retry_after_cap_s: a longer Retry-After is cut to this.
    hidden_retry_after_s: the least pause where the transport does not show the header (obstore).
    retry_budget, retry_cost, timeout_cost, success_gain: tokens; with none left every retry waits backoff_cap_s. Costs as
        in the AWS SDKs.
    limit_start, limit_min, limit_max: requests in flight to one endpoint from one process.
    window_s: the least length of the window in which the limit changes at most once.
    hedge: send a second request for a late range, after max(p95, hedge_after_s), for at most hedge_share of requests.
    connect_s, first_byte_s, stall_s: connection, answer, next bytes. No limit on the whole while bytes flow above
        floor_bytes_s, averaged over stall_s.
    """

    attempts: int = 6
    deadline_s: float = 120.0
    backoff_s: float = 0.1
    throttle_backoff_s: float = 1.0
    backoff_cap_s: float = 20.0
    retry_after_cap_s: float = 60.0
    hidden_retry_after_s: float = 2.0
    retry_budget: int = 500
    retry_cost: int = 5
    timeout_cost: int = 10
    success_gain: int = 1
    limit_start: int = 8
    limit_min: int = 1
    limit_max: int = 64
    window_s: float = 0.1
    hedge: bool = False
    hedge_after_s: float = 0.2
    hedge_share: float = 0.05
    connect_s: float = 5.0
    first_byte_s: float = 10.0
    stall_s: float = 10.0
    floor_bytes_s: float = 16 * 1024.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "hedge":
                continue
            least = 1 if field.name in ("attempts", "limit_start", "limit_min", "limit_max") else 0
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise UsageError(f"StoragePolicy({field.name}={value!r}) must be a number >= {least}")
        if not self.limit_min <= self.limit_start <= self.limit_max:
            raise UsageError(
                f"StoragePolicy: limit_min={self.limit_min} <= limit_start={self.limit_start} <= "
                f"limit_max={self.limit_max} must hold"
            )
