"""Steps that hold samples back (`Pack`, `BucketBatch`): a window at a time, planned as a whole, resumable at every row.

A *round* starts from a record: where the upstream stood, and which pieces earlier rounds have left. It reads so many documents,
plans rows out of them and the pieces, hands out most of the rows and leaves the rest, as pieces, to the next round. The plan is
a function of what was read, and nothing of it is stored: the cursor is (record, rows handed out, checksum of what was planned).
A resume reads the pieces and the window again and plans again; if the checksum is another, a function before this step is not
deterministic, and that is an error, never a silent repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from streamshard.errors import StateError
from streamshard.order.cursor import Cursor, Ref, innermost
from streamshard.order.random import permutation, stream_key
from streamshard.steps.carried import Carried, Identity, decode, encode
from streamshard.steps.counts import NOTHING, Tally
from streamshard.steps.filter import Starvation
from streamshard.steps.step import Passing, Stage, StepContext, blame


@dataclass(slots=True)
class Piece:
    """A document, or a cut of one, that has to find a place in a row.

    content: what the step makes rows of. start: its first token in the document. whole: tokens of the document. age: rounds
    that it has been carried through. first: whether it is the first document of its stored sample.
    """

    identity: Identity
    content: Any
    start: int
    length: int
    whole: int
    age: int = 0
    first: bool = False

    @property
    def carried(self) -> Carried:
        return Carried(self.identity, self.start, self.age, self.first)


class Plan(NamedTuple):
    """Rows that leave in this round, and pieces that the next one gets."""

    rows: list[list[Piece]]
    left: list[Piece]


class Planner(Protocol):
    """What a step decides about its rounds. Immutable."""

    window: int

    @property
    def label(self) -> str: ...

    def content(self, item: Any, ref: Ref | None) -> tuple[Any, int]:
        """(what rows are made of, its length), out of an item, with its ref where provenance is asked for. Raises `DataError`
        for one that cannot be used.
        """

    def cut(self, piece: Piece, tally: Tally) -> list[Piece]:
        """`piece`, a whole document, as one or several pieces; none if it is dropped, which is counted."""

    def again(self, content: Any, length: int, start: int) -> tuple[Any, int]:
        """(content, length) of the piece that begins at `start` of a document of `length`."""

    def plan(self, pieces: Sequence[Piece], *, last: bool, before: int) -> Plan:
        """Rows out of pieces; all of them if this is the `last` round. `before`: rows that had left before it."""

    def arrange(self, rows: list[list[Piece]], *, before: int) -> list[list[Piece]]:
        """The order in which rows leave, given a shuffled one."""

    def make(self, row: Sequence[Piece]) -> Any:
        """The item of a row."""

    def count(self, row: Sequence[Piece], tally: Tally) -> None:
        """Count what leaves with a row."""


class Samples:
    """Which documents are the first of their stored sample: after a `FlatMap` several are of one, and a mixture puts those of
    other sources in between. `seen` is its form in a cursor: of each such source, (path, epoch, k) of the sample seen last.
    """

    def __init__(self, seen: Cursor) -> None:
        self._last = {path: (path, *sample) for path, *sample in seen}

    def begins(self, identity: Identity) -> bool:
        """Whether the document, the next one in order, is of another sample than the one before it of its source."""
        if len(identity) == 3:
            return True
        sample = identity[:3]
        begins = self._last.get(sample[0]) != sample
        self._last[sample[0]] = sample
        return begins

    @property
    def seen(self) -> Cursor:
        return tuple(self._last[path] for path in sorted(self._last))


def first_cursor(upstream: Cursor) -> Cursor:
    """The cursor of a fresh stage."""
    return _record(upstream, (), ()), 0, 0, 0, NOTHING


def _record(upstream: Cursor, left: Sequence[Piece], seen: Cursor) -> Cursor:
    """Where a round starts."""
    return upstream, encode(piece.carried for piece in left), _checksum(left), seen


class RoundStage(Passing):
    """Cursor: (record, rows handed out, checksum, epoch, counts), the record being (upstream cursor, carried pieces, their
    checksum, samples that may go on). In the middle of a round, epoch is the one that reading has reached, 0 otherwise.
    """

    def __init__(self, planner: Planner, upstream: Stage, cursor: Cursor, context: StepContext) -> None:
        super().__init__(upstream)
        self._planner = planner
        self._start, self._emitted, self._checksum, self._epoch, counts = cursor
        self._tally = Tally(counts)
        self._context = context
        self._starvation = Starvation(planner.label, context)
        self._carried = decode(self._start[1])
        assert context.past is not None  # every pipeline has one
        self._past = context.past
        self._again = self._past.items([piece.identity for piece in self._carried])
        self._row: list[Piece] = []

    def cursor(self) -> Cursor:
        return self._start, self._emitted, self._checksum, self._epoch, self._tally.frozen()

    def identity(self) -> Identity:
        """That of the row's first document; the epoch is that in which the window began, since rows are shuffled over it."""
        path, epoch, *rest = self._row[0].identity
        begun = innermost(self._start)[0]
        return path, begun if isinstance(begun, int) else epoch, *rest, self._row[0].start

    def ref(self) -> Ref:
        """The ref of the row's first document."""
        return self._past.ref(self._row[0].identity) if self._row else self._upstream.ref()

    def __iter__(self) -> Iterator[Any]:
        upstream = iter(self._upstream)
        carried = self._read_again()
        skip, expected, samples = self._emitted, self._checksum, Samples(self._start[3])
        ended = False
        while not ended:
            lost = Tally(NOTHING)
            read, ended = self._read(upstream, samples)
            checksum = _checksum([*carried, *read])
            if skip and checksum != expected:
                raise self._changed()
            pieces = [cut for piece in read for cut in self._planner.cut(piece, lost)]
            self._search(read, found=bool(pieces))
            before = self._tally.rows - skip
            rows, left = self._planner.plan([*carried, *pieces], last=ended, before=before)
            for piece in left:
                piece.age += 1
            left.sort(key=as_read)
            at = self._upstream.cursor()
            following = _record(at, left, samples.seen)
            rows = self._planner.arrange(self._shuffled(rows, checksum), before=before)
            del read, pieces, carried  # a row's documents go when it has left
            if not skip:
                self._tally.merge(lost)
            for number in range(skip, len(rows)):
                self._row, rows[number] = rows[number], []
                self._emitted, self._checksum, self._epoch = number + 1, checksum, _epoch(at)
                if number + 1 == len(rows):
                    self._start, self._emitted, self._checksum, self._epoch = following, 0, 0, 0
                self._planner.count(self._row, self._tally)
                yield self._make()
            if not rows:
                self._start = following
            carried, skip = left, 0
        # What an upstream step dropped at the end is counted.
        self._start = _record(self._upstream.cursor(), (), samples.seen)

    def _read(self, upstream: Iterator[Any], samples: Samples) -> tuple[list[Piece], bool]:
        """The next window of whole documents, and whether there are no more."""
        read: list[Piece] = []
        for item in islice(upstream, self._planner.window):
            identity = self._upstream.identity()
            content, length = self._content(item, self._upstream.ref if self._context.provenance else None)
            read.append(Piece(identity, content, 0, length, length, first=samples.begins(identity)))
        return read, len(read) < self._planner.window

    def _content(self, item: Any, ref: Callable[[], Ref] | None) -> tuple[Any, int]:
        try:
            return self._planner.content(item, None if ref is None else ref())
        except Exception as error:
            self.blame(error, self._planner.label)
            raise

    def _search(self, read: list[Piece], *, found: bool) -> None:
        if found:
            self._starvation.in_a_row = 0
            return
        for piece in read:
            self._starvation.dropped(*piece.identity[:2])

    def _read_again(self) -> list[Piece]:
        """The pieces that were carried when the state was saved."""
        if not self._carried:
            return []
        wanted: dict[Identity, list[Carried]] = {}
        for piece in self._carried:
            wanted.setdefault(piece.identity, []).append(piece)
        found: dict[Carried, Piece] = {}
        for identity, item, ref in self._again:
            for piece in wanted.get(identity, ()):
                content, whole = self._planner.content(item, ref if self._context.provenance else None)
                content, length = self._planner.again(content, whole, piece.start)
                if length > 0:
                    found[piece] = Piece(identity, content, piece.start, length, whole, piece.age, piece.first)
        pieces = [found[piece] for piece in self._carried if piece in found]
        if _checksum(pieces) != self._start[2]:
            raise self._changed()
        return pieces

    def _shuffled(self, rows: list[list[Piece]], checksum: int) -> list[list[Piece]]:
        """Planned rows come longest document first, which would bias training."""
        key = stream_key(self._context.seed, "rows", self._context.place, checksum)
        return [rows[place] for place in permutation(key, len(rows)).tolist()]

    def _make(self) -> Any:
        try:
            return self._planner.make(self._row)
        except Exception as error:
            blame(error, f"{self._planner.label}, in a row whose first document came from the sample", self.ref())
            raise

    def _changed(self) -> StateError:
        return StateError(
            f"{self._planner.label} reads other documents, or other lengths, than when the state was saved: a step before it "
            f"has changed its code, or is not deterministic. Make it depend on its input only (Map(rng=True) gives "
            f"reproducible randomness; a Map(batch=n) before it must treat each item by itself). To go on with changed code, "
            f"give the step another version= and pass allow={{'steps'}}"
        )


def _epoch(cursor: Cursor) -> int:
    """Of a plain dataset; a mixture's datasets do not grow."""
    epoch = innermost(cursor)[0]
    return epoch if isinstance(epoch, int) else 0


def as_read(piece: Piece) -> tuple[Any, ...]:
    """Sorts pieces by the order in which they were read."""
    return piece.identity, piece.start


def _checksum(pieces: Sequence[Piece]) -> int:
    return crc32(repr([(piece.identity, piece.start, piece.length) for piece in pieces]).encode()) if pieces else 0
