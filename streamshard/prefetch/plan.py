"""From rows that will be needed to ranged requests. Pure: indexes come in through a function, requests go out as values.

segments (shard, first row, end row)  ->  block pieces, each block once  ->  units of neighbouring blocks, one GET each
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from streamshard.shard.layout import ShardIndex
from streamshard.shard.reader import locate_rows

Segment = tuple[int, int, int]  # shard number, first row, end row


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
