"""`Batch(max_tokens=)`: consecutive items as long as they cost no more than so many tokens, padding included.

A batch ends before the first item that does not fit, so one item more than the batch's is read. The cursor is the upstream's
*before* that item, which a resume reads again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from streamshard.order.cursor import Cursor
from streamshard.steps.counts import NOTHING, Tally
from streamshard.steps.filter import Starvation
from streamshard.steps.padded import Padded
from streamshard.steps.rounds import Piece, Samples
from streamshard.steps.step import Passing, Stage, StepContext, blame


def first_cursor(upstream: Cursor) -> Cursor:
    """The cursor of a fresh stage."""
    return upstream, (), NOTHING


class Sized(Protocol):
    """The step: its name, and the most items of a batch."""

    @property
    def label(self) -> str: ...
    @property
    def size(self) -> int | None: ...


class TokenBatchStage(Passing):
    """Cursor: (upstream cursor before the item that did not fit, samples that may go on, counts)."""

    def __init__(self, step: Sized, padded: Padded, upstream: Stage, cursor: Cursor, context: StepContext) -> None:
        super().__init__(upstream)
        self._label = step.label
        self._padded = padded
        self._size = step.size
        self._before, seen, counts = cursor
        self._samples = Samples(seen)
        self._seen = self._samples.seen
        self._tally = Tally(counts)
        self._starvation = Starvation(step.label, context)
        self._provenance = context.provenance

    def cursor(self) -> Cursor:
        return self._before, self._seen, self._tally.frozen()

    def __iter__(self) -> Iterator[Any]:
        batch: list[Piece] = []
        longest = 0
        lost = Tally(NOTHING)
        for before, seen, piece in self._pieces(lost):
            self._tally.merge(lost)  # what was dropped before it: where a batch now ends is behind that
            lost.clear()
            fits = (len(batch) + 1) * max(longest, piece.length) <= self._padded.max_tokens
            if batch and not (fits and len(batch) != self._size):
                yield self._leaves(batch, longest, before, seen)
                batch, longest = [], 0
            batch.append(piece)
            longest = max(longest, piece.length)
        self._tally.merge(lost)
        if batch:
            yield self._leaves(batch, longest, self._upstream.cursor(), self._samples.seen)
        self._before = self._upstream.cursor()  # what an upstream step dropped at the end is counted

    def _leaves(self, batch: list[Piece], longest: int, before: Cursor, seen: Cursor) -> Any:
        self._before, self._seen = before, seen
        self._padded.count(batch, longest, self._tally)
        try:
            return self._padded.make(batch, longest, provenance=self._provenance)
        except Exception as error:
            blame(error, f"{self._label}, before the sample", self._upstream.ref())
            raise

    def _pieces(self, lost: Tally) -> Iterator[tuple[Cursor, Cursor, Piece]]:
        """(upstream cursor before it, samples seen before it, item) of all items that are not dropped."""
        before, seen = self._upstream.cursor(), self._samples.seen
        for item in self._upstream:
            identity = self._upstream.identity()
            try:
                content, length = self._padded.content(item, self._upstream.ref() if self._provenance else None)
            except Exception as error:
                self.blame(error, self._label)
                raise
            whole = Piece(identity, content, 0, length, length, first=self._samples.begins(identity))
            piece = self._padded.fitted(whole, lost)
            if piece is None:
                self._starvation.dropped(*identity[:2])
            else:
                self._starvation.in_a_row = 0
                yield before, seen, piece
            before, seen = self._upstream.cursor(), self._samples.seen
