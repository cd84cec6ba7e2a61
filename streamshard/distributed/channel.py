"""Messages from one process to its peers, over sockets of their own.

A gloo group made by hand: `torch.distributed.new_group` has to be called by the whole job at once and in the same order, and a
group of the caller's cannot be used from another thread than the one that trains.
"""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from streamshard.errors import UsageError, WorkerError

# Between two batches there may be an evaluation of hours. A peer that is gone is noticed by its closed connection.
_TIMEOUT = timedelta(days=7)
_opened: Counter[tuple[int, ...]] = Counter()  # channels between the same processes: all of them count alike


class Channel:
    """From the first process of `group` to its others. Building one waits for all of them.

    A message is two strings of bytes. One thread uses it at a time: it has `lock` meanwhile.
    """

    def __init__(self, group: Any) -> None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise UsageError(
                "there is no process group to share batches in: call torch.distributed.init_process_group first"
            )
        self.ranks: list[int] = torch.distributed.get_process_group_ranks(group)
        mine = torch.distributed.get_rank()
        if mine not in self.ranks:
            raise UsageError(
                f"global rank {mine} is not in the group of ranks {self.ranks} that it shares batches with"
            )
        self.sends = mine == self.ranks[0]
        self.lock = threading.Lock()
        _opened[tuple(self.ranks)] += 1
        name = f"streamshard/channel/{'-'.join(map(str, self.ranks))}/{_opened[tuple(self.ranks)]}"
        # torch has no public name for the store that the job was set up with, and no types for what comes of it
        torch_distributed: Any = torch.distributed
        store = torch_distributed.PrefixStore(name, torch_distributed.distributed_c10d._get_default_store())  # noqa: SLF001
        self._gloo = torch_distributed.ProcessGroupGloo(store, self.ranks.index(mine), len(self.ranks), _TIMEOUT)

    def send(self, kind: int, head: bytes, body: torch.Tensor) -> None:
        """Give all peers a message; `body` is a tensor of uint8."""
        self._pass(torch.tensor([kind, len(head), body.numel()]))
        if head:
            self._pass(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        if body.numel():
            self._pass(body)

    def receive(self) -> tuple[int, bytes, int]:
        """(kind, head, size of the body) of the next message. If there is a body, `receive_body` has to follow."""
        sizes = torch.zeros(3, dtype=torch.int64)
        self._pass(sizes)
        kind, length, size = sizes.tolist()
        head = torch.empty(length, dtype=torch.uint8)
        if length:
            self._pass(head)
        return kind, head.numpy().tobytes(), size

    def receive_body(self, memory: torch.Tensor) -> None:
        """The body, into `memory` of that many bytes."""
        self._pass(memory)

    def _pass(self, tensor: torch.Tensor) -> None:
        try:
            self._gloo.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            peers = ", ".join(map(str, self.ranks[1:]))
            gone = f"one of the ranks {peers}, which get" if self.sends else f"global rank {self.ranks[0]}, which reads"
            raise WorkerError(
                f"{gone} the batches of the group {self.ranks}, is gone ({str(error).splitlines()[0]}). Restart the job from "
                f"its last checkpoint"
            ) from error
