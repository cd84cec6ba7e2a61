"""What a worker sends of a batch: the tensors in shared memory, and beside them a skeleton that says where.

A *part* is either one item (a micro-batch, a sample, whatever the pipeline gave) or some rows of a batch. Rows of several
workers become one batch by their slots, and that copy out of shared memory is the only one in the main process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from streamshard.errors import DataError
from streamshard.iteration import Mark
from streamshard.loading.shared_memory import Segment
from streamshard.order.cursor import Cursor
from streamshard.staging.buffers import copy
from streamshard.steps.tensors import Empty, collate, fresh

_INTEGERS = {torch.bool, torch.int64}  # what Python's bools and ints become, and can be turned back into


class Leaf(NamedTuple):
    """Stands in the skeleton for a tensor, or with `array` for a numpy array (as bytes), in the segment."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    array: tuple[str, tuple[int, ...]] | None = None


@dataclass(slots=True)
class Part:
    """One message. `size` is the segment's; `slots` has one slot a row, or that of the item.

    cursors: with rows, the cursor after each. marks: without rows, where partitions stood after the item; with rows, those
    that ended, each after so many rows.
    """

    segment: int
    size: int
    skeleton: Any
    slots: bytes
    cursors: list[Cursor] = field(default_factory=list)
    marks: list[tuple[int, int, Mark]] = field(default_factory=list)  # (rows before it, partition, mark)
    rows: bool = False


def encode(batch: Any, segment: Segment) -> Any:
    """The skeleton of `batch`, whose tensors are in `segment` afterwards."""
    if isinstance(batch, torch.Tensor):
        if batch.device.type != "cpu" or batch.layout != torch.strided:
            raise DataError(
                f"a {batch.layout} tensor on {batch.device} cannot leave a worker process; make dense CPU tensors there, or "
                f"use workers=0"
            )
        batch = batch.detach()
        return Leaf(batch.dtype, tuple(batch.shape), segment.place(batch))
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biufcmMSU":
        flat = torch.from_numpy(np.frombuffer(np.ascontiguousarray(batch).tobytes(), np.uint8).copy())
        return Leaf(torch.uint8, (flat.numel(),), segment.place(flat), (batch.dtype.str, batch.shape))
    if type(batch) is dict:
        return {key: encode(value, segment) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(encode(value, segment) for value in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(encode(value, segment) for value in batch))
    return batch


def decode(skeleton: Any, segment: Segment, size: int, empty: Empty) -> Any:
    """The batch again, copied out of the segment into what `empty` gives."""
    if isinstance(skeleton, Leaf):
        view = segment.view(skeleton.offset, skeleton.shape, skeleton.dtype, size)
        if skeleton.array is not None:
            array = np.frombuffer(view.numpy().tobytes(), skeleton.array[0])
            return array.reshape(skeleton.array[1])  # read-only, as in one process
        target = empty(skeleton.shape, skeleton.dtype)
        copy(target, view)
        return target
    if type(skeleton) is dict:
        return {key: decode(value, segment, size, empty) for key, value in skeleton.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)(decode(value, segment, size, empty) for value in skeleton)
    if isinstance(skeleton, tuple) and hasattr(skeleton, "_fields"):
        return type(skeleton)(*(decode(value, segment, size, empty) for value in skeleton))
    return skeleton


class Piece(NamedTuple):
    """Rows [first, last) of a part and where they go in the batch."""

    part: Part
    segment: Segment
    first: int
    last: int
    targets: np.ndarray


def assemble(pieces: Sequence[Piece], rows: int, empty: Empty) -> Any:
    """One batch of `rows` rows out of pieces of collated parts, as collating all the rows at once would have made it."""
    return _column("item", [piece.part.skeleton for piece in pieces], pieces, rows, empty)


def _column(name: str, found: list[Any], pieces: Sequence[Piece], rows: int, empty: Empty) -> Any:
    kinds = {type(value) for value in found}
    if kinds == {Leaf}:
        return _tensor(name, found, pieces, rows, empty)
    if kinds == {dict}:
        for value in found:
            if value.keys() != found[0].keys():
                raise DataError(
                    f"items of one batch have the fields {sorted(found[0])} and {sorted(value)}; add a Map that fills or "
                    f"removes fields, or pass collate="
                )
        return {key: _column(str(key), [value[key] for value in found], pieces, rows, empty) for key in found[0]}
    whole: list[Any] = [None] * rows
    for value, piece in zip(found, pieces, strict=True):
        values = _as_list(name, value, piece)
        for target, row in zip(piece.targets.tolist(), range(piece.first, piece.last), strict=True):
            whole[target] = decode(values[row], piece.segment, piece.part.size, fresh)
    return collate(whole, empty=empty)  # types that are mixed in a part need not be in this batch


def _as_list(name: str, value: Any, piece: Piece) -> Any:
    """A field that is a list elsewhere in the batch, because types are mixed in it, is one here."""
    if isinstance(value, list):
        return value
    if isinstance(value, Leaf) and value.dtype in _INTEGERS and len(value.shape) == 1:
        return piece.segment.view(value.offset, value.shape, value.dtype, piece.part.size).tolist()
    raise DataError(f"field {name!r} has several types in one batch; make them one in a Map, or pass collate=")


def _tensor(name: str, leaves: list[Leaf], pieces: Sequence[Piece], rows: int, empty: Empty) -> torch.Tensor:
    shape, dtype = leaves[0].shape[1:], leaves[0].dtype
    for leaf in leaves:
        if leaf.shape[1:] != shape or leaf.dtype != dtype:
            raise DataError(
                f"field {name!r} has shapes {shape} and {leaf.shape[1:]} of {dtype} and {leaf.dtype} in one batch; make them "
                f"equal in a Map, or pass collate=functools.partial(streamshard.collate, ragged='pad')"
            )
    batch = empty((rows, *shape), dtype)
    if not batch.numel():
        return batch
    target = _bytes(batch)
    for leaf, piece in zip(leaves, pieces, strict=True):
        source = _bytes(piece.segment.view(leaf.offset, leaf.shape, dtype, piece.part.size))
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
