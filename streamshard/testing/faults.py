"""A store that fails on purpose: `fault_server` starts a real HTTP server in its own process and scripts its answers.

    with fault_server() as server:
        server.put("bucket/key", data)
        server.script(status(503), status(503), cut(after=1000))    # the next three GETs; then all is well
        dataset = StreamDataset("s3://bucket/corpus", storage_options=server.storage_options)
        ...
        assert len(server.gets()) == 4

Faults are values; rules (`server.rules`) hold until they are replaced. Use it to see how a job behaves under throttling or
against a slow store before the store shows it to you. Linux only.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from streamshard.testing.servers import HOST, die_with_parent, stop

Fault = dict[str, Any]


def ok(*, delay: float = 0.0) -> Fault:
    """A right answer, `delay` seconds late."""
    return {"do": "ok", "delay": delay}


def status(number: int, code: str | None = None, *, retry_after: int | None = None) -> Fault:
    """An error status with an S3 error code (default: the usual one of that status)."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return {"do": "status", "status": number, "code": code, "headers": headers}


def close() -> Fault:
    """The connection is closed before anything is answered."""
    return {"do": "close"}


def cut(*, after: int) -> Fault:
    """The body ends after `after` bytes under a larger Content-Length."""
    return {"do": "cut", "after": after}


def reset(*, after: int) -> Fault:
    """The connection is reset (RST) after `after` bytes of the body."""
    return {"do": "reset", "after": after}


def short(*, by: int) -> Fault:
    """A 206 that is `by` bytes short, with lengths that agree with each other."""
    return {"do": "short", "by": by}


def ignore_range() -> Fault:
    """Status 200 and the whole object."""
    return {"do": "ignore_range"}


def shift(*, by: int) -> Fault:
    """The right number of bytes, from `by` bytes further on, honestly declared in Content-Range."""
    return {"do": "shift", "by": by}


def no_length(*, after: int) -> Fault:
    """No Content-Length; the connection ends after `after` bytes."""
    return {"do": "no_length", "after": after}


def wrong_bytes() -> Fault:
    """Right headers, right length, one byte inverted."""
    return {"do": "wrong_bytes"}


def stall(*, after: int, seconds: float = 3600.0) -> Fault:
    """Nothing more is sent after `after` bytes, and the connection stays open."""
    return {"do": "stall", "after": after, "seconds": seconds}


def drip(*, rate: float, after: int = 0) -> Fault:
    """`after` bytes at once, then `rate` bytes a second."""
    return {"do": "drip", "rate": rate, "after": after}


def replace() -> Fault:
    """The object is replaced (same length, other bytes, new ETag) just before this request is answered."""
    return {"do": "replace"}


class FaultServer:
    """A running server. Methods may be called from any thread or process that knows the endpoint."""

    def __init__(self, endpoint: str, process: subprocess.Popen[bytes]) -> None:
        self.endpoint = endpoint
        self.process = process

    @property
    def storage_options(self) -> dict[str, Any]:
        """What reaches this server with an ``s3://`` URL, through either transport."""
        return {"key": "test-key", "secret": "test-secret", "client_kwargs": {"endpoint_url": self.endpoint}}

    @property
    def gcs_options(self) -> dict[str, Any]:
        """What reaches this server with a ``gs://`` URL."""
        return {"endpoint_url": self.endpoint, "token": "anon"}

    def put(self, name: str, data: bytes) -> None:
        """Store an object, ``bucket/key``; replacing one changes its ETag and generation."""
        self._call(f"object?name={quote(name)}", data)

    def script(self, *faults: Fault) -> None:
        """What the next GETs of objects do, one fault each. Replaces what was left of an earlier script."""
        self._call("script", json.dumps(faults).encode())

    def rules(self, **rules: Any) -> None:
        """What every GET does once the script is used up; replaces all earlier rules.

        delay: seconds before each answer. outage_s: answer 503 (``status=``) for so long. rate: answers a second, 503 beyond
        (burst 50 ms' worth, or ``burst=``). every, late: every n-th GET is so many seconds later. tokens: session tokens
        that are accepted, ExpiredToken for others. ignore_if_match: preconditions are not looked at.
        """
        self._call("rules", json.dumps(rules).encode())

    def log(self) -> list[dict[str, Any]]:
        """Every request since the last `clear`: time, method, key, range, if_match, do (the fault), done."""
        return list(self._call("log")["log"])

    def gets(self) -> list[dict[str, Any]]:
        """The GETs of objects in the log."""
        return [entry for entry in self.log() if entry["method"] == "GET" and "/" in entry["key"]]

    def clear(self) -> None:
        """Empty the log."""
        self._call("clear")

    def _call(self, verb: str, body: bytes | None = None) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.endpoint}/_control/{verb}", data=body, method="POST")
        # Only this process's own server is spoken to: its certificate need not be known.
        trusting = ssl._create_unverified_context()  # noqa: S323, SLF001
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting))
        with urllib.request.build_opener(*handlers).open(request, timeout=30) as answer:
            parsed: dict[str, Any] = json.loads(answer.read())
            return parsed


@contextmanager
def fault_server(*, tls_pem: str | None = None) -> Iterator[FaultServer]:
    """Start a server on a free port of the loopback interface; it ends with the context, or with this process.

    tls_pem: a file with a certificate for 127.0.0.1 and its key; then the endpoint is https.
    """
    command = [sys.executable, "-m", "streamshard.testing.fault_server", *([tls_pem] if tls_pem else [])]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError("the fault server did not start")
        yield FaultServer(f"{'https' if tls_pem else 'http'}://{HOST}:{int(port)}", process)
    finally:
        stop(process)
