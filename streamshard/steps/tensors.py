"""From lists of samples to tensors: the only steps file that imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from streamshard.errors import DataError

RAGGED = ("error", "pad", "list")
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float32}


def collate(items: Sequence[Any], *, ragged: str = "error", pad_value: float = 0) -> Any:
    """One batch out of `items`.

    - maps: field by field; every item must have the same fields
    - arrays and tensors of one shape: a tensor ``(len(items), *shape)`` of the same dtype; one copy, into fresh memory
    - arrays of several shapes: as `ragged` says (see `Batch`); ``"pad"`` adds ``<field>_length`` for every array field
    - bool, int, float: tensors of bool, int64, float32 of shape ``(len(items),)``
    - str, bytes, None, lists, refs, mixtures of types: a list

    Raises `DataError` naming the field.
    """
    if not isinstance(items[0], Mapping):
        return _column("item", list(items), ragged, pad_value, {})
    batch: dict[str, Any] = {}
    names = items[0].keys()
    for number, item in enumerate(items):
        if not isinstance(item, Mapping) or item.keys() != names:
            raise DataError(_different_fields(items[0], item, number))
    for name in names:
        if ragged == "pad" and f"{name}_length" in names:
            raise DataError(f"field {name}_length would be overwritten by the lengths of {name!r}; rename it in a Map")
        batch[name] = _column(name, [item[name] for item in items], ragged, pad_value, batch)
    return batch


def _different_fields(first: Any, other: Any, number: int) -> str:
    has = sorted(other) if isinstance(other, Mapping) else type(other).__name__
    return (
        f"item {number} of the batch has {has} where item 0 has the fields {sorted(first)}; add a Map that fills or "
        f"removes fields, or pass collate_fn="
    )


def _column(name: str, values: list[Any], ragged: str, pad_value: float, batch: dict[str, Any]) -> Any:
    kinds = {type(value) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is np.ndarray or kind is torch.Tensor:
        return _arrays(name, values, ragged, pad_value, batch)
    if kind in _NUMBERS:
        return torch.tensor(values, dtype=_NUMBERS[kind])
    if kind is dict:
        return collate(values, ragged=ragged, pad_value=pad_value)
    return values


def _arrays(name: str, values: list[Any], ragged: str, pad_value: float, batch: dict[str, Any]) -> Any:
    """Arrays or tensors of one field, all of one of the two kinds."""
    shapes = {tuple(value.shape) for value in values}
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1:
        raise DataError(f"field {name!r} has dtypes {sorted(map(str, dtypes))} in one batch; convert them in a Map")
    if ragged == "pad" and values[0].ndim:
        return _padded(name, values, pad_value, batch)
    if len(shapes) == 1:
        return torch.stack(values) if isinstance(values[0], torch.Tensor) else torch.from_numpy(np.stack(values))
    if ragged == "list":
        return [value if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy()) for value in values]
    raise DataError(
        f"field {name!r} has shapes {_some(shapes)} in one batch; pass Batch(..., ragged='pad') or 'list', or make them equal "
        f"in a Map"
    )


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
    shown = [str(shape) for shape in sorted(shapes)[:3]]
    return ", ".join(shown) + (" ..." if len(shapes) > 3 else "")
