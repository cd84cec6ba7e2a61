"""From rows that will be needed to ranged requests. Pure: indexes come in, requests go out as values.

segments (shard, first row, end row)  ->  block pieces, each block once  ->  requests for neighbouring blocks, one GET each

Where the index of a shard is not known yet, the first request is a *head*: the index, which the shard begins with, and if the
first row is wanted, the blocks behind it too, sight unseen. A small shard comes whole: it costs one request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from streamshard.shard.layout import ShardIndex
from streamshard.shard.reader import locate_rows

Segment = tuple[int, int, int]  # shard number, first row, end row

_BLOCK_GUESS = (
    512 << 10
)  # bytes asked for where a block's size is not known yet: the writer's default before compression


@dataclass(slots=True)
class BlockPiece:
    """The rows of one block that will be delivered, as [first, last) slices counted from the block's first row."""

    shard: int
    block: int
    index: ShardIndex
    slices: list[tuple[int, int]] = field(default_factory=list)

    @property
    def compressed(self) -> int:
        """Bytes to fetch."""
        return int(self.index.compressed[self.block])

    @property
    def rows(self) -> int:
        """Rows that will be delivered."""
        return sum(last - first for first, last in self.slices)

    @property
    def first_row(self) -> int:
        """Row number of the block's first row in the shard."""
        return int(self.index.row_ends[self.block] - self.index.samples[self.block])


def plan_blocks(segments: Iterable[Segment], index_of: Callable[[int], ShardIndex]) -> Iterator[BlockPiece]:
    """The blocks that hold `segments`, in order. Neighbouring pieces of one block become one piece: it is fetched once.

    A piece that reaches its block's end is given out before the next segment is looked at, so that trouble with the next
    shard's index does not hold back samples of this one.
    """
    open_piece: BlockPiece | None = None
    for shard, start, stop in segments:
        index = index_of(shard)
        for rows in locate_rows(index, start, stop):
            if open_piece is None or (open_piece.shard, open_piece.block) != (shard, rows.block):
                if open_piece is not None:
                    yield open_piece
                open_piece = BlockPiece(shard, rows.block, index)
            open_piece.slices.append((rows.first, rows.last))
            if rows.last == int(index.samples[rows.block]):
                yield open_piece
                open_piece = None
    if open_piece is not None:
        yield open_piece


def plan_units(pieces: Iterable[BlockPiece], limit: Callable[[], int]) -> Iterator[list[BlockPiece]]:
    """Pieces grouped into runs of neighbouring blocks of a shard, up to `limit()` bytes, never less than one block.

    `limit` is asked when a unit is begun, so that a stream can start with one block and grow.
    """
    unit: list[BlockPiece] = []
    size = allowed = 0
    for piece in pieces:
        adjoins = bool(unit) and piece.shard == unit[-1].shard and piece.block == unit[-1].block + 1
        if unit and not (adjoins and size + piece.compressed <= allowed):
            yield unit
            unit, size = [], 0
        if not unit:
            allowed = limit()
        unit.append(piece)
        size += piece.compressed
        if size >= allowed:  # do not look at the next piece: that could fetch another shard's index too early
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


class Facts(Protocol):
    """What is known of a dataset's shards without asking the store."""

    def known_index(self, shard: int) -> ShardIndex | None:
        """The shard's index, if it has been read."""

    def sizes(self, shard: int) -> tuple[int, int, int]:
        """(bytes of the index frame, bytes of the object, samples), as the manifest has them."""


@dataclass(slots=True)
class Request:
    """One ranged GET: bytes [start, stop) of a shard.

    pieces: the blocks in it, for a head those that turn out to be in it. rows: how many will be delivered, for a head about
    how many. ranges: of a head, the rows that are wanted of its shard; empty for others.
    """

    shard: int
    start: int
    stop: int
    rows: int
    pieces: list[BlockPiece] = field(default_factory=list)
    ranges: list[Segment] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        return self.stop - self.start


class StripePlan:
    """The requests of one stripe, in reading order, made one at a time as they are asked for.

    It stops at a shard whose index it needs to go on (`next` returns None) until `learned` brings it.
    """

    def __init__(self, segments: Iterable[Segment], facts: Facts) -> None:
        self._shards = groupby(segments, key=itemgetter(0))
        self._facts = facts
        self._pieces: deque[BlockPiece] = deque()  # planned and not yet asked for
        self._awaited = False
        self.finished = False

    @property
    def ready(self) -> bool:
        """Whether there may be a next request."""
        return not self.finished and (bool(self._pieces) or not self._awaited)

    def next(self, allowed: int, rows: int) -> Request | None:
        """The next request: up to `allowed` bytes, ending early once it brings `rows` rows, never less than one block."""
        while not self._pieces:
            if self._awaited or self.finished:
                return None
            found = next(self._shards, None)
            if found is None:
                self.finished = True
                return None
            shard, ranges = found[0], list(found[1])
            index = self._facts.known_index(shard)
            if index is None:
                return self._head(shard, ranges, allowed, rows)
            self._pieces.extend(plan_blocks(ranges, lambda _, index=index: index))  # type: ignore[misc]
        return self._unit(allowed, rows)

    def _unit(self, allowed: int, rows: int) -> Request:
        """Neighbouring blocks."""
        pieces = [self._pieces.popleft()]
        size, brings = pieces[0].compressed, pieces[0].rows
        while self._pieces and brings < rows:
            piece = self._pieces[0]
            if piece.block != pieces[-1].block + 1 or size + piece.compressed > allowed:
                break
            pieces.append(self._pieces.popleft())
            size, brings = size + piece.compressed, brings + piece.rows
        start = int(pieces[0].index.offsets[pieces[0].block])
        return Request(pieces[0].shard, start, start + size, brings, pieces)

    def _head(self, shard: int, ranges: list[Segment], allowed: int, rows: int) -> Request:
        """The index, and blocks behind it if they are wanted: as many bytes as `rows` rows have on average, and a block."""
        index_bytes, whole, samples = self._facts.sizes(shard)
        stop = index_bytes
        if whole - index_bytes <= _BLOCK_GUESS:
            stop = whole
        elif ranges[0][1] == 0:
            per_row = (whole - index_bytes) / max(1, samples)
            wanted = min(allowed, int(per_row * min(rows, ranges[-1][2])))
            stop = min(whole, index_bytes + wanted + _BLOCK_GUESS)
        self._awaited = stop < whole
        brings = samples * (stop - index_bytes) // max(1, whole - index_bytes)
        return Request(shard, 0, stop, min(brings, sum(last - first for _, first, last in ranges)), [], ranges)

    def learned(self, head: Request, index: ShardIndex) -> None:
        """A head has brought its shard's index: say which blocks came with it, and plan the others."""
        for piece in plan_blocks(head.ranges, lambda _: index):
            within = int(index.offsets[piece.block + 1]) <= head.stop
            (head.pieces if within else self._pieces).append(piece)
        head.rows = sum(piece.rows for piece in head.pieces)
        if head.stop < index.shard_bytes:
            self._awaited = False
