"""`Pack(algorithm="concat")`: documents end to end, cut wherever a row is full. No window, so no rounds.

Between rows nothing is held but the rest of one document. The cursor is (upstream cursor after that document, the rest,
counts); a resume reads the document again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from streamshard.errors import StateError
from streamshard.order.cursor import Cursor, Ref
from streamshard.steps.carried import Carried, Identity, decode, encode
from streamshard.steps.counts import NOTHING, Tally
from streamshard.steps.rounds import Piece, Samples
from streamshard.steps.step import Passing, Stage, StepContext


class Packer(Protocol):
    """What `Pack` knows about documents and rows."""

    @property
    def label(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def segments(self) -> int | None: ...
    def content(self, item: Any, ref: Ref | None) -> tuple[Any, int]: ...
    def cut_at(self, piece: Piece, start: int, length: int) -> Piece: ...
    def make(self, row: list[Piece]) -> Any: ...
    def count(self, row: list[Piece], tally: Tally) -> None: ...


def first_cursor(upstream: Cursor) -> Cursor:
    """The cursor of a fresh stage."""
    return upstream, (), 0, (), NOTHING


class ConcatStage(Passing):
    """Cursor: (upstream cursor, rest of the document read last, the length of all of it, samples seen, counts)."""

    def __init__(self, packer: Packer, upstream: Stage, cursor: Cursor, context: StepContext) -> None:
        super().__init__(upstream)
        self._packer = packer
        self._upstream_cursor, self._rest, self._whole, seen, counts = cursor
        self._samples = Samples(seen)
        self._tally = Tally(counts)
        assert context.past is not None  # every pipeline has one
        self._past = context.past
        self._carried = decode(self._rest)
        self._again = self._past.items([piece.identity for piece in self._carried])
        self._row: list[Piece] = []
        self._provenance = context.provenance

    def cursor(self) -> Cursor:
        return self._upstream_cursor, self._rest, self._whole, self._samples.seen, self._tally.frozen()

    def identity(self) -> Identity:
        return *self._row[0].identity, self._row[0].start

    def ref(self) -> Ref:
        """The ref of the row's first document."""
        return self._past.ref(self._row[0].identity) if self._row else self._upstream.ref()

    def __iter__(self) -> Iterator[Any]:
        row: list[Piece] = []
        room = self._packer.size
        for document in self._documents():
            start = document.start
            while start < document.whole:
                length = min(room, document.whole - start)
                row.append(self._packer.cut_at(document, start, length))
                start, room = start + length, room - length
                if room == 0 or len(row) == self._packer.segments:
                    yield self._leaves(row, document, start)
                    row, room = [], self._packer.size
        if row:
            yield self._leaves(row, row[-1], row[-1].whole)
        self._upstream_cursor, self._rest, self._whole = self._upstream.cursor(), (), 0

    def _leaves(self, row: list[Piece], document: Piece, start: int) -> Any:
        """A row is full, and `document` goes on at `start`."""
        self._upstream_cursor = self._upstream.cursor()
        rest = [Carried(document.identity, start, 0, document.first)] if start < document.whole else []
        self._rest, self._whole = encode(rest), document.whole if rest else 0
        self._row = row
        self._packer.count(row, self._tally)
        return self._packer.make(row)

    def _documents(self) -> Iterator[Piece]:
        """What is left of the document that a row ended in, then those that follow."""
        for carried in self._carried:  # one at most
            found = [(item, ref) for identity, item, ref in self._again if identity == carried.identity]
            content, length = (
                self._content(found[0][0], found[0][1] if self._provenance else None) if found else (None, 0)
            )
            if length != self._whole:
                raise StateError(
                    f"{self._packer.label} reads a document of {length} tokens that had {self._whole} when the state was "
                    f"saved: a step before it has changed its code, or is not deterministic. Make it depend on its input only; "
                    f"to go on with changed code, give the step another version= and pass allow={{'steps'}}"
                )
            yield Piece(carried.identity, content, carried.start, length, length, first=carried.first)
        for item in self._upstream:
            identity = self._upstream.identity()
            content, length = self._content(item, self._upstream.ref() if self._provenance else None)
            yield Piece(identity, content, 0, length, length, first=self._samples.begins(identity))

    def _content(self, item: Any, ref: Ref | None) -> tuple[Any, int]:
        try:
            return self._packer.content(item, ref)
        except Exception as error:
            self.blame(error, self._packer.label)
            raise
