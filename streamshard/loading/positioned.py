"""What loaders of a `StreamDataset` have in common: the state of what was handed out, confirmation, and the length."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from streamshard.dataset import StreamDataset, left_in_the_middle
from streamshard.errors import UsageError
from streamshard.frameworks.callers import lightning_trains, refuse_bare_dcp, refuse_one_file_for_all
from streamshard.iteration import Mark, Share
from streamshard.loading.position import Position
from streamshard.state import State
from streamshard.steps.counts import Counts, SourceProgress

_logger = logging.getLogger("streamshard")


class PositionedLoader:
    """Base of loaders that hand out batches and know where partitions stood after each of them."""

    dataset: StreamDataset

    def __init__(self, dataset: StreamDataset) -> None:
        self.dataset = dataset
        self._position: Position | None = None  # none until the first batch is asked for
        self._by_call = False

    # ------------------------------------------------------------------------------------- what a loader has to say

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def _reading(self) -> int:
        """Worker processes; 0: this process reads."""
        raise NotImplementedError

    def _count(self, items: Sequence[int]) -> int:
        """The batches made of so many items, which are those of this process or of each worker."""
        raise NotImplementedError

    def _contents(self) -> dict[str, bytes]:
        """The samples of a contents snapshot."""
        raise NotImplementedError

    def _workers_in_turn(self, position: Position) -> Sequence[Sequence[int]]:  # noqa: ARG002  (for some)
        """The partitions of each worker, the one whose turn is next first, if batches come from one worker each."""
        return ()

    def _acknowledge(self, marks: Mapping[int, Mark]) -> None:
        """`marks` became part of the state."""

    def _stop(self) -> None:
        """A state is about to be loaded: whoever still reads for this loader must not write into what is shared any more."""

    def _reset(self) -> None:
        """A state was loaded: what is being read is of no use any more."""

    # --------------------------------------------------------------------------------------------------- confirming

    def confirm_by_call(self) -> None:
        """From now on a batch counts for the state when `confirm` is called for it, not when it is handed out.

        For trainers that take batches ahead of the one they train on: without this, a checkpoint is ahead of the training, and
        the batches in between are never trained on.
        """
        self._by_call = True

    def confirm(self) -> None:
        """The earliest batch handed out and not confirmed was trained on. Raises `UsageError` if there is none."""
        position = self._position
        if position is None or not position.unconfirmed:
            raise UsageError("confirm() was called more often than batches were handed out; call it once for each")
        self._acknowledge(position.confirm())

    def confirm_end(self) -> None:
        """The epoch is over: if all its batches are confirmed, the state is that of its end, and a resume begins the next."""
        if self._position is not None and self._position.at_end:
            self._acknowledge(self._position.confirm())

    def _confirm_end_unless_by_call(self) -> None:
        if not self._by_call:
            self.confirm_end()

    @property
    def in_the_middle(self) -> bool:
        """Whether a pass was begun and left before all of it was handed out and confirmed."""
        position = self._position
        if position is None or position.handed_out == 0 or self.dataset.has_pending_state:
            return False
        return not position.complete or position.unconfirmed > 0

    def _refuse_bare_trainer(self) -> None:
        if not self._by_call and lightning_trains():
            raise UsageError(
                f"Lightning takes batches ahead of the training and saves rank 0's state only: checkpoints would lose samples. "
                f"Pass trainer.fit(model, datamodule=LightningData(loader)), from streamshard.frameworks.lightning, "
                f"instead of this {type(self).__name__}"
            )

    def _handed_out(self, position: Position, marks: Mapping[int, Mark], worker: int = 0) -> None:
        position.hand_out(marks, worker, last=position.handed_out + 1 == position.expected)
        if not self._by_call:
            self._acknowledge(position.confirm())

    def _ended(self, position: Position, marks: Mapping[int, Mark] | None) -> None:
        position.end(marks)
        self.dataset.finish(position.epoch)

    # ----------------------------------------------------------------------------------------------------- position

    def _check_confirmed(self) -> None:
        position = self._position
        if position is not None and position.complete and position.unconfirmed and not self.dataset.has_pending_state:
            raise UsageError(
                f"a new epoch was begun while the last {position.unconfirmed} batches of the one before are not confirmed: "
                f"call confirm() for them first, or load_state_dict(state_dict()) to get them again"
            )

    def _warn_if_left_in_the_middle(self) -> None:
        if self.in_the_middle:
            _logger.warning(left_in_the_middle(self.dataset.epoch))

    def _new_position(self, shares: list[Share], accumulation: int = 1, *, fresh: bool = False) -> Position:
        return Position(shares, accumulation, shares[0].batches, self._expect(shares, fresh=fresh))

    def _expect(self, shares: list[Share], *, fresh: bool = False) -> int | None:  # noqa: ARG002  (for some)
        """The batches that `shares` have; None if that is not known. fresh: they are of an epoch from its beginning."""
        items = self.dataset.items_left(shares)
        return None if items is None else self._count(items)

    def __len__(self) -> int:
        """Batches of this rank in the current epoch, those that a resumed run had before included.

        Raises TypeError, as torch's loaders do, where the count cannot be known: with ``repeat=True``, and with steps other
        than `Map` and `Batch`. Opens the manifest.
        """
        position = self._position
        if position is None or position.complete or self.dataset.has_pending_state:
            shares = self.dataset.shares(self._reading())
            position = self._new_position(shares)
        return position.before + self._expected(position)

    def full_length(self) -> int:
        """Batches of this rank in an epoch from its beginning. Raises TypeError where `len` does."""
        return self._expected(self._new_position(self.dataset.shares(self._reading(), fresh=True), fresh=True))

    def _expected(self, position: Position) -> int:
        if position.expected is None:
            raise TypeError(f"the number of batches is not known: {self.dataset.why_uncounted()}")
        return position.expected

    def counts(self, *, over_ranks: bool = False) -> Counts:
        """As `StreamDataset.counts`, of what was handed out: always what the state says."""
        position = self._position
        if position is None or self.dataset.has_pending_state:
            return self.dataset.counts(over_ranks=over_ranks)
        return self.dataset.count(position.partitions().values(), over_ranks=over_ranks)

    def sources(self, *, over_ranks: bool = False) -> dict[str, SourceProgress]:
        """As `StreamDataset.sources`, of what was handed out."""
        position = self._position
        if position is None or self.dataset.has_pending_state:
            return self.dataset.sources(over_ranks=over_ranks)
        return self.dataset.progress(position.partitions(), position.epoch, over_ranks=over_ranks)

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """The state after the last batch handed out, or the last complete optimizer step; as `StreamDataset.state_dict`.

        With ``accumulation`` and off a boundary it is the boundary's, which is logged once. After `confirm_by_call` it is that
        of the last batch confirmed.
        """
        refuse_bare_dcp(type(self).__name__)
        position = self._position
        if position is None or self.dataset.has_pending_state:
            return self.dataset.state_dict()
        refuse_one_file_for_all(self.dataset.ranks)
        position.warn_off_boundary()
        return self.dataset.encode_state(
            position.epoch, position.partitions(), self._contents(), position.batches, ended=position.ended,
            workers=self._workers_in_turn(position),
        )  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Go on from `state` with the next iteration; `allow` and errors as in `StreamDataset.load_state_dict`."""
        self._stop()
        self.dataset.load_state_dict(state, allow)
        self._reset()
        self._position = None
        self.dataset.resolve_partitions(self._reading())

    def set_epoch(self, epoch: int) -> None:
        """As `StreamDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)
