"""The job that this process is a part of: its key-value store, and a name that no earlier life of the job has used."""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch.distributed

_agreed: list[tuple[Any, str]] = []  # the default process group, and what its members have agreed on


def running() -> bool:
    """Whether there is a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def store() -> Any:
    """What every process group of the job was set up with; torch has no public name for it."""
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001


def life() -> str:
    """What tells restarts apart without asking anybody: torchrun keeps the store, and what is in it, over restarts. Two lives
    of equal size after a change of members have the same.
    """
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{torch.distributed.get_world_size()}"


def nonce() -> str:
    """What tells lives apart for certain. The first call is a collective of the whole job, and must not be on a side thread."""
    world = torch.distributed.group.WORLD
    if not _agreed or _agreed[0][0] is not world:
        drawn = [secrets.token_hex(8)]
        torch.distributed.broadcast_object_list(drawn, src=0)
        _agreed[:] = [(world, drawn[0])]
    return _agreed[0][1]
