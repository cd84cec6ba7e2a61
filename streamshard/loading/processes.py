"""Worker processes as a source of batches: started once, given a share for every iteration, merged by slots.

The order does not depend on how many workers there are: whoever has the least slot is next. So the main process needs a part
of every worker that is not at its end before it can choose.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler, send_handle
from typing import Any

import numpy as np

from streamshard.errors import UsageError, WorkerError
from streamshard.iteration import Mark, Share
from streamshard.loading.formed import Formed
from streamshard.loading.parts import Part, Piece, assemble, decode
from streamshard.loading.shared_memory import Segment, anonymous_file
from streamshard.loading.worker import End, Failure, Job, work
from streamshard.staging.buffers import Buffers
from streamshard.steps.tensors import Empty

_EXIT_S = 2.0


class WorkerTraceback(Exception):  # noqa: N818  (it is shown as the cause of an error, not raised)
    """The traceback in the worker, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Worker:
    """One worker process, seen from here."""

    def __init__(self, number: int, job: Job, method: str, others: Sequence[Worker]) -> None:
        self.name = f"worker {number} of {job.workers}"
        self.inbox: deque[Part | End | Failure] = deque()
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":  # import torch once, in the server, and not in every worker
            known = getattr(forkserver._forkserver, "_preload_modules", ["__main__"])  # noqa: SLF001  (there is no other way to add to it)
            context.set_forkserver_preload([*known, work.__module__] if work.__module__ not in known else known)
        self.data, data = context.Pipe()
        self.control, control = context.Pipe()
        ends = [end for worker in others for end in (worker.data, worker.control)] + [self.data, self.control]
        inherited = ends if method == "fork" else []  # a pipe ends only when no copy of its other end is open anywhere
        self.process = context.Process(
            target=work, args=(data, control, job, inherited), name=f"streamshard-{number}", daemon=True
        )
        try:
            self.process.start()
        except Exception as error:
            if (
                not isinstance(error, TypeError | AttributeError | ValueError)
                and type(error).__name__ != "PicklingError"
            ):
                raise
            raise UsageError(
                f"the dataset's steps or collate cannot be sent to worker processes: {error}. Define their functions at the "
                f"top of a module (no lambda, no function inside a function), or use workers=0 or start_method='fork'"
            ) from error
        finally:
            data.close()
            control.close()
        self.segments = [self._share_segment() for _ in range(job.segments)]

    def _share_segment(self) -> Segment:
        descriptor = anonymous_file()
        try:
            send_handle(self.data, descriptor, self.process.pid)
        except OSError as error:
            os.close(descriptor)
            raise self.gone() from error
        return Segment(descriptor)

    def gone(self) -> WorkerError:
        """What to raise when the process has ended."""
        self.process.join(_EXIT_S)
        code = self.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            cure = "a SIGKILL is usually the kernel's when memory runs out: fewer workers, a smaller shuffle_buffer or prefetch"
        else:
            how = f"ended with exit code {code}"
            cure = "see its output above; a script that starts workers needs `if __name__ == '__main__':` around what it runs"
        return WorkerError(
            f"{self.name} (pid {self.process.pid}) {how}. Nothing is lost: the state is that of the last batch handed out; "
            f"{cure}"
        )

    def tell(self, connection: Connection, verb: str, number: int, value: object) -> None:
        """Send, unless the process is gone, which whoever waits for it will see."""
        try:
            connection.send((verb, number, value))
        except OSError:
            return


class WorkerGroup:
    """The workers of a loader. They live until `close`, over many iterations."""

    def __init__(self, job: Job, method: str) -> None:
        if multiprocessing.current_process().daemon:
            raise UsageError("a daemonic process cannot start worker processes; use workers=0 there")
        directory = util.get_temp_dir() if method == "forkserver" else None
        job = replace(job, main_pid=os.getpid(), directory=directory)
        self.in_rows, self.batch_size = job.in_rows, job.batch_size
        self.workers: list[Worker] = []
        self.passes = 0
        self._end = weakref.finalize(self, _end, self.workers, os.getpid())
        for number in range(job.workers):
            self.workers.append(Worker(number, job, method, self.workers))

    def begin(self, shares: Sequence[Share]) -> int:
        """Start an iteration; returns its number."""
        self.passes += 1
        for worker, share in zip(self.workers, shares, strict=True):
            worker.inbox.clear()
            worker.tell(worker.data, "pass", self.passes, share)
        return self.passes

    @property
    def alive(self) -> bool:
        """Whether all are there."""
        return all(worker.process.is_alive() for worker in self.workers)

    def close(self) -> None:
        """End the processes; may be called again."""
        self._end()


def _end(workers: list[Worker], pid: int) -> None:
    if pid != os.getpid():  # a forked child has no children
        return
    for worker in workers:
        worker.tell(worker.control, "exit", 0, None)
        worker.data.close()
        worker.control.close()
    for worker in workers:
        worker.process.join(_EXIT_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join(_EXIT_S)
        worker.process.close()
        for segment in worker.segments:
            segment.close()


@dataclass(slots=True)
class _Gathered:
    """Rows found so far for a batch, the parts used up by them, and where partitions stand after them."""

    rows: int = 0
    pieces: list[Piece] = field(default_factory=list)
    used: list[tuple[Worker, Part]] = field(default_factory=list)
    marks: dict[int, Mark] = field(default_factory=dict)


class ProcessSource:
    """One iteration of a group: batches made of workers' rows, or items as they come."""

    def __init__(
        self,
        group: WorkerGroup,
        shares: Sequence[Share],
        buffers: Callable[[], Buffers | None],
        empty: Empty,
        *,
        keep: bool,
    ) -> None:
        self._group = group
        self._buffers = buffers
        self._empty = empty
        self._keep = keep
        self._parts = shares[0].parts
        self._holder = {p: worker for worker, share in zip(group.workers, shares, strict=True) for p in share.live}
        self._heads: dict[Worker, tuple[Part, np.ndarray, int]] = {}  # part, slots, rows taken
        self._running = list(group.workers)
        self._ended: dict[int, Mark] = {}  # found at workers' ends, for the next batch
        self._questions = 0
        self._interrupted, self._interrupt = os.pipe()
        self._selector = (
            selectors.DefaultSelector()
        )  # made once: `multiprocessing.connection.wait` makes one for every call
        self._selector.register(self._interrupted, selectors.EVENT_READ, None)
        for worker in group.workers:
            self._selector.register(worker.data, selectors.EVENT_READ, (worker, worker.data))
            self._selector.register(worker.process.sentinel, selectors.EVENT_READ, (worker, None))
        weakref.finalize(self, _let_go, self._selector, self._interrupted, self._interrupt)
        self._pass = group.begin(shares)

    # ------------------------------------------------------------------------------------------ the reading thread

    def batches(self) -> Iterator[Formed]:
        while self._fill_heads():
            formed = self._next_rows(self._group.batch_size or 1) if self._group.in_rows else self._next_item()
            formed.marks.update(self._ended)
            self._ended = {}
            yield formed
        yield Formed(None, self._ended, last=True)

    def _fill_heads(self) -> bool:
        """See that there is a part of every worker that is not at its end; False if all are."""
        self._running = [worker for worker in self._running if self._has_head(worker)]
        return bool(self._running)

    def _has_head(self, worker: Worker) -> bool:
        """Whether `worker` has something left to give; waits for it. Raises what the worker failed with."""
        if worker in self._heads:
            return True
        while not worker.inbox:
            self._receive()
        found = worker.inbox.popleft()
        if isinstance(found, Failure):
            raise _error(worker, found)
        if isinstance(found, End):
            self._ended.update(found.marks)
            return False
        self._heads[worker] = (found, np.frombuffer(found.slots, np.int64), 0)
        return True

    def _receive(self) -> None:
        """Wait until any worker has sent something, or has ended."""
        ready = [key.data for key, _ in self._selector.select()]
        if None in ready:
            raise WorkerError("the iteration was closed")
        ended = [worker for worker, connection in ready if connection is None]
        for worker, connection in ready:
            if connection is not None:
                self._take_message(worker)
        for worker in ended:
            if not worker.data.poll():
                raise worker.gone()

    def _take_message(self, worker: Worker) -> None:
        try:
            number, message = worker.data.recv()
        except (EOFError, ConnectionResetError) as error:
            raise worker.gone() from error
        if number == self._pass:
            worker.inbox.append(message)

    def _next_item(self) -> Formed:
        worker = min(self._heads, key=lambda worker: self._heads[worker][1][0])
        part, _, _ = self._heads.pop(worker)
        buffers = self._buffers()
        empty = self._empty if buffers is None else buffers.empty
        batch = decode(part.skeleton, worker.segments[part.segment], part.size, empty)
        worker.tell(worker.data, "free", self._pass, part.segment)
        return Formed(batch, {p: mark for _, p, mark in part.marks}, buffers=buffers, rows=part.rows)

    def _next_rows(self, rows: int) -> Formed:
        batch = _Gathered()
        while batch.rows < rows and self._fill_heads():
            self._gather(batch, rows - batch.rows)
        buffers = self._buffers()
        whole = assemble(batch.pieces, batch.rows, self._empty if buffers is None else buffers.empty)
        for worker, part in batch.used:
            worker.tell(worker.data, "free", self._pass, part.segment)
        return Formed(whole, batch.marks, buffers=buffers, rows=batch.rows)

    def _gather(self, batch: _Gathered, wanted: int) -> None:
        """Add the rows with the least slots, out of the heads; none beyond what a worker may still have to give."""
        heads = [(worker, *self._heads[worker]) for worker in self._running]
        slots = np.concatenate([slots[taken:] for _, _, slots, taken in heads])
        owner = np.repeat(np.arange(len(heads)), [len(slots) - taken for _, _, slots, taken in heads])
        order = np.argsort(slots, kind="stable")
        limit = min(int(slots[-1]) for _, _, slots, _ in heads)
        count = min(wanted, int(np.searchsorted(slots[order], limit, side="right")))
        chosen = owner[order[:count]]
        for number, (worker, part, part_slots, taken) in enumerate(heads):
            targets = np.flatnonzero(chosen == number)
            if not len(targets):
                continue
            last = taken + len(targets)
            batch.pieces.append(Piece(part, worker.segments[part.segment], taken, last, targets + batch.rows))
            for slot, cursor in zip(part_slots[taken:last].tolist(), part.cursors[taken:last], strict=True):
                batch.marks[slot % self._parts] = (slot // self._parts + 1, False, cursor)
            batch.marks.update({p: mark for row, p, mark in part.marks if taken < row <= last or row == taken == 0})
            if last == len(part_slots):
                del self._heads[worker]
                batch.used.append((worker, part))
            else:
                self._heads[worker] = (part, part_slots, last)
        batch.rows += count

    def close(self) -> None:
        for worker in self._group.workers:
            worker.tell(worker.data, "halt", self._pass, None)

    # --------------------------------------------------------------------------------------------- any other thread

    def interrupt(self) -> None:
        os.write(self._interrupt, b"!")

    def acknowledge(self, marks: Mapping[int, Mark]) -> None:
        if not self._keep:
            return
        for worker in self._group.workers:
            mine = {p: mark for p, mark in marks.items() if self._holder.get(p) is worker}
            if mine:
                worker.tell(worker.control, "acknowledge", self._pass, mine)

    def contents(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        if not self._keep:
            return found
        self._questions += 1
        for worker in self._group.workers:
            worker.tell(worker.control, "contents", self._pass, self._questions)
        for worker in self._group.workers:
            answer = self._answer(worker)
            if isinstance(answer, Failure):
                raise _error(worker, answer)
            found.update(answer)
        return found

    def _answer(self, worker: Worker) -> Any:
        while True:
            wait([worker.control, worker.process.sentinel])
            try:
                if not worker.control.poll():
                    raise worker.gone()
                question, answer = worker.control.recv()
            except (EOFError, ConnectionResetError) as error:
                raise worker.gone() from error
            if question == self._questions:  # else one that was given up, by Ctrl-C
                return answer


def _let_go(selector: selectors.BaseSelector, *descriptors: int) -> None:
    selector.close()
    for descriptor in descriptors:
        os.close(descriptor)


def _error(worker: Worker, failure: Failure) -> BaseException:
    cause = WorkerTraceback(failure.text)
    if failure.packed is None:
        error: BaseException = WorkerError(
            f"{worker.name} failed with {failure.name}, which cannot be sent: {failure.text}"
        )
    else:
        try:
            error = ForkingPickler.loads(failure.packed)
        except Exception:  # noqa: BLE001  (a class that this process cannot import, say)
            return WorkerError(f"{worker.name} failed with {failure.name}: {failure.text}")
        error.add_note(f"in {worker.name} (pid {worker.process.pid})")
    error.__cause__ = cause
    return error
