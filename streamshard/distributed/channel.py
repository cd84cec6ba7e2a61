"""Messages from one process to its peers, over sockets of their own.

A gloo group made by hand: `torch.distributed.new_group` has to be called by the whole job at once and in the same order, and a
group of the caller's cannot be used from another thread than the one that trains.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from streamshard.distributed.job import running, store
from streamshard.errors import UsageError, WorkerError

# Between two batches there may be an evaluation of hours. A peer that is gone is noticed by its closed connection.
_TIMEOUT = timedelta(days=7)


class Channel:
    """From the first process of `group` to its others. Building one is a collective of `group`.

    A message is two strings of bytes. One thread uses it at a time: it has `lock` meanwhile.
    """

    def __init__(self, group: Any) -> None:
        if not running():
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
        drawn = [secrets.token_hex(8)]  # so that nothing an earlier life of the job has left in the store is met
        torch.distributed.broadcast_object_list(drawn, src=self.ranks[0], group=group)
        made: Any = torch.distributed  # torch has no types for these
        prefixed = made.PrefixStore(f"streamshard/channel/{drawn[0]}", store())
        self._gloo = made.ProcessGroupGloo(prefixed, self.ranks.index(mine), len(self.ranks), _TIMEOUT)

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
        """From the first to each of the others, directly: whoever loses the connection hears of it."""
        if not self.sends:
            self._done(lambda: self._gloo.recv([tensor], 0, 0).wait(), 0)
            return
        sent = [(self._gloo.send([tensor], place, 0), place) for place in range(1, len(self.ranks))]
        for work, place in sent:
            self._done(work.wait, place)

    def _done(self, wait: Callable[[], Any], place: int) -> None:
        try:
            wait()
        except RuntimeError as error:
            raise WorkerError(
                f"global rank {self.ranks[place]}, which {'gets' if self.sends else 'reads'} the batches of the group "
                f"{self.ranks}, is gone ({str(error).splitlines()[0]}). Restart the job from its last checkpoint"
            ) from error
