"""Nested batches: dictionaries, tuples and lists with tensors at their leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

import torch

Path = tuple[Hashable, ...]  # the keys and places that lead to a leaf


def map_leaves(batch: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A batch of the same form with `function(path, leaf)` in place of every leaf: what is no dict, list or tuple."""
    if isinstance(batch, dict):
        mapped = {key: map_leaves(value, function, (*path, key)) for key, value in batch.items()}
        if type(batch) is dict:
            return mapped
        same = copy.copy(batch)  # of its own class
        same.update(mapped)
        return same
    if isinstance(batch, list | tuple):
        values = [map_leaves(value, function, (*path, place)) for place, value in enumerate(batch)]
        if isinstance(batch, list):
            return values
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return function(path, batch)


def map_tensors(batch: Any, function: Callable[[Path, torch.Tensor], Any]) -> Any:
    """`map_leaves` for the tensors; other leaves are passed through."""
    return map_leaves(batch, lambda path, leaf: function(path, leaf) if isinstance(leaf, torch.Tensor) else leaf)


def dotted(path: Path) -> str:
    """A path as people write it: ``"images.0"``."""
    return ".".join(map(str, path))
