"""What went wrong with one request, in the same words for every library.

`StorageFault` is internal: the retry layer decides what to do about it, and only what it gives up on becomes a
`StorageError`. The functions here classify from values; each transport knows its library's exceptions and calls them.
"""

from __future__ import annotations

import re

THROTTLE, TRANSIENT, TIMEOUT = "throttle", "transient", "timeout"
CHANGED, DENIED, EXPIRED, MISSING, CORRUPT = "changed", "denied", "expired", "missing", "corrupt"

# Error codes of S3, its compatibles and GCS that say more than their status does.
_CODES = {
    **dict.fromkeys(
        ("SlowDown", "SlowDownRead", "TooManyRequests", "TooManyRequestsException", "Throttling", "ThrottlingException",
         "ThrottledException", "RequestLimitExceeded", "BandwidthLimitExceeded", "RequestThrottled", "rateLimitExceeded",
         "userRateLimitExceeded"), THROTTLE),
    **dict.fromkeys(("RequestTimeout", "RequestTimeoutException"), TIMEOUT),
    **dict.fromkeys(("InternalError", "XAmzContentSHA256Mismatch", "IncompleteBody"), TRANSIENT),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), EXPIRED),
    **dict.fromkeys(("NoSuchKey", "NoSuchBucket", "NoSuchVersion"), MISSING),
    "PreconditionFailed": CHANGED,
}  # fmt: skip
_STATUSES = {
    404: MISSING, 408: TIMEOUT, 409: TRANSIENT, 412: CHANGED, 416: CORRUPT, 429: THROTTLE, 500: TRANSIENT, 502: TRANSIENT,
    503: THROTTLE, 504: TIMEOUT,
}  # fmt: skip
_CURES = {
    "RequestTimeTooSkewed": "this machine's clock is wrong by more than 15 minutes: set it (NTP)",
    "InvalidAccessKeyId": "the store does not know this access key: check storage_options or the environment",
    "SignatureDoesNotMatch": "the secret does not belong to the access key: check storage_options or the environment",
    "AuthorizationHeaderMalformed": "the region is wrong: pass client_kwargs={'region_name': ...} in storage_options",
    "PermanentRedirect": "the region is wrong: pass client_kwargs={'region_name': ...} in storage_options",
}
_DENIED = "check the credentials in storage_options or the environment, and the bucket's policy"


class StorageFault(Exception):  # noqa: N818  (it is caught and judged; what users see is a StorageError)
    """One failed request. `final`: asking again would not help, whatever the kind says.

    received: bytes of the range that had arrived, with the tag of the object they belong to ("" where unknown): a range
    can be continued behind them if it is pinned to that tag.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        final: bool = False,
        cure: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.retry_after = retry_after
        self.final = final or kind in (CHANGED, DENIED, MISSING)
        self.cure = cure
        self.received: bytes = b""
        self.tag = ""


def from_status(status: int, code: str, message: str, *, retry_after: str | None = None) -> StorageFault:
    """A fault from an HTTP error answer: its status, the store's error code and text, and the Retry-After header."""
    kind = _CODES.get(code) or _STATUSES.get(status)
    if status == 401 and "Invalid Credentials" in message:  # what GCS says of an expired token
        kind = EXPIRED
    if kind is None:
        kind = TRANSIENT if status >= 500 else DENIED
    text = f"status {status}" + (f" {code}" if code and code != str(status) else "")
    if message and message not in text:
        text += f": {message}"
    cure = _CURES.get(code, _DENIED if kind == DENIED else "")
    final = status == 416 or (kind == DENIED)
    return StorageFault(kind, text, status=status, retry_after=_seconds(retry_after), final=final, cure=cure)


def check_range(asked: tuple[int, int], got: tuple[int, int], size: int | None) -> None:
    """Refuse an answer to a range `asked` that declares to be about `got` of an object of `size` bytes."""
    if asked == got:
        return
    if size is not None and size < asked[1]:
        raise StorageFault(
            CORRUPT,
            f"asked for bytes {asked[0]} to {asked[1]}, got {max(0, got[1] - got[0])}: the object has {size} bytes: "
            f"fewer bytes than the manifest says",
            final=True,
        )
    raise StorageFault(
        CORRUPT, f"asked for bytes {asked[0]} to {asked[1]}, and the store answered with bytes {got[0]} to {got[1]}"
    )


def parse_content_range(header: str | None) -> tuple[tuple[int, int], int | None] | None:
    """``((start, stop), size)`` of a Content-Range header; None if there is none that can be read."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", header or "")
    if not found:
        return None
    return (int(found[1]), int(found[2]) + 1), (None if found[3] == "*" else int(found[3]))


def check_answer(
    asked: tuple[int, int], wanted_tag: str, *, status: int, content_range: str | None, tag: str, has_length: bool
) -> int | None:
    """Refuse the headers of an answer to a ranged GET that are not about what was `asked`, or not about the version
    `wanted_tag`; returns the object's size.
    """
    declared = parse_content_range(content_range)
    if declared is None:
        raise StorageFault(
            CORRUPT,
            f"asked for bytes {asked[0]} to {asked[1]}, and the store ignored the range (status {status}, no Content-Range)",
        )
    check_range(asked, *declared)
    if wanted_tag and tag and tag != wanted_tag:
        raise StorageFault(CHANGED, f"version {wanted_tag} has become {tag}")
    if not has_length:
        raise StorageFault(CORRUPT, "the answer has no Content-Length: its end could not be told from a cut")
    return declared[1]


def _seconds(header: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is as rare as a right clock and is left out."""
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:
        return None
