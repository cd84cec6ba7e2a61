"""Where a loader stands: what was handed out, and with accumulation what belongs to complete optimizer steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from streamshard.iteration import Mark, Share
from streamshard.state import PartitionState

_logger = logging.getLogger("streamshard")


class Position:
    """The partitions of a rank after the last batch handed out, or after the last `accumulation` of them."""

    def __init__(self, shares: list[Share], accumulation: int) -> None:
        self.epoch = shares[0].epoch
        self.batches = 0  # handed out
        self.exhausted = False
        self._accumulation = accumulation
        self._begin = {p: state for share in shares for p, state in {**share.carried, **share.live}.items()}
        self._marks: dict[int, Mark] = {}
        self._since: dict[int, Mark] = {}  # of batches after the last boundary
        self._told = False

    def advance(self, marks: Mapping[int, Mark]) -> Mapping[int, Mark] | None:
        """A batch is handed out. Returns what became part of the state by it, if anything did."""
        self.batches += 1
        if self._accumulation == 1:
            self._marks.update(marks)
            return marks
        self._since.update(marks)
        return self._boundary() if self.batches % self._accumulation == 0 else None

    def finish(self, marks: Mapping[int, Mark]) -> Mapping[int, Mark]:
        """The end: it completes the optimizer step that it finds begun."""
        self.exhausted = True
        self._since.update(marks)
        return self._boundary()

    def _boundary(self) -> Mapping[int, Mark]:
        added, self._since = self._since, {}
        self._marks.update(added)
        return added

    def partitions(self) -> dict[int, PartitionState]:
        """Where the partitions stand."""
        return {**self._begin, **{p: PartitionState(*mark) for p, mark in self._marks.items()}}

    def warn_off_boundary(self) -> None:
        """Log, once, that the state is not that of the last batch, if it is not."""
        if self._since and not self._told:
            self._told = True
            _logger.warning(
                "state_dict() after batch %d, in the middle of an optimizer step of %d: the state is that of the last complete "
                "step, and a resume repeats the %d batches after it. Save after optimizer.step()",
                self.batches, self._accumulation, self.batches % self._accumulation,
            )  # fmt: skip
