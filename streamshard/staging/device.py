"""A device as staging sees it: memory, one stream for copies, and events between that stream and the consumer's.

`CudaDevice` is torch.cuda; `CpuDevice` does everything at once, so that the same program runs without an accelerator. What
CUDA promises and staging relies on: work on a stream runs in order; an event is over when everything before it on its stream
is; a stream that waits for an event runs nothing later before that.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from streamshard.errors import UsageError
from streamshard.staging.buffers import Event, copy


class Device(Protocol):
    """The verbs of staging. `copy` and the waiting verbs return at once; only `Event.synchronize` blocks."""

    def host(self, size: int) -> torch.Tensor:
        """`size` bytes of host memory that copies to the device can read while the program goes on."""

    def memory(self, size: int) -> torch.Tensor:
        """`size` bytes of device memory, first used by the copy stream."""

    def reads(self, tensor: torch.Tensor) -> bool:
        """Whether copies can read this host tensor while the program goes on."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the copy stream, also between dtypes on the device."""

    def copied(self) -> Event:
        """The place in the copy stream after all copies so far."""

    def passed(self) -> Event:
        """The place in the consumer's stream after everything that the consumer has asked for so far."""

    def copies_wait(self, event: Event) -> None:
        """Later copies wait for `event`."""

    def consumer_waits(self, event: Event) -> None:
        """What the consumer asks for later waits for `event`."""

    def lend(self, tensor: torch.Tensor) -> None:
        """The consumer's stream uses `tensor`: its memory is not to be given away before that stream is done with it."""


class _Over:
    """An event of a device that does everything at once."""

    def synchronize(self) -> None:
        return


class CpuDevice:
    """Host memory as a device: copies happen when they are asked for."""

    def host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def reads(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002  (the protocol's)
        return True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy(target, source)

    def copied(self) -> Event:
        return _Over()

    def passed(self) -> Event:
        return _Over()

    def copies_wait(self, event: Event) -> None:
        event.synchronize()

    def consumer_waits(self, event: Event) -> None:
        event.synchronize()

    def lend(self, tensor: torch.Tensor) -> None:
        """Nothing to do: there is one memory and no stream."""


class CudaDevice:
    """One CUDA device and the copy stream of this process for it."""

    def __init__(self, device: torch.device, *, pin_memory: bool = True) -> None:
        self._device = device
        self._pin = pin_memory
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch

    def host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)

    def memory(self, size: int) -> torch.Tensor:
        with torch.cuda.stream(self._stream):  # the caching allocator gives it back in this stream's order
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def reads(self, tensor: torch.Tensor) -> bool:
        return not self._pin or tensor.is_pinned()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def copied(self) -> Event:
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch; a thread waits for it
        event.record(self._stream)
        return event

    def passed(self) -> Event:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copies_wait(self, event: Event) -> None:
        self._stream.wait_event(event)  # type: ignore[arg-type]  # our own

    def consumer_waits(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[arg-type]  # our own

    def lend(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


def check_device(device: str | torch.device | None, *, pin_memory: bool | None) -> torch.device | None:
    """`device` as torch has it; `UsageError` if it is unknown, absent, or has no staging."""
    if pin_memory and not torch.cuda.is_available():
        raise UsageError("pin_memory=True needs CUDA, and torch.cuda.is_available() is False here; leave it out")
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device={device!r} is no device that torch knows: pass 'cuda', 'cuda:1' or 'cpu'") from error
    if found.type == "cpu":
        return found
    if found.type != "cuda":
        raise UsageError(
            f"device={device!r}: batches are staged on CUDA devices and 'cpu'; pass device=None and move them"
        )
    if not torch.cuda.is_available():
        raise UsageError(f"device={device!r}: torch.cuda.is_available() is False here; pass device='cpu' or None")
    if found.index is not None and found.index >= torch.cuda.device_count():
        raise UsageError(
            f"device={device!r}: this machine has {torch.cuda.device_count()} CUDA devices, from cuda:0 on"
        )
    return found


def open_device(device: torch.device, *, pin_memory: bool) -> Device:
    """The device to stage on. One copy stream for each in a process, however many loaders use it."""
    if device.type == "cpu":
        return CpuDevice()
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda(index, pin_memory=pin_memory)


@cache
def _cuda(index: int, *, pin_memory: bool) -> CudaDevice:
    return CudaDevice(torch.device("cuda", index), pin_memory=pin_memory)
