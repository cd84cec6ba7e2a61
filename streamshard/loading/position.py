"""Where a loader stands: what was handed out, what of it is confirmed, and with accumulation what belongs to whole steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from streamshard.iteration import Mark, Share
from streamshard.state import PartitionState

_logger = logging.getLogger("streamshard")


class _Handed(NamedTuple):
    marks: Mapping[int, Mark] | None
    end: bool
    worker: int
    last: bool = False  # known to be the last batch of the epoch


class Position:
    """The partitions of a rank after the last batch confirmed, or after the last `accumulation` of them.

    A batch is confirmed as it is handed out, unless whoever reads does that itself because it looks ahead. The end of an epoch
    is an entry of its own after the last batch. before: batches of this epoch in earlier lives. expected: batches that are
    left of it, where that is known.
    """

    def __init__(
        self, shares: list[Share], accumulation: int = 1, before: int = 0, expected: int | None = None
    ) -> None:
        self.epoch = shares[0].epoch
        self.before = before
        self.expected = expected
        self.handed_out = 0
        self.complete = False  # nothing more of the epoch is to be handed out
        self.ended = False  # and that is confirmed
        self._accumulation = accumulation
        self.last_worker = -1  # that made the last batch confirmed
        self.workers = [tuple(share.live) for share in shares]
        self._begin = {p: state for share in shares for p, state in {**share.carried, **share.live}.items()}
        self._handed: deque[_Handed] = deque()  # and not confirmed
        self._marks: dict[int, Mark] = {}
        self._since: dict[int, Mark] = {}  # of batches confirmed after the last boundary
        self._confirmed = self._at_boundary = 0
        self._told = False

    def hand_out(self, marks: Mapping[int, Mark], worker: int = 0, *, last: bool = False) -> None:
        """A batch goes out; `worker` made it, where that matters."""
        self.handed_out += 1
        self._handed.append(_Handed(marks, end=False, worker=worker, last=last))

    def end(self, marks: Mapping[int, Mark] | None) -> None:
        """There is nothing more; without `marks` partitions are where the last batch left them, and done."""
        self.complete = True
        self._handed.append(_Handed(marks, end=True, worker=-1))

    @property
    def unconfirmed(self) -> int:
        """Batches handed out and not confirmed."""
        return sum(not handed.end for handed in self._handed)

    @property
    def at_end(self) -> bool:
        """Whether all batches are confirmed and the end is what comes next."""
        return bool(self._handed) and self._handed[0].end

    def confirm(self) -> Mapping[int, Mark]:
        """The earliest entry not confirmed is now part of what was read. Returns what became part of the state by it."""
        marks, end, worker, last = self._handed.popleft()
        if marks is None:
            marks = {p: (part.turn, True, part.cursor) for p, part in self._after(self._since).items()}
        self._since.update(marks)
        if not end:
            self._confirmed += 1
            self.last_worker = worker
            if (
                self._confirmed % self._accumulation and not last
            ):  # the last batch completes the step that it finds begun
                return {}
        self.ended = end
        added, self._since = self._since, {}  # the end completes the optimizer step that it finds begun
        self._marks.update(added)
        self._at_boundary = self._confirmed
        return added

    @property
    def batches(self) -> int:
        """Batches of this epoch up to the state, those of earlier lives included."""
        return self.before + self._at_boundary

    def partitions(self) -> dict[int, PartitionState]:
        """Where the partitions stand."""
        return self._after({})

    def _after(self, marks: Mapping[int, Mark]) -> dict[int, PartitionState]:
        return {**self._begin, **{p: PartitionState(*mark) for p, mark in {**self._marks, **marks}.items()}}

    def warn_off_boundary(self) -> None:
        """Log, once, that the state is not that of the last batch, if it is not."""
        if self._since and not self._told:
            self._told = True
            _logger.warning(
                "state_dict() after batch %d, in the middle of an optimizer step of %d: the state is that of the last complete "
                "step, and a resume repeats the %d batches after it. Save after optimizer.step()",
                self._confirmed, self._accumulation, self._confirmed % self._accumulation,
            )  # fmt: skip
