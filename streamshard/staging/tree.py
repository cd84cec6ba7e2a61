"""Nested batches: dictionaries, tuples and lists with tensors at their leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_tensors(batch: Any, function: Callable[[str, torch.Tensor], Any], path: str = "") -> Any:
    """A batch of the same form with `function(path, tensor)` for every tensor; other leaves are passed through.

    Paths are field names and numbers with dots between: ``"images.0"``.
    """
    if isinstance(batch, torch.Tensor):
        return function(path, batch)
    if isinstance(batch, dict):
        return {
            key: map_tensors(value, function, f"{path}.{key}" if path else str(key)) for key, value in batch.items()
        }
    if isinstance(batch, list | tuple):
        moved = [map_tensors(value, function, f"{path}.{i}" if path else str(i)) for i, value in enumerate(batch)]
        if isinstance(batch, list):
            return moved
        return type(batch)(*moved) if hasattr(batch, "_fields") else tuple(moved)
    return batch
