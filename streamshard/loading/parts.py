"""What a worker sends of a batch: the tensors in shared memory, and beside them a skeleton that says where.

A *part* is either one item (a micro-batch, a sample, whatever the pipeline gave) or some rows of a batch. Rows of several
workers become one batch by their slots, and that copy out of shared memory is the only one in the main process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from streamshard.errors import DataError
from streamshard.iteration import Mark
from streamshard.loading.shared_memory import Segment
from streamshard.order.cursor import Cursor
from streamshard.staging.buffers import copy
from streamshard.staging.tree import Path, map_leaves
from streamshard.steps.tensors import Empty, collate, fresh


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands in the skeleton for a tensor in the segment."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    of_arrays: bool = False  # rows of a tensor that were numpy arrays


class At:
    """Stands in a `Packed` skeleton for a numpy array: bytes [start, stop) of those that are packed.

    No dataclass: a batch has many, and this pickles three times as quickly.
    """

    __slots__ = ("dtype", "shape", "start", "stop")

    def __init__(self, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> None:
        self.dtype = dtype
        self.shape = shape
        self.start = start
        self.stop = stop

    def __reduce__(self) -> tuple[type[At], tuple[object, ...]]:
        return At, (self.dtype, self.shape, self.start, self.stop)


class Packed(NamedTuple):
    """A skeleton with numpy arrays in it, whose bytes lie end to end at `offset` in the segment, `size` in all."""

    skeleton: Any
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Plain:
    """Rows of a field that are what they are: nothing in them is in the segment."""

    rows: list[Any]


_PLAIN = {int, float, bool, str, bytes, type(None)}


@dataclass(slots=True)
class Part:
    """One message. `size` is the segment's; `slots` has one slot a row, or that of the item.

    cursors: with rows, the cursor after each. marks: without rows, where partitions stood after the item; with rows, those
    that ended, each after so many rows. rows: items of the batch, if it was formed of some.
    """

    segment: int
    size: int
    skeleton: Any
    slots: bytes
    cursors: list[Cursor] = field(default_factory=list)
    marks: list[tuple[int, int, Mark]] = field(default_factory=list)  # (rows before it, partition, mark)
    rows: int = 1


def encode(batch: Any, segment: Segment) -> Any:
    """The skeleton of `batch`, whose tensors are in `segment` afterwards.

    Numpy arrays are packed together: a list of samples has so many that what each costs by itself is what counts.
    """
    arrays: list[np.ndarray] = []
    size = 0

    def encoded(_: Path, leaf: Any) -> Any:
        nonlocal size
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufcmMSU":
            return _encode_leaf(leaf, segment)
        start, size = size, size + leaf.nbytes
        arrays.append(leaf.reshape(-1))
        return At(leaf.dtype.str, leaf.shape, start, size)

    skeleton = map_leaves(batch, encoded)
    if not arrays:
        return skeleton
    packed = segment.empty((size,), torch.uint8)
    if size:
        np.concatenate([np.ascontiguousarray(array).view(np.uint8) for array in arrays], out=packed.numpy())
    return Packed(skeleton, segment.place(packed), size)


def _encode_leaf(leaf: Any, segment: Segment) -> Any:
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "cpu" or leaf.layout != torch.strided:
            raise DataError(
                f"a {leaf.layout} tensor on {leaf.device} cannot leave a worker process; make dense CPU tensors there, or use "
                f"workers=0"
            )
        return Leaf(leaf.dtype, tuple(leaf.shape), segment.place(leaf.detach()))
    return leaf


def decode(skeleton: Any, segment: Segment, size: int, empty: Empty) -> Any:
    """The batch again, copied out of the segment (when that had `size` bytes) into what `empty` gives.

    Numpy arrays are read-only, as they are when they come from the store, and each has memory of its own: one that is kept
    does not keep its batch.
    """
    packed = memoryview(b"")
    if isinstance(skeleton, Packed):
        packed = segment.view(skeleton.offset, (skeleton.size,), torch.uint8, size).numpy().data
        skeleton = skeleton.skeleton

    def leaf(_: Path, found: Any) -> Any:
        if isinstance(found, At):
            return _array(found, packed)
        if not isinstance(found, Leaf):
            return found
        target = empty(found.shape, found.dtype)
        copy(target, segment.view(found.offset, found.shape, found.dtype, size))
        return target

    return map_leaves(skeleton, leaf)


def _array(at: At, packed: memoryview) -> np.ndarray:
    if at.start == at.stop:
        array = np.empty(at.shape, at.dtype)
        array.flags.writeable = False
        return array
    return np.frombuffer(bytes(packed[at.start : at.stop]), at.dtype).reshape(at.shape)


def encode_rows(items: list[Any], segment: Segment) -> Any:
    """The skeleton of some rows of a batch: fields that are arrays of one shape and dtype stacked, everything else row by row.

    It decides nothing: whether rows fit together is seen, and said, where the batch is whole.
    """
    if set(map(type, items)) == {dict} and all(item.keys() == items[0].keys() for item in items):
        return {name: encode_rows([item[name] for item in items], segment) for name in items[0]}
    first = items[0]
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc" and first.dtype.isnative and _alike(items):
        stacked = collate(items, empty=segment.empty)
        return replace(encode(stacked, segment), of_arrays=True)
    if type(first) is torch.Tensor and _alike(items) and not any(item.requires_grad for item in items):
        return encode(collate(items, empty=segment.empty), segment)
    if set(map(type, items)) <= _PLAIN:
        return Plain(items)
    return encode(items, segment)


def _alike(items: list[Any]) -> bool:
    first = items[0]
    return all(type(i) is type(first) and i.shape == first.shape and i.dtype == first.dtype for i in items)


class Piece(NamedTuple):
    """Rows [first, last) of a part and where they go in the batch."""

    part: Part
    segment: Segment
    first: int
    last: int
    targets: np.ndarray


def assemble(pieces: Sequence[Piece], rows: int, empty: Empty) -> Any:
    """One batch of `rows` rows out of pieces of parts, as `collate` would have made it of all the rows."""
    return _column("item", [piece.part.skeleton for piece in pieces], pieces, rows, empty)


def _column(name: str, found: list[Any], pieces: Sequence[Piece], rows: int, empty: Empty) -> Any:
    kinds = set(map(type, found))
    if kinds == {Leaf} and len({(leaf.dtype, leaf.shape[1:], leaf.of_arrays) for leaf in found}) == 1:
        return _tensor(found, pieces, rows, empty)
    if kinds == {dict} and all(column.keys() == found[0].keys() for column in found):
        return {key: _column(str(key), [column[key] for column in found], pieces, rows, empty) for key in found[0]}
    whole: list[Any] = [None] * rows
    for column, piece in zip(found, pieces, strict=True):
        places = _places(piece.targets)
        if isinstance(column, Plain) and isinstance(places, slice):
            whole[places] = column.rows[piece.first : piece.last]
            continue
        for target, row in zip(piece.targets.tolist(), range(piece.first, piece.last), strict=True):
            whole[target] = _row(column, row, piece)
    if name == "item":
        return collate(whole, empty=empty)
    return collate([{name: value} for value in whole], empty=empty)[name]  # so that it is named in an error


def _row(column: Any, row: int, piece: Piece) -> Any:
    """One row as it was before it was encoded."""
    if isinstance(column, Leaf):
        rows = piece.segment.view(column.offset, column.shape, column.dtype, piece.part.size)
        return rows[row].numpy().copy() if column.of_arrays else rows[row].clone()
    if isinstance(column, dict):
        return {key: _row(value, row, piece) for key, value in column.items()}
    if isinstance(column, Plain):
        return column.rows[row]
    if isinstance(column, Packed):
        return decode(column._replace(skeleton=column.skeleton[row]), piece.segment, piece.part.size, fresh)
    return decode(column[row], piece.segment, piece.part.size, fresh)


def _tensor(leaves: list[Leaf], pieces: Sequence[Piece], rows: int, empty: Empty) -> torch.Tensor:
    batch = empty((rows, *leaves[0].shape[1:]), leaves[0].dtype)
    if not batch.numel():
        return batch
    target = _bytes(batch)
    for leaf, piece in zip(leaves, pieces, strict=True):
        source = _bytes(piece.segment.view(leaf.offset, leaf.shape, leaf.dtype, piece.part.size))
        target[_places(piece.targets)] = source[piece.first : piece.last]
    return batch


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The rows of a contiguous tensor as bytes, whatever its dtype."""
    return tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()


def _places(targets: np.ndarray) -> Any:
    """A slice where that says the same: assigning is then one strided copy."""
    if len(targets) < 2:
        return targets
    step = int(targets[1] - targets[0])
    if step > 0 and (np.diff(targets) == step).all():
        return slice(int(targets[0]), int(targets[-1]) + 1, step)
    return targets
