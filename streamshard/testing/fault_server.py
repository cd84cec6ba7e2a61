"""The process behind `streamshard.testing.faults`: an HTTP/1.1 object store on real sockets that misbehaves as it is told.

Run as ``python -m streamshard.testing.fault_server``; it prints its port. It speaks what loaders use of S3 (path style) and of
the XML and JSON interfaces of Google Cloud Storage: GET and HEAD of objects with Range, If-Match and generation, PUT, DELETE,
ListObjectsV2. Signatures are not checked. HTTP is written by hand here because every fault below is a violation of HTTP that
a server library would refuse to commit.

What a GET does is decided by the first of: the script (one entry a request, used up), then the standing rules.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import ssl
import struct
import sys
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE = 64 << 10
_STATUS_CODES = {400: "BadRequest", 403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed", 429: "TooManyRequests",
                 500: "InternalError", 503: "SlowDown"}  # fmt: skip


@dataclass
class Request:
    """One parsed request and, once answered, what was answered."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class World:
    """Objects, script, rules and log."""

    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # "bucket/key" -> (content, generation)
    generation: int = 0
    script: list[dict[str, Any]] = field(default_factory=list)
    rules: dict[str, Any] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    gets: int = 0
    tokens: float = 0.0
    refilled: float = 0.0

    def put(self, name: str, data: bytes) -> None:
        self.generation += 1
        self.objects[name] = (data, self.generation)

    def next_fault(self, now: float) -> dict[str, Any]:
        """What the next GET is to do. Rules: outage_until, rate (a second, 503 beyond), every and late, delay."""
        self.gets += 1
        if self.script:
            return self.script.pop(0)
        rules = self.rules
        if now < rules.get("outage_until", 0):
            return {"do": "status", "status": rules.get("status", 503)}
        delay = rules.get("delay", 0.0)
        if "rate" in rules:
            rate = rules["rate"]
            self.tokens = min(rules.get("burst", 1 + rate / 20), self.tokens + (now - self.refilled) * rate)
            self.refilled = now
            if self.tokens < 1:
                return {"do": "status", "status": 503}
            self.tokens -= 1
        if "every" in rules and self.gets % rules["every"] == 0:
            delay += rules["late"]
        return {"do": "ok", "delay": delay}


def etag(data: bytes, generation: int) -> str:
    """An ETag that every PUT changes. The generation alone does that: a digest of 64 MB would cost each GET 100 ms."""
    head = hashlib.md5(data[:4096], usedforsecurity=False).hexdigest()
    return f'"{head}-{len(data)}-{generation}"'


class Connection:
    """One client connection: requests in, answers out, until it closes."""

    def __init__(self, world: World, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.world = world
        self.reader = reader
        self.writer = writer
        self.open = True

    async def serve(self) -> None:
        try:
            while self.open and (request := await self._read()) is not None:
                await self._route(request)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writer.close()

    async def _read(self) -> Request | None:
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self.reader.readexactly(int(headers.get("content-length") or 0))
        if "aws-chunked" in headers.get("content-encoding", ""):
            body = _unchunked(body)
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        return Request(method, unquote(url.path), query, headers, body)

    async def _route(self, request: Request) -> None:
        if request.path.startswith("/_control/"):
            await self._control(request)
            return
        name = _object_name(request.path)
        entry = {
            "time": time.time(), "method": request.method, "key": name, "range": request.headers.get("range", ""),
            "if_match": request.headers.get("if-match", ""), "do": "ok",
            "generation": request.query.get("generation", ""), "token": request.headers.get("x-amz-security-token", ""),
            "authorization": request.headers.get("authorization", ""), "host": request.headers.get("host", ""),
        }  # fmt: skip
        self.world.log.append(entry)
        if (accepted := self.world.rules.get("tokens")) is not None and entry["token"] not in accepted:
            entry["do"] = "expired"
            await self._error(400, "ExpiredToken", request)
        elif request.method == "PUT":
            self.world.put(name, request.body)
            await self._answer(200, {"ETag": etag(*self.world.objects[name])}, b"")
        elif request.method == "DELETE":
            self.world.objects.pop(name, None)
            await self._answer(204, {}, b"")
        elif "list-type" in request.query or name.count("/") < 1:
            await self._list(name.split("/")[0], request.query.get("prefix", ""))
        else:
            fault = self.world.next_fault(time.time()) if request.method == "GET" else {"do": "ok"}
            entry["do"] = fault["do"]
            await self._object(request, name, fault)
            entry["done"] = time.time()

    async def _control(self, request: Request) -> None:
        verb, world = request.path.removeprefix("/_control/"), self.world
        if verb == "object":
            world.put(request.query["name"], request.body)
        elif verb == "script":
            world.script = json.loads(request.body)
        elif verb == "rules":
            world.rules = json.loads(request.body)
            if "outage_s" in world.rules:
                world.rules["outage_until"] = time.time() + world.rules["outage_s"]
            world.tokens = 0.0
        elif verb == "clear":
            world.log.clear()
        data = json.dumps({"log": world.log, "left": len(world.script)} if verb == "log" else {}).encode()
        await self._answer(200, {"Content-Type": "application/json"}, data)

    async def _list(self, bucket: str, prefix: str) -> None:
        rows = [
            f"<Contents><Key>{escape(name.partition('/')[2])}</Key><Size>{len(data)}</Size>"
            f"<ETag>{escape(etag(data, number))}</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, (data, number) in sorted(self.world.objects.items())
            if name.startswith(f"{bucket}/{prefix}")
        ]
        body = (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
        )
        await self._answer(200, {"Content-Type": "application/xml"}, body.encode())

    async def _error(self, status: int, code: str, request: Request, headers: dict[str, str] | None = None) -> None:
        body = f"<Error><Code>{code}</Code><Message>injected: {code}</Message></Error>".encode()
        if request.method == "HEAD":
            body = b""
        await self._answer(status, {"Content-Type": "application/xml", **(headers or {})}, body)

    async def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        await self._head(status, {**headers, "Content-Length": str(len(body))})
        self.writer.write(body)
        await self.writer.drain()

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin1"))

    # ------------------------------------------------------------------------------------------------ objects

    async def _object(self, request: Request, name: str, fault: dict[str, Any]) -> None:
        if fault.get("delay"):
            await asyncio.sleep(fault["delay"])
        do = fault["do"]
        if do == "close":
            self._hang_up()
            return
        if do == "status":
            code = fault.get("code") or _STATUS_CODES.get(fault["status"], "Injected")
            await self._error(fault["status"], code, request, fault.get("headers"))
            return
        if do == "replace":
            self.world.put(name, self.world.objects[name][0][::-1])
        if name not in self.world.objects:
            await self._error(404, "NoSuchKey", request)
            return
        data, generation = self.world.objects[name]
        tag = etag(data, generation)
        wanted, version = request.headers.get("if-match"), request.query.get("generation")
        if wanted not in (None, tag) and not self.world.rules.get("ignore_if_match"):
            await self._error(412, "PreconditionFailed", request)
            return
        if version not in (None, str(generation)):
            await self._error(404, "NoSuchKey", request)
            return
        await self._body(request, data, {**_object_headers(tag, generation)}, fault)

    async def _body(self, request: Request, data: bytes, headers: dict[str, str], fault: dict[str, Any]) -> None:
        do, size = fault["do"], len(data)
        start, stop = _range(request.headers.get("range"), size)
        ranged = "range" in request.headers and do != "ignore_range"
        if not ranged:
            start, stop = 0, size
        if start >= size and size:
            await self._error(416, "InvalidRange", request)
            return
        if do == "short":
            stop -= fault["by"]
        if do == "shift":
            start, stop = start + fault["by"], min(size, stop + fault["by"])
        body = data[start:stop]
        if do == "wrong_bytes":
            place = len(body) // 2
            body = body[:place] + bytes([body[place] ^ 0xFF]) + body[place + 1 :]
        if ranged:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if do == "no_length":
            headers["Connection"] = "close"
        else:
            headers["Content-Length"] = str(len(body))
        await self._head(206 if ranged else 200, headers)
        if request.method == "HEAD":
            return
        await self._send(body, fault)

    async def _send(self, body: bytes, fault: dict[str, Any]) -> None:
        """The body as `fault` says: whole, cut, reset, stalled, or dripped."""
        do, after = fault["do"], fault.get("after", len(body))
        if do == "drip":
            await self._drip(body, fault["rate"], after=fault.get("after", 0))
            return
        for at in range(0, min(after, len(body)), _PIECE):
            self.writer.write(body[at : min(at + _PIECE, after)])
            await self.writer.drain()
        if do == "stall":
            await asyncio.sleep(fault.get("seconds", 3600))
        if do in ("cut", "no_length", "stall"):
            self._hang_up()
        if do == "reset":
            await asyncio.sleep(0.05)  # let what was sent arrive: a reset overtakes it
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._hang_up()

    async def _drip(self, body: bytes, rate: float, *, after: int) -> None:
        self.writer.write(body[:after])
        step = max(1, int(rate / 20))
        for at in range(after, len(body), step):
            self.writer.write(body[at : at + step])
            await self.writer.drain()
            await asyncio.sleep(step / rate)

    def _hang_up(self) -> None:
        self.open = False
        self.writer.close()


def _object_headers(tag: str, generation: int) -> dict[str, str]:
    return {
        "ETag": tag, "x-goog-generation": str(generation), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream",
    }  # fmt: skip


def _object_name(path: str) -> str:
    """``bucket/key`` out of an S3 or GCS XML path, or a GCS JSON download path."""
    found = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)", path)
    return f"{found[1]}/{found[2]}" if found else path.strip("/")


def _range(header: str | None, size: int) -> tuple[int, int]:
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "")
    if not found:
        return 0, size
    return int(found[1]), min(size, int(found[2]) + 1) if found[2] else size


def _unchunked(body: bytes) -> bytes:
    """The payload of an aws-chunked upload: hex length (and extensions), bytes, until a chunk of length 0."""
    out: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if not size:
            return b"".join(out)
        out.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size


async def main() -> None:
    """Serve on a free port of the loopback interface until killed. With a PEM file of certificate and key: over TLS."""
    world = World()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Connection(world, reader, writer).serve()

    tls = None
    if len(sys.argv) > 1:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(sys.argv[1])
    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20, backlog=512, ssl=tls)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201  (the protocol with the parent)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
