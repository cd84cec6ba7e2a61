"""From lists of samples to tensors: the only steps file that imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from streamshard.errors import DataError

CU_SEQLENS, MAX_SEQLEN = "cu_seqlens", "max_seqlen"  # fields of rows with several documents, see contract.py
RAGGED = ("error", "pad", "list")
_SHAPE = attrgetter("shape")
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float32}


Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]  # where batches of arrays are made


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """New memory."""
    return torch.empty(shape, dtype=dtype)


def collate(items: Sequence[Any], *, ragged: str = "error", pad_value: float = 0, empty: Empty = fresh) -> Any:
    """One batch out of `items`.

    - maps: field by field; every item must have the same fields
    - arrays and tensors of one shape: a tensor ``(len(items), *shape)`` of the same dtype; one copy, into what `empty`
      gives for a shape and a dtype
    - arrays of several shapes: as `ragged` says (see `Batch`); ``"pad"`` adds ``<field>_length`` for every array field
    - bool, int, float: tensors of bool, int64, float32 of shape ``(len(items),)``
    - str, bytes, None, lists, refs, mixtures of types: a list
    - ``cu_seqlens``, as rows of `Pack` have it: as long as the row with the most documents needs, the last entry repeated in
      the others; and ``max_seqlen``: the largest, an int

    Raises `DataError` naming the field.
    """
    how = _How(ragged, pad_value, empty)
    first = items[0]
    if not isinstance(first, Mapping):
        return _column("item", list(items), how, {})
    if type(first) is not dict or set(map(type, items)) != {dict} or set(map(len, items)) != {len(first)}:
        _check_fields(items)
    batch: dict[str, Any] = {}
    for name in first:
        if ragged == "pad" and f"{name}_length" in first:
            raise DataError(f"field {name}_length would be overwritten by the lengths of {name!r}; rename it in a Map")
        try:
            values = list(map(itemgetter(name), items))
        except KeyError:
            _check_fields(items)
            raise
        batch[name] = _column(name, values, how, batch)
    return batch


def _ends_repeated(rows: list[Any]) -> list[Any]:
    """`cu_seqlens` of rows made as long as the longest: what is added are segments of no tokens."""
    most = max(map(len, rows))
    return [row if len(row) == most else np.append(row, np.full(most - len(row), row[-1], row.dtype)) for row in rows]


def _check_fields(items: Sequence[Any]) -> None:
    for number, item in enumerate(items):
        if not isinstance(item, Mapping) or item.keys() != items[0].keys():
            raise DataError(_different_fields(items[0], item, number))


def _different_fields(first: Any, other: Any, number: int) -> str:
    has = sorted(other) if isinstance(other, Mapping) else type(other).__name__
    return (
        f"item {number} of the batch has {has} where item 0 has the fields {sorted(first)}; add a Map that fills or "
        f"removes fields, or pass collate_fn="
    )


class _How(NamedTuple):
    ragged: str
    pad_value: float
    empty: Empty


def _column(name: str, values: list[Any], how: _How, batch: dict[str, Any]) -> Any:
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is np.ndarray or kind is torch.Tensor:
        ends = name == CU_SEQLENS and kind is np.ndarray and all(value.ndim == 1 and len(value) for value in values)
        return _arrays(name, _ends_repeated(values) if ends else values, how, batch)
    if kind is int and name == MAX_SEQLEN:
        return max(values)
    if kind in _NUMBERS:
        numbers = how.empty((len(values),), _NUMBERS[kind])
        numbers.numpy()[:] = values
        return numbers
    if kind is dict:
        return collate(values, ragged=how.ragged, pad_value=how.pad_value, empty=how.empty)
    return values


def _arrays(name: str, values: list[Any], how: _How, batch: dict[str, Any]) -> Any:
    """Arrays or tensors of one field, all of one of the two kinds."""
    shapes = set(map(_SHAPE, values))
    if len(shapes) == 1 and not (how.ragged == "pad" and values[0].ndim):
        return _stacked(name, values, how.empty)
    _check_dtypes(name, values)
    if how.ragged == "pad" and values[0].ndim:
        return _padded(name, values, how.pad_value, batch)
    if how.ragged == "list":
        return [value if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy()) for value in values]
    raise DataError(
        f"field {name!r} has shapes {_some(shapes)} in one batch; make them equal in a Map, or pad them (Batch(..., "
        f"ragged='pad') or StreamLoader(..., collate=functools.partial(streamshard.collate, ragged='pad'))), or keep a "
        f"list with ragged='list'"
    )


def _check_dtypes(name: str, values: list[Any]) -> None:
    for value in values:
        if value.dtype != values[0].dtype:
            raise DataError(
                f"field {name!r} has dtypes {values[0].dtype} and {value.dtype} in one batch; convert them in a Map"
            )


def _stacked(name: str, values: list[Any], empty: Empty) -> torch.Tensor:
    """Values of one shape, with one copy. Concatenating is what stacking does, without a view made of every value."""
    shape = (len(values), *values[0].shape)
    if isinstance(values[0], torch.Tensor):
        _check_dtypes(name, values)
        if any(value.requires_grad or value.device.type != "cpu" or value.layout != torch.strided for value in values):
            return torch.stack(values)
        return torch.stack(values, out=empty(shape, values[0].dtype))
    stacked = empty(shape, torch_dtype(values[0].dtype))
    if len(shape) == 1:
        values, shape = [value.reshape(1) for value in values], (*shape, 1)
    try:
        np.concatenate(values, out=stacked.numpy().reshape(shape[0] * shape[1], *shape[2:]), casting="no")
    except TypeError:
        _check_dtypes(name, values)
        raise
    return stacked


@cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The dtype that torch has for numpy's; `DataError` if it has none."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as error:
        raise DataError(f"torch has no dtype for arrays of {dtype}; convert them in a Map") from error


def _padded(name: str, values: list[Any], pad_value: float, batch: dict[str, Any]) -> torch.Tensor:
    """Padded to the largest of each dimension. The lengths are added even where all are equal: fields do not come and go."""
    ranks = {value.ndim for value in values}
    if len(ranks) > 1:
        raise DataError(f"field {name!r} has arrays of {sorted(ranks)} dimensions in one batch; they cannot be padded")
    shape = tuple(np.max([value.shape for value in values], axis=0).tolist())
    full = torch.full if isinstance(values[0], torch.Tensor) else np.full
    padded: Any = full((len(values), *shape), pad_value, dtype=values[0].dtype)
    for row, value in zip(padded, values, strict=True):
        row[tuple(slice(length) for length in value.shape)] = value
    batch[f"{name}_length"] = torch.tensor([len(value) for value in values])
    return padded if isinstance(padded, torch.Tensor) else torch.from_numpy(padded)


def _some(shapes: set[tuple[int, ...]]) -> str:
    shown = [str(tuple(shape)) for shape in sorted(shapes)[:3]]
    return ", ".join(shown) + (" ..." if len(shapes) > 3 else "")
