"""Batches of one process for its peers too: what the first of a group forms, the others receive, with the marks.

Everything behind the source is the same on all: the position, the state, the staging. A message goes out when a batch has been
formed, on the thread that forms it, so that it travels while the training loop computes.

    reader      LocalSource or ProcessSource -> SentSource -> producer's thread -> ...
    its peers                              ReceivedSource -> producer's thread -> ...

An iteration that is left early ends with a message of its own. A peer that leaves receives, and drops, what comes until then,
and has the channel until then: the next iteration begins at the beginning on all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Protocol

import torch

from streamshard.errors import WorkerError
from streamshard.iteration import Mark
from streamshard.loading.formed import Formed, Source
from streamshard.loading.parts import decode, encode
from streamshard.loading.shared_memory import Segment, anonymous_file
from streamshard.staging.buffers import Buffers
from streamshard.steps.tensors import Empty

_BATCH, _LAST, _LEFT, _FAILED = range(4)
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
    """The batches of `source`, each sent to the peers before it is given out."""

    def __init__(self, source: Source, channel: Channel) -> None:
        self._source = source
        self._channel = channel
        self._segment = Segment(anonymous_file())
        self._holds = self._ended = False

    def batches(self) -> Iterator[Formed]:
        self._holds = self._channel.lock.acquire()
        try:
            for formed in self._source.batches():
                self._send(formed)
                yield formed
        except Exception as error:
            if not self._ended:
                self._ended = True
                self._channel.send(_FAILED, f"{type(error).__name__}: {error}".encode(), _NOTHING)
            raise

    def _send(self, formed: Formed) -> None:
        self._segment.begin()
        skeleton = encode(formed.batch, self._segment)
        head = bytes(ForkingPickler.dumps((skeleton, formed.marks)))
        self._ended = formed.last
        self._channel.send(_LAST if formed.last else _BATCH, head, self._segment.written())

    def interrupt(self) -> None:
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
    """The batches that the peer reads."""

    def __init__(self, channel: Channel, buffers: Callable[[], Buffers | None], empty: Empty) -> None:
        self._channel = channel
        self._buffers = buffers
        self._empty = empty
        self._segment = Segment(anonymous_file())
        self._holds = self._ended = False

    def batches(self) -> Iterator[Formed]:
        self._holds = self._channel.lock.acquire()
        while (received := self._receive()) is not None:
            (skeleton, marks), last = received
            if last:
                yield Formed(None, marks, last=True)
                return
            buffers = self._buffers()
            empty = self._empty if buffers is None else buffers.empty
            yield Formed(decode(skeleton, self._segment, self._segment.size, empty), marks, buffers=buffers)

    def _receive(self) -> tuple[tuple[object, dict[int, Mark]], bool] | None:
        """((skeleton, marks), whether it is the end) with the tensors in the segment; None if the reader has left."""
        try:
            kind, head, size = self._channel.receive()
            self._segment.begin()
            if size:
                self._channel.receive_body(self._segment.empty((size,), torch.uint8))
        except WorkerError:
            self._ended = True
            raise
        self._ended = kind != _BATCH
        if kind == _LEFT:
            return None
        if kind == _FAILED:
            raise WorkerError(
                f"global rank {self._channel.ranks[0]}, which reads the batches of the group {self._channel.ranks}, failed: "
                f"{head.decode()}"
            )
        return ForkingPickler.loads(head), kind == _LAST

    def interrupt(self) -> None:
        """Whoever waits goes on when the reader leaves too."""

    def close(self) -> None:
        try:
            while not self._ended:
                self._receive()
        finally:
            if self._holds:
                self._channel.lock.release()
            self._segment.close()

    def acknowledge(self, marks: Mapping[int, Mark]) -> None:
        """Only the reader has samples."""

    def contents(self) -> dict[str, bytes]:
        return {}
