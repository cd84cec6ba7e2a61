"""Whether the processes that should train on the same batch have the same batch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed

from streamshard.distributed.job import running
from streamshard.errors import DataError, UsageError

Digests = dict[str, str]  # dotted names of a field -> 16 hexadecimal digits

_SCALARS = {str, int, float, bool, type(None)}

CURE = (
    "TP, PP and CP peers need the same batches: the functions of the steps must give the same for the same sample (no unseeded "
    "random numbers, no rank in them), and all peers the same settings and versions of the code"
)


def verify_replicas(batch: Any, group: Any = None) -> None:
    """Raise `DataError` on every member of `group` unless all of them hold the same batch, bit for bit.

    group: the process group of a tensor-, pipeline- or context-parallel set of peers; default the whole job. A collective: all
        members have to call it, for the same step. A few hundred bytes a member go over the network; tensors on a device are
        copied to the host, which waits for it.

    The error names the field, and the global ranks that differ from the majority (from the lowest rank, if there is none).
    """
    if not running():
        raise UsageError(
            "verify_replicas compares the processes of a job, and there is no process group: call "
            "torch.distributed.init_process_group first"
        )
    ranks = torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD)
    found: list[Any] = [None] * len(ranks)
    torch.distributed.all_gather_object(found, digests(batch), group)
    by_rank = dict(zip(ranks, found, strict=True))
    field = next(filter(None, (first_difference(found[0], other) for other in found[1:])), None)
    if field is None:
        return
    held = {rank: one.get(field) for rank, one in by_rank.items()}
    usual = Counter(held.values()).most_common(1)[0][0]
    odd = [rank for rank, digest in held.items() if digest != usual]
    same = [rank for rank in ranks if rank not in odd]
    raise DataError(f"{field!r} differs on rank {_listed(odd)} from what rank {_listed(same)} has. {CURE}")


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first field that only one of two batches has, or that differs."""
    names = [*one, *(name for name in other if name not in one)]
    return next((name for name in names if one.get(name) != other.get(name)), None)


def digests(batch: Any) -> Digests:
    """A digest of each field of a batch, with dtypes and shapes in it. Objects of unknown classes count by class only.

    A field is told by the names that lead to it: those of all samples of a list are one, so that there are few.
    """
    found: dict[str, Any] = {}
    _add(batch, (), found)
    return {name: digest.hexdigest() for name, digest in found.items()}


def _add(value: Any, names: tuple[str, ...], found: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _add(inner, (*names, str(key)), found)
    elif isinstance(value, list | tuple) and not set(map(type, value)) <= _SCALARS:
        for inner in value:
            _add(inner, names, found)
    else:
        digest = found.setdefault(".".join(names) or "the batch", hashlib.blake2b(digest_size=8))
        for part in _parts(value):
            digest.update(part)


def _parts(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.jagged:
        return [b"jagged", *_parts(leaf.values()), *_parts(leaf.offsets())]  # type: ignore[attr-defined]  # torch knows it
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
        plain = leaf.detach().cpu().contiguous()
        flat = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
        return [f"{leaf.dtype} {tuple(leaf.shape)}".encode(), flat]
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return [f"{leaf.dtype} {leaf.shape}".encode(), np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)]
    if isinstance(leaf, bytes):
        return [b"bytes", leaf]
    if type(leaf) in _SCALARS or isinstance(leaf, list | tuple):
        return [f"{type(leaf).__name__} {leaf!r}".encode()]
    return [type(leaf).__qualname__.encode()]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
