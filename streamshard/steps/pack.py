"""`Pack`: documents of a partition into rows of a fixed number of tokens, little of it padding, nothing lost silently."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from streamshard.errors import DataError, UsageError
from streamshard.order.cursor import Cursor, Ref
from streamshard.steps.carried import Carried, decode
from streamshard.steps.concat import ConcatStage
from streamshard.steps.concat import first_cursor as first_of_concat
from streamshard.steps.contract import Document, Fields, Layout, check_pad_id, loss_tokens
from streamshard.steps.counts import (
    DOCUMENTS,
    LOSS,
    REAL,
    SAMPLES,
    SPLIT,
    TRUNCATED,
    TRUNCATED_TOKENS,
    Counts,
    Tally,
    thaw,
)
from streamshard.steps.planner import balanced, best_fit
from streamshard.steps.rounds import Piece, Plan, RoundStage, as_read, first_cursor
from streamshard.steps.step import Stage, StepContext

_logger = logging.getLogger("streamshard")

_FEW_GROUPS = 4  # in a window, from which on groups can be balanced
_OVERFLOWS = ("split", "truncate", "drop", "error")
_ALGORITHMS = ("best_fit", "concat")


@dataclass(frozen=True)
class Pack:
    """Pack documents into rows of `sequence_length` tokens, each a dictionary as docs/batch.md describes.

    fields: which fields of a sample are its ``input_ids``, ``labels`` and ``loss_mask``, and further columns with a value per
        token; default those of these names, and ``"tokens"`` for the tokens. The length of a document is that of its tokens.
    window: documents that are planned together. More pack a little better and make a row wait longer; 1000 leave 0.05 to 0.6 %
        of padding on corpora of text if they fill some thirty rows at least. Each document leaves in the round that read it
        or in one of the two after it.
    overflow: documents longer than a row are cut into rows, the rest packed like a document (``"split"``), cut short
        (``"truncate"``), left out (``"drop"``), both counted, or refused (``"error"``).
    algorithm: ``"best_fit"`` breaks no document that fits a row. ``"concat"`` lays documents end to end and cuts every
        `sequence_length` tokens: no padding but at the very end, and most rows begin and end in the middle of a document.
    pad_id: the token in padding. It is in no loss and in no segment.
    shifted_labels: labels are those of the next token, for models that do not shift them themselves. Hugging Face's do.
    max_segments: the most documents of a row. ``cu_seqlens`` then has a fixed length, and ``max_seqlen`` a fixed value, for
        compiled models.

    balance: rows leave in groups of so many, each group with about the same sum of squared document lengths, which is what
        attention costs. With ``Batch(balance)`` behind it, ranks take about equally long without talking to one another. A
        window has to hold several groups of rows, or there is little to choose from (logged). With ``"best_fit"`` only.

    What has left is counted by source: `StreamLoader.counts`. Only `Map`, `Filter` and `FlatMap` may come before it. The order
    of the rows is shuffled within a window.
    """

    sequence_length: int
    fields: Mapping[str, str] | None = None
    window: int = 1000
    overflow: str = "split"
    algorithm: str = "best_fit"
    pad_id: int = 0
    shifted_labels: bool = False
    max_segments: int | None = None
    balance: int | None = None
    version: str | int | None = None
    _fields: Fields = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value, least in (("sequence_length", self.sequence_length, 2), ("window", self.window, 1)):
            if type(value) is not int or value < least:
                raise UsageError(f"Pack({name}={value!r}): it must be an int >= {least}")
        for name, optional in (("max_segments", self.max_segments), ("balance", self.balance)):
            if optional is not None and (type(optional) is not int or optional < 1):
                raise UsageError(f"Pack({name}={optional!r}): it must be an int >= 1, or None")
        if self.algorithm == "concat" and self.balance is not None:
            raise UsageError("Pack(balance=..., algorithm='concat'): rows that are cut anywhere are not reordered")
        check_pad_id("Pack", self.pad_id)
        for name, choice, known in (
            ("overflow", self.overflow, _OVERFLOWS),
            ("algorithm", self.algorithm, _ALGORITHMS),
        ):
            if choice not in known:
                raise UsageError(f"Pack({name}={choice!r}): choose one of {', '.join(map(repr, known))}")
        if self.algorithm == "concat" and self.overflow != "split":
            raise UsageError(
                f"Pack(overflow={self.overflow!r}, algorithm='concat'): concatenating cuts documents wherever a row ends; use "
                f"overflow='split', or algorithm='best_fit'"
            )
        object.__setattr__(self, "_fields", Fields(self.fields or {}))

    @property
    def label(self) -> str:
        return f"Pack({self.sequence_length})"

    def fingerprint(self) -> dict[str, Any]:
        return {
            "step": "Pack", "sequence_length": self.sequence_length, "fields": dict(self.fields or {}),
            "window": self.window, "overflow": self.overflow, "algorithm": self.algorithm, "pad_id": self.pad_id,
            "shifted_labels": self.shifted_labels, "max_segments": self.max_segments, "balance": self.balance,
            "version": self.version,
        }  # fmt: skip

    def start(self, inner: Cursor) -> Cursor:
        return first_of_concat(inner) if self.algorithm == "concat" else first_cursor(inner)

    def border(self, cursor: Cursor) -> bool:
        """Whether all rows of a window have left: the next is planned when its documents are read."""
        return self.algorithm == "concat" or bool(cursor[1] == 0)

    def inner(self, cursor: Cursor) -> Cursor:
        upstream: Cursor = cursor[0] if self.algorithm == "concat" else cursor[0][0]
        return upstream

    def left(self, upstream: int, cursor: Cursor) -> None:
        """Only reading tells."""

    def carried(self, cursor: Cursor) -> tuple[Carried, ...]:
        """Documents, or cuts of them, that wait at `cursor` for a later window."""
        return decode(cursor[1] if self.algorithm == "concat" else cursor[0][1])

    def counts(self, cursor: Cursor) -> Counts:
        """What had left at `cursor`."""
        return thaw(cursor[-1])

    def reached(self, cursor: Cursor) -> int:
        """The epoch up to which documents of the window at `cursor` are."""
        return 0 if self.algorithm == "concat" else int(cursor[3])

    def open(self, upstream: Stage, cursor: Cursor, context: StepContext) -> Stage:
        layout = Layout(
            self.sequence_length,
            self.pad_id,
            self.shifted_labels,
            self.max_segments,
            self._fields.extras,
            context.provenance,
        )
        packer = Packer(self, self._fields, layout)
        if self.algorithm == "concat":
            return ConcatStage(packer, upstream, cursor, context)
        return RoundStage(packer, upstream, cursor, context)


class Packer:
    """How `Pack` reads documents, plans rows and makes them: see `streamshard.steps.rounds.Planner`."""

    def __init__(self, step: Pack, fields: Fields, layout: Layout) -> None:
        self.label = step.label
        self.window = step.window
        self.size = step.sequence_length
        self.segments = step.max_segments
        self._overflow = step.overflow
        self._balance = step.balance
        self._fields = fields
        self._layout = layout

    def content(self, item: Any, ref: Ref | None) -> tuple[Document, int]:
        document = self._fields.read(item, ref)
        length = len(document.input_ids)
        if length > self.size and self._overflow == "error":
            raise DataError(
                f"a document has {length} tokens, and a row {self.size}: with overflow='error' that is refused. Use 'split', "
                f"'truncate' or 'drop', or cut documents in a FlatMap"
            )
        return document, length

    def again(self, content: Document, length: int, start: int) -> tuple[Document, int]:  # noqa: ARG002  (the protocol's)
        cut = content.cut(start, start + self.size)
        return cut, len(cut.input_ids)

    def cut(self, piece: Piece, tally: Tally) -> list[Piece]:
        if piece.length <= self.size:
            return [piece]
        if self._overflow == "drop":
            tally.drop(piece.identity[0], piece.length, first=piece.first)
            return []
        if self._overflow == "truncate":
            return [self.cut_at(piece, 0, self.size)]
        return [self.cut_at(piece, start, self.size) for start in range(0, piece.length, self.size)]

    def cut_at(self, piece: Piece, start: int, length: int) -> Piece:
        """So many tokens of a whole document."""
        content = piece.content.cut(start, start + length)
        return Piece(piece.identity, content, start, len(content.input_ids), piece.whole, first=piece.first)

    def plan(self, pieces: Sequence[Piece], *, last: bool, before: int) -> Plan:
        """Best-fit-decreasing, pieces that have waited twice first. The fullest nine tenths of the rows leave, and those with
        a piece that has waited twice; what fills a row by itself always does.
        """
        full = [[piece] for piece in pieces if piece.length == self.size]
        rest = sorted((piece for piece in pieces if piece.length < self.size), key=_planning_order)
        rows = [[rest[place] for place in row] for row in best_fit([p.length for p in rest], self.size, self.segments)]
        if last:  # within a row documents lie in the order in which they were read
            return Plan(full + [sorted(row, key=as_read) for row in rows], [])
        rows.sort(key=_fill, reverse=True)  # stable: of equally full rows, the one begun first
        keep = max(1, 9 * len(rows) // 10)
        leaves = [place < keep or any(piece.age >= 2 for piece in row) for place, row in enumerate(rows)]
        self._keep_groups_whole(leaves, rows, before, len(full))
        emitted = [sorted(row, key=as_read) for row, goes in zip(rows, leaves, strict=True) if goes]
        return Plan(
            full + emitted, [piece for row, goes in zip(rows, leaves, strict=True) if not goes for piece in row]
        )

    def _keep_groups_whole(self, leaves: list[bool], rows: list[list[Piece]], before: int, full: int) -> None:
        """Hold back the emptiest rows that may wait, so that all that has left is a whole number of groups."""
        if self._balance is None:
            return
        leaving = full + sum(leaves)
        if leaving < _FEW_GROUPS * self._balance:
            _tell_of_few_rows(self.label, self._balance)
        over = (before + leaving) % self._balance
        may_wait = [place for place, row in enumerate(rows) if leaves[place] and all(piece.age < 2 for piece in row)]
        if 0 < over <= len(may_wait):
            for place in may_wait[-over:]:
                leaves[place] = False

    def arrange(self, rows: list[list[Piece]], *, before: int) -> list[list[Piece]]:
        if self._balance is None:
            return rows
        begun = -before % self._balance  # rows that complete a group begun in an earlier window
        costs = [sum(piece.length**2 for piece in row) for row in rows[begun:]]
        return rows[:begun] + [rows[begun + place] for place in balanced(costs, self._balance)]

    def make(self, row: Sequence[Piece]) -> dict[str, Any]:
        return self._layout.row([piece.content for piece in row], [piece.start for piece in row])

    def count(self, row: Sequence[Piece], tally: Tally) -> None:
        tally.row(self.size)
        for piece in row:
            numbers = tally.of(piece.identity[0])
            numbers[REAL] += piece.length
            numbers[LOSS] += loss_tokens(piece.content)
            if piece.start == 0:
                numbers[SAMPLES] += piece.first
                numbers[DOCUMENTS] += 1
                if piece.length < piece.whole:
                    self._count_cut(piece, numbers)

    def _count_cut(self, piece: Piece, numbers: list[int]) -> None:
        if self._overflow == "truncate":
            numbers[TRUNCATED] += 1
            numbers[TRUNCATED_TOKENS] += piece.whole - piece.length
        else:
            numbers[SPLIT] += 1


@lru_cache(maxsize=64)  # once is enough
def _tell_of_few_rows(label: str, balance: int) -> None:
    _logger.warning(
        "%s has fewer than %d rows in a window, and balance=%d wants groups of rows that cost the same: of so few they cannot "
        "be made. Use a larger window=, or smaller groups",
        label, _FEW_GROUPS * balance, balance,
    )  # fmt: skip


def _planning_order(piece: Piece) -> tuple[Any, ...]:
    return piece.age < 2, -piece.length, piece.identity, piece.start


def _fill(row: list[Piece]) -> int:
    return sum(piece.length for piece in row)
