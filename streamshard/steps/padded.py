"""Documents one a row, padded to one length: what cost-based batches are made of, and what they count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamshard.errors import DataError, UsageError
from streamshard.order.cursor import Ref
from streamshard.steps.contract import Document, Fields, Layout, Length, check_pad_id, loss_tokens
from streamshard.steps.counts import (
    DOCUMENTS,
    LOSS,
    REAL,
    SAMPLES,
    TRUNCATED,
    TRUNCATED_TOKENS,
    Tally,
)
from streamshard.steps.rounds import Piece
from streamshard.steps.step import check_callable
from streamshard.steps.tensors import collate

OVERFLOWS = ("error", "truncate", "drop", "alone")


class Padded:
    """How items become a batch of rows of one length: by the batch contract, or by `collate_fn`. Immutable.

    max_tokens: of a batch, padding included. overflow: what happens to an item longer than that.
    """

    def __init__(
        self,
        label: str,
        max_tokens: int,
        *,
        fields: Mapping[str, str] | None,
        length: str | None,
        overflow: str,
        pad_id: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        if type(max_tokens) is not int or max_tokens < 1:
            raise UsageError(f"{label}(max_tokens={max_tokens!r}): it must be an int >= 1")
        if overflow not in OVERFLOWS:
            raise UsageError(f"{label}(overflow={overflow!r}): choose one of {', '.join(map(repr, OVERFLOWS))}")
        check_pad_id(label, pad_id)
        if collate_fn is not None:
            check_callable(label, collate_fn)
        if collate_fn is not None and fields is not None:
            raise UsageError(
                f"{label}(fields=..., collate_fn=...): a function gets items as they are; leave fields= out"
            )
        if length is not None and not isinstance(length, str):
            raise UsageError(f"{label}(length={length!r}): pass the name of a field")
        if overflow == "truncate" and collate_fn is not None:
            raise UsageError(
                f"{label}(overflow='truncate', collate_fn=...): cut items in a Map, or choose another overflow"
            )
        if length is not None and collate_fn is None:
            raise UsageError(
                f"{label}(length={length!r}) is for items that collate_fn= puts together; a document's length is that of its "
                f"tokens, which fields={{'input_ids': ...}} names"
            )
        self.max_tokens = max_tokens
        self._label = label
        self._overflow = overflow
        self._fields = Fields(fields or {})
        self._length = Length(length, needed=True)
        self._pad_id = pad_id
        self._collate_fn = collate_fn

    def content(self, item: Any, ref: Ref | None) -> tuple[Any, int]:
        """(what is put into a batch, its length). Raises `DataError` for what cannot be used."""
        if self._collate_fn is not None:
            content, length = item, self._length(item)
        else:
            content = self._fields.read(item, ref)
            length = len(content.input_ids)
        if length < 1:
            raise DataError(
                f"an item has the length {length}; lengths are at least 1. Leave such items out with a Filter"
            )
        if length > self.max_tokens and self._overflow == "error":
            raise DataError(
                f"an item has {length} tokens, and a batch at most {self.max_tokens}: with overflow='error' that is refused. "
                f"Use 'truncate', 'drop' or 'alone' (in a batch of its own), or cut items in a FlatMap"
            )
        return content, length

    def fitted(self, piece: Piece, tally: Tally) -> Piece | None:
        """`piece` as it is put into a batch; None if it is dropped, which is counted."""
        if piece.length <= self.max_tokens or self._overflow == "alone":
            return piece
        if self._overflow == "drop":
            tally.drop(piece.identity[0], piece.length, first=piece.first)
            return None
        cut = piece.content.cut(0, self.max_tokens)
        return Piece(piece.identity, cut, 0, self.max_tokens, piece.whole, first=piece.first)

    def make(self, row: Sequence[Piece], length: int, *, provenance: bool) -> Any:
        """A batch of rows of `length` tokens."""
        if self._collate_fn is not None:
            return self._collate_fn([piece.content for piece in row])
        layout = Layout(length, self._pad_id, extras=self._fields.extras, provenance=provenance)
        return collate([layout.row([piece.content], [0]) for piece in row])

    @staticmethod
    def count(row: Sequence[Piece], length: int, tally: Tally) -> None:
        """Count a batch of rows of `length` tokens."""
        for piece in row:
            tally.row(length)
            numbers = tally.of(piece.identity[0])
            numbers[SAMPLES] += piece.first
            numbers[DOCUMENTS] += 1
            numbers[REAL] += piece.length
            if isinstance(piece.content, Document):
                numbers[LOSS] += loss_tokens(piece.content)
            if piece.length < piece.whole:
                numbers[TRUNCATED] += 1
                numbers[TRUNCATED_TOKENS] += piece.whole - piece.length
