"""Batches of one process for its peers too: what the first of a group forms, the others receive, with the marks.

Everything behind the source is the same on all: the position, the state, the staging. A message goes out when a batch has been
formed, on the thread that forms it, so that it travels while the training loop computes.

    reader      LocalSource or ProcessSource -> SentSource -> producer's thread -> ...
    its peers                              ReceivedSource -> producer's thread -> ...

An iteration begins with a message that says which, so that peers which are not at the same place, or no peers at all, are
refused. One that is left early ends with a message too. A peer that leaves receives, and drops, what comes until then,
and has the channel until then: the next iteration begins at the beginning on all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Protocol

import torch

from streamshard.errors import UsageError, WorkerError
from streamshard.iteration import Mark
from streamshard.loading.formed import Formed, Source
from streamshard.loading.parts import decode, encode
from streamshard.loading.shared_memory import Segment, anonymous_file
from streamshard.loading.wire import pack, unpack
from streamshard.staging.buffers import Buffers
from streamshard.steps.tensors import Empty

_BEGIN, _BATCH, _LAST, _LEFT, _FAILED = range(5)
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Channel(Protocol):
    """Messages from the first of some processes to the others."""

    ranks: list[int]
    sends: bool
    lock: threading.Lock

    def send(self, kind: int, head: bytes, body: torch.Tensor) -> None: ...
    def receive(self) -> tuple[int, bytes, int]: ...
    def receive_body(self, memory: torch.Tensor) -> None: ...


class SentSource:
    """The batches of `source`, each sent to the peers before it is given out. place: what all must agree on, for people."""

    def __init__(self, source: Source, channel: Channel, place: str) -> None:
        self._place = place
        self._source = source
        self._channel = channel
        self._segment = Segment(anonymous_file())
        self._holds = self._ended = self._left = False

    def batches(self) -> Iterator[Formed]:
        self._holds = self._channel.lock.acquire()
        try:
            self._channel.send(_BEGIN, self._place.encode(), _NOTHING)
            for formed in self._source.batches():
                self._send(formed)
                yield formed
        except Exception as error:
            if not self._ended:
                self._ended = True
                said = b"" if self._left else f"{type(error).__name__}: {error}".encode()
                with suppress(WorkerError):  # it may be the peers that are gone
                    self._channel.send(_LEFT if self._left else _FAILED, said, _NOTHING)
            raise

    def _send(self, formed: Formed) -> None:
        self._segment.begin()
        skeleton = encode(formed.batch, self._segment)
        head = pack((skeleton, formed.marks))
        self._ended = formed.last
        self._channel.send(_LAST if formed.last else _BATCH, head, self._segment.written())

    def interrupt(self) -> None:
        self._left = True  # an error that comes of this is none
        self._source.interrupt()

    def close(self) -> None:
        try:
            if not self._ended:
                self._ended = True
                self._channel.send(_LEFT, b"", _NOTHING)
        finally:
            if self._holds:
                self._channel.lock.release()
            self._source.close()
            self._segment.close()

    def acknowledge(self, marks: Mapping[int, Mark]) -> None:
        self._source.acknowledge(marks)

    def contents(self) -> dict[str, bytes]:
        return self._source.contents()


class ReceivedSource:
    """The batches that the peer reads. place: as for `SentSource`."""

    def __init__(self, channel: Channel, buffers: Callable[[], Buffers | None], empty: Empty, place: str) -> None:
        self._place = place
        self._channel = channel
        self._buffers = buffers
        self._empty = empty
        self._segment = Segment(anonymous_file())
        self._holds = self._ended = False

    def batches(self) -> Iterator[Formed]:
        self._holds = self._channel.lock.acquire()
        while True:
            (skeleton, marks), last = self._receive()
            if last:
                yield Formed(None, marks, last=True)
                return
            buffers = self._buffers()
            empty = self._empty if buffers is None else buffers.empty
            yield Formed(decode(skeleton, self._segment, self._segment.size, empty), marks, buffers=buffers)

    def _receive(self) -> tuple[tuple[object, dict[int, Mark]], bool]:
        """((skeleton, marks), whether it is the end) with the tensors in the segment."""
        kind, head = self._message()
        if kind == _BEGIN:
            self._check_place(head.decode())
            kind, head = self._message()
        reader = f"global rank {self._channel.ranks[0]}, which reads the batches of the group {self._channel.ranks},"
        if kind == _LEFT:
            raise WorkerError(
                f"{reader} has left this iteration: leave, or finish, at the same step on all of its peers"
            )
        if kind == _FAILED:
            raise WorkerError(f"{reader} failed: {head.decode()}")
        return unpack(head), kind == _LAST

    def _message(self) -> tuple[int, bytes]:
        try:
            kind, head, size = self._channel.receive()
            self._segment.begin()
            if size:
                self._channel.receive_body(self._segment.empty((size,), torch.uint8))
        except WorkerError:
            self._ended = True
            raise
        self._ended = kind not in (_BEGIN, _BATCH)
        return kind, head

    def _check_place(self, theirs: str) -> None:
        if theirs != self._place:
            raise UsageError(
                f"this process would read {self._place}, and global rank {self._channel.ranks[0]} reads {theirs} for the group "
                f"{self._channel.ranks}: only tensor-, pipeline- or context-parallel peers share batches, and all of them load "
                f"the same state"
            )

    def interrupt(self) -> None:
        """Whoever waits goes on when the reader leaves too."""

    def close(self) -> None:
        try:
            while not self._ended:
                self._message()
        finally:
            if self._holds:
                self._channel.lock.release()
            self._segment.close()

    def acknowledge(self, marks: Mapping[int, Mark]) -> None:
        """Only the reader has samples."""

    def contents(self) -> dict[str, bytes]:
        return {}
