"""Moves batches to the device before they are needed, through a fixed number of slots.

A slot is a place for one batch on the device. Its life:

    free -> (stager) host memory filled, copies issued on the copy stream, `copied` recorded
         -> (consumer) its stream waits for `copied`, the batch is handed out
         -> (consumer, when it comes for the next batch) `passed` recorded on its stream -> free

Before a slot's device memory is written again the copy stream waits for `passed`; before its host memory is, the stager
waits for `copied`. So nothing is overwritten while in use, and neither side's program ever waits for the device, but for the
stager when it is a whole round of slots ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch

from streamshard.errors import DataError, UsageError
from streamshard.staging.buffers import Buffers, Event, copy, shaped, size_of
from streamshard.staging.device import Device
from streamshard.staging.tree import Path, dotted, map_tensors


class Waiting(Protocol):
    """What carries a batch: it is replaced by the staged one. `buffers`, if any, are free when it has been copied."""

    batch: Any
    buffers: Buffers | None


W = TypeVar("W", bound=Waiting)


class Ready(Protocol):
    """A bounded queue from the stager's thread to the consumer's."""

    def put(self, thing: Any) -> bool: ...
    def take(self) -> Any: ...
    def end(self, failure: BaseException | None = None) -> None: ...
    def close(self) -> None: ...


class Slot:
    """A place for one batch on the device, with the host memory that it is copied from."""

    def __init__(self, device: Device, *, static: bool) -> None:
        self.host = Buffers(device.host)
        self.static = Buffers(device.memory, _grown) if static else None
        self.copied: Event | None = None
        self.passed: Event | None = None
        self.tensors: list[torch.Tensor] = []


class Stager(Generic[W]):
    """Stages what `take` gives, in a thread of its own, and hands it out by its own `take`.

    slots: made once and used by one stager after another, so that static addresses outlive an iteration. dtypes: path of a leaf
    -> what to convert it to on the device. give_back: gets the buffers of batches that have been copied.
    """

    def __init__(
        self,
        take: Callable[[], W | None],
        device: Device,
        ready: Ready,
        give_back: Callable[[Buffers], None],
        *,
        slots: Sequence[Slot],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self.ready = ready
        self._source = take
        self._device = device
        self._give_back = give_back
        self._dtypes = dtypes
        self._converted: set[str] = set()
        self._checked = not dtypes
        self._raw = Buffers(device.memory)
        self._free: SimpleQueue[Slot | None] = SimpleQueue()
        for slot in slots:
            slot.passed = device.passed()  # whatever an earlier iteration handed out
            self._free.put(slot)
        self._held: Slot | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="streamshard-staging", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ the stager's thread

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while (waiting := self._source()) is not None:
                slot = self._free.get()
                if slot is None or self._closed:
                    break
                self._stage(waiting, slot)
                if not self.ready.put((waiting, slot)):
                    break
        except BaseException as error:  # noqa: BLE001  (the training loop's thread raises it)
            failure = error
        self.ready.end(failure)
        failure = None  # see Producer

    def _stage(self, waiting: W, slot: Slot) -> None:
        device = self._device
        slot.host.begin()
        slot.tensors = []
        if slot.passed is not None:
            device.copies_wait(slot.passed)
        waiting.batch = map_tensors(waiting.batch, partial(self._move, slot))
        slot.copied = slot.host.busy = device.copied()
        if not self._checked and waiting.batch is not None:
            self._check_dtypes()
        if waiting.buffers is not None:
            waiting.buffers.busy = slot.copied
            self._give_back(waiting.buffers)
            waiting.buffers = None

    def _check_dtypes(self) -> None:
        self._checked = True
        unknown = sorted(set(self._dtypes) - self._converted)
        if unknown:
            raise UsageError(f"dtypes={self._dtypes!r}: the first batch has no tensor {unknown[0]!r}; correct the name")

    def _move(self, slot: Slot, path: Path, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor  # there already, or nothing that lies in one piece of memory
        device, shape, tensor = self._device, tuple(tensor.shape), tensor.detach()
        source = tensor
        if not device.reads(tensor):
            source = slot.host.take(path, shape, tensor.dtype)
            copy(source, tensor)
        dtype = tensor.dtype
        if self._dtypes and dotted(path) in self._dtypes:
            dtype = self._dtypes[dotted(path)]
            self._converted.add(dotted(path))
        if slot.static is not None:
            target = slot.static.take(path, shape, dtype)
        else:
            target = shaped(device.memory(size_of(shape, dtype)), shape, dtype)
        if dtype != tensor.dtype:
            raw = self._raw.take(path, shape, tensor.dtype)  # only the copy stream uses it, and in order
            device.copy(raw, source)
            source = raw
        device.copy(target, source)
        slot.tensors.append(target)
        return target

    # -------------------------------------------------------------------------------------------- the consumer's thread

    def take(self) -> W | None:
        """The next batch, on the device; None at the end. Asking for it gives up the one before."""
        if self._held is not None:
            self._held.passed = self._device.passed()
            self._held.tensors = []
            self._free.put(self._held)
            self._held = None
        staged = self.ready.take()
        if staged is None:
            return None
        waiting, self._held = staged
        if self._held.copied is not None:
            self._device.consumer_waits(self._held.copied)
        for tensor in self._held.tensors:
            self._device.lend(tensor)
        return waiting  # type: ignore[no-any-return]  # what `_run` put

    def stop(self) -> None:
        """Stage no more. The source has to stop too; then `join`."""
        self._closed = True
        self.ready.close()
        self._free.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)


def _grown(key: Any, there: int, needed: int) -> None:
    raise DataError(
        f"static_buffers=True: the field {dotted(key)!r} needs {needed} bytes and its device buffer has {there}, which must "
        f"not move; let the first batch be the largest (fixed shapes, Batch(n, drop_last=True)), or leave static_buffers out"
    )
