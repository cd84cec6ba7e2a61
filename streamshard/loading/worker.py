"""A loader's worker process: reads its share of the partitions and sends parts.

Its main thread reads and forms; a second one listens to the main process, so that a request is answered, an iteration broken
off and an exit obeyed whatever a user's function is doing. The process ends when the main process does, however that ends.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler, recv_handle
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from streamshard.dataset import StreamDataset
from streamshard.iteration import Iteration, Mark, PartitionRun, PlainRun, Share
from streamshard.loading.parts import Part, encode
from streamshard.loading.shared_memory import Segment
from streamshard.order.cursor import Cursor
from streamshard.order.rotation import Rotation
from streamshard.steps.tensors import collate as default_collate

Rotating = Rotation[PartitionRun | PlainRun]


@dataclass(frozen=True)
class Job:
    """What a worker does: `rows` of a batch at a time, or, with `collate`, whole batches, or (`rows` None) items."""

    dataset: StreamDataset
    rows: int | None
    collate: Callable[[list[Any]], Any] | None
    segments: int


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the main process: itself, if it can be sent, and as text."""

    packed: bytes | None
    name: str
    text: str


@dataclass(frozen=True)
class End:
    """All partitions of the worker are exhausted, and stand so."""

    marks: dict[int, Mark]


class Pass:
    """One iteration of this worker. `halt` may come from the listening thread at any time."""

    def __init__(self, number: int, share: Share, segments: int) -> None:
        self.number = number
        self.share = share
        self.free: SimpleQueue[int | None] = SimpleQueue()
        for segment in range(segments):
            self.free.put(segment)
        self.iteration: Iteration | None = None
        self.halted = False

    def halt(self) -> None:
        self.halted = True
        self.free.put(None)
        if self.iteration is not None:
            self.iteration.interrupt()


def work(data: Connection, control: Connection, job: Job, inherited: list[Connection]) -> None:
    """The main function of a worker process. `data` carries parts one way and free segments the other."""
    for connection in inherited:
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process decides
    torch.set_num_threads(1)
    segments = [Segment(recv_handle(data)) for _ in range(job.segments)]
    passes: SimpleQueue[Pass] = SimpleQueue()
    threading.Thread(target=_listen, args=(data, control, passes, job.segments), daemon=True).start()
    while True:
        current = passes.get()
        try:
            _read(data, job, current, segments)
        except BaseException as error:  # noqa: BLE001  (the main process raises it)
            if not current.halted:
                data.send((current.number, _failure(error)))


def _listen(data: Connection, control: Connection, passes: SimpleQueue[Pass], segments: int) -> None:
    current: Pass | None = None
    try:
        while True:
            for connection in wait([data, control]):
                assert isinstance(connection, Connection)  # what we passed
                verb, number, value = connection.recv()
                if verb == "pass":
                    current = Pass(number, value, segments)
                    passes.put(current)
                elif current is None or number != current.number:
                    continue  # about a pass that is over
                elif verb == "free":
                    current.free.put(value)
                elif verb == "halt":
                    current.halt()
                elif verb == "acknowledge" and current.iteration is not None:
                    current.iteration.acknowledge(value)
                elif verb == "contents":
                    iteration = current.iteration
                    control.send(iteration.contents() if iteration is not None else dict(current.share.contents))
    except (EOFError, OSError):
        os._exit(0)  # the main process is gone, or wants us gone: whatever the other thread is doing


def _read(data: Connection, job: Job, current: Pass, segments: list[Segment]) -> None:
    iteration = current.iteration = job.dataset.open_share(current.share, lent=True)
    former = _Former(job, iteration.open(), current.share.parts)
    first = True
    try:
        while not current.halted and (place := current.free.get()) is not None:
            segment = segments[place]
            segment.begin()
            part = former.rows(segment) if job.rows is not None and job.collate is None else former.item(segment)
            if part is None:
                data.send((current.number, End({run.p: run.mark() for run in iteration.runs})))
                return
            part.segment, part.size = place, segment.size
            data.send((current.number, part))
            if first:
                iteration.begin_speculation()
                first = False
    finally:
        iteration.close()


class _Former:
    """Makes parts out of a rotation."""

    def __init__(self, job: Job, rotation: Rotating, parts: int) -> None:
        self._job = job
        self._rotation = rotation
        self._parts = parts

    def rows(self, segment: Segment) -> Part | None:
        """Some rows of a batch, collated into the segment; None at the end."""
        items: list[Any] = []
        slots: list[int] = []
        cursors: list[Cursor] = []
        ended: list[tuple[int, int, Mark]] = []
        count = self._job.rows or 1
        while len(items) < count:
            got, turn, runs = self._rotation.step(count - len(items))
            if not runs:
                break
            items += got
            slots += [turn * self._parts + run.p for run in runs[: len(got)]]
            cursors += [run.mark()[2] for run in runs[: len(got)]]
            ended += [(len(items), run.p, run.mark()) for run in runs[len(got) :]]
        if not items:
            return None
        skeleton = encode(default_collate(items, empty=segment.empty), segment)
        return Part(0, 0, skeleton, np.array(slots, np.int64).tobytes(), cursors, ended, rows=True)

    def item(self, segment: Segment) -> Part | None:
        """What the pipeline gave, or a whole batch of the user's collate; None at the end."""
        items: list[Any] = []
        slot = -1
        changed: dict[int, PartitionRun | PlainRun] = {}
        count = self._job.rows or 1
        while len(items) < count:
            got, turn, runs = self._rotation.step(count - len(items))
            if not runs:
                break
            if got and not items:
                slot = turn * self._parts + runs[0].p
            items += got
            changed.update({run.p: run for run in runs})
        if not items:
            return None
        batch = items[0] if self._job.collate is None else self._job.collate(items)
        marks = [(0, p, run.mark()) for p, run in changed.items()]
        return Part(0, 0, encode(batch, segment), np.array([slot], np.int64).tobytes(), marks=marks)


def _failure(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    try:
        packed = bytes(ForkingPickler.dumps(error))
        ForkingPickler.loads(packed)
    except Exception:  # noqa: BLE001  (an exception may refuse in any way)
        return Failure(None, type(error).__name__, text)
    return Failure(packed, type(error).__name__, text)
