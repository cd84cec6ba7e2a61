"""A loader's worker process: reads its share of the partitions and sends parts.

Its main thread reads and forms; a second one listens to the main process, so that a request is answered, an iteration broken
off and an exit obeyed whatever a user's function is doing. The process ends when the main process does, however that ends.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler, recv_handle
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from streamshard.dataset import StreamDataset
from streamshard.iteration import Iteration, Mark, Run, Share
from streamshard.loading.parts import Part, encode, encode_rows
from streamshard.loading.shared_memory import Segment
from streamshard.order.cursor import Cursor
from streamshard.order.rotation import Rotation

Rotating = Rotation[Run]


@dataclass(frozen=True)
class Job:
    """What the workers of a loader do: collect rows for batches of `batch_size`, or, with `collate`, form whole ones, or, with
    neither, send items. `prefetch` batches wait for the main process in all.
    """

    dataset: StreamDataset
    batch_size: int | None
    collate: Callable[[list[Any]], Any] | None
    workers: int
    prefetch: int
    main_pid: int = 0
    directory: str | None = None  # the main process's, removed if that is killed

    @property
    def in_rows(self) -> bool:
        """Whether batches are put together in the main process."""
        return self.batch_size is not None and self.collate is None

    @property
    def part_rows(self) -> int:
        """Items of a part."""
        if self.batch_size is None:
            return 1
        return -(-self.batch_size // self.workers) if self.in_rows else self.batch_size

    @property
    def segments(self) -> int:
        """Parts of one worker that may exist. A whole batch can come from one: W parts, one begun, one being formed."""
        return max(self.prefetch + 1, self.workers + 2) if self.in_rows else self.prefetch + 1


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
    threading.Thread(target=_listen, args=(data, control, passes, job), daemon=True).start()
    while True:
        current = passes.get()
        try:
            _read(data, job, current, segments)
        except BaseException as error:  # noqa: BLE001  (the main process raises it)
            if not current.halted:
                with suppress(OSError):  # the main process is gone: the listening thread ends this one
                    data.send((current.number, failure_of(error)))


def _listen(data: Connection, control: Connection, passes: SimpleQueue[Pass], job: Job) -> None:
    main = _watch(job.main_pid)
    with suppress(EOFError, OSError):  # the main process is gone
        _obey(data, control, passes, job, main)
    if job.directory is not None and wait(main, timeout=1.0):  # it was killed: tidy up what it could not
        shutil.rmtree(job.directory, ignore_errors=True)
    os._exit(0)  # whatever the other thread is doing


def _obey(data: Connection, control: Connection, passes: SimpleQueue[Pass], job: Job, main: list[int]) -> None:
    """Do what the main process asks for until it asks for an end or is gone."""
    current: Pass | None = None
    selector = selectors.DefaultSelector()
    readables: list[Any] = [data, control, *main]
    for readable in readables:
        selector.register(readable, selectors.EVENT_READ, readable)
    while True:
        ready = [key.data for key, _ in selector.select()]
        for connection in (data, control):
            if connection not in ready:
                continue
            verb, number, value = connection.recv()
            if verb == "exit":
                os._exit(0)
            elif verb == "pass":
                current = Pass(number, value, job.segments)
                passes.put(current)
            elif verb == "contents":  # always answered, with the number of the question
                control.send((value, _contents(current if current and current.number == number else None)))
            elif current is not None and number == current.number:  # else it is about a pass that is over
                _tell(current, verb, value)
        if data not in ready and control not in ready:
            return


def _tell(current: Pass, verb: str, value: Any) -> None:
    if verb == "free":
        current.free.put(value)
    elif verb == "halt":
        current.halt()
    elif verb == "acknowledge" and current.iteration is not None:
        current.iteration.acknowledge(value)


def _contents(current: Pass | None) -> dict[str, bytes] | Failure:
    if current is None:
        return {}
    try:
        return dict(current.share.contents) if current.iteration is None else current.iteration.contents()
    except Exception as error:  # noqa: BLE001  (the main process raises it)
        return failure_of(error)


def _watch(pid: int) -> list[int]:
    """Something that becomes readable when process `pid` ends, also if others hold our pipes open; [] if there is no such."""
    try:
        return [os.pidfd_open(pid)]
    except (AttributeError, OSError):
        return []


def _read(data: Connection, job: Job, current: Pass, segments: list[Segment]) -> None:
    iteration = current.iteration = job.dataset.open_share(current.share, lent=True)
    former = _Former(job, iteration.open(), current.share.parts)
    first = True
    try:
        while not current.halted and (place := current.free.get()) is not None:
            segment = segments[place]
            segment.begin()
            part = former.rows(segment) if job.in_rows else former.item(segment)
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

    def _passes(self) -> Iterator[tuple[list[Any], int, list[Run]]]:
        """The items of a part as the rotation gives them, pass by pass: (items, turn, runs), see `Rotation.step`."""
        wanted = self._job.part_rows
        while wanted:
            got, turn, runs = self._rotation.step(wanted)
            if not runs:
                return
            wanted -= len(got)
            yield got, turn, runs

    def rows(self, segment: Segment) -> Part | None:
        """Some rows of a batch, collated into the segment; None at the end."""
        items: list[Any] = []
        slots: list[int] = []
        cursors: list[Cursor] = []
        ended: list[tuple[int, int, Mark]] = []
        for got, turn, runs in self._passes():
            items += got
            slots += [turn * self._parts + run.p for run in runs[: len(got)]]
            cursors += [run.mark()[2] for run in runs[: len(got)]]
            ended += [(len(items), run.p, run.mark()) for run in runs[len(got) :]]
        if not items:
            return None
        skeleton = encode_rows(items, segment)
        return Part(0, 0, skeleton, np.array(slots, np.int64).tobytes(), cursors, ended)

    def item(self, segment: Segment) -> Part | None:
        """What the pipeline gave, or a whole batch of the user's collate; None at the end."""
        items: list[Any] = []
        slot = -1
        changed: dict[int, Run] = {}
        for got, turn, runs in self._passes():
            if got and not items:
                slot = turn * self._parts + runs[0].p
            items += got
            changed.update({run.p: run for run in runs})
        if not items:
            return None
        batch = items[0] if self._job.collate is None else self._job.collate(items)
        marks = [(0, p, run.mark()) for p, run in changed.items()]
        return Part(0, 0, encode(batch, segment), np.array([slot], np.int64).tobytes(), marks=marks, rows=len(items))


def failure_of(error: BaseException) -> Failure:
    """`error` in a form that can be sent."""
    text = "".join(traceback.format_exception(error))
    try:
        packed = bytes(ForkingPickler.dumps(error))
        ForkingPickler.loads(packed)
    except Exception:  # noqa: BLE001  (an exception may refuse in any way)
        return Failure(None, type(error).__name__, text)
    return Failure(packed, type(error).__name__, text)
