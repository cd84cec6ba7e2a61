"""`Topology`: which data-parallel rank this process is, out of how many."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch.distributed

from streamshard.errors import UsageError

_logger = logging.getLogger("streamshard")


@dataclass(frozen=True, slots=True)
class Topology:
    """Data-parallel rank `rank` of `size`.

    Tensor-, pipeline- and context-parallel peers read the same samples, so they share one rank: pass the coordinate of the
    data-parallel dimension, not the global rank.
    """

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not all(isinstance(v, int) for v in (self.rank, self.size)) or not 0 <= self.rank < self.size:
            raise UsageError(
                f"Topology(rank={self.rank!r}, size={self.size!r}): rank must be an int from 0 to size - 1"
            )


def resolve(topology: Topology | None) -> Topology:
    """The topology asked for, else the process group's, else torchrun's environment, else one rank.

    Without an explicit topology every process of a job counts as a data-parallel rank. That is right for plain data
    parallelism and wrong with model parallelism, hence the warning.
    """
    if topology is not None:
        return topology
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found = Topology(torch.distributed.get_rank(), torch.distributed.get_world_size())
        where = "the default process group"
    else:
        found = Topology(*_from_environment())
        where = "the environment variables RANK and WORLD_SIZE"
    if found.size > 1:
        _logger.warning(
            "no topology was given: reading as rank %d of %d, from %s. With tensor, pipeline or context parallelism pass "
            "topology=Topology(data_parallel_rank, data_parallel_size)",
            found.rank, found.size, where,
        )  # fmt: skip
    return found


def _from_environment() -> tuple[int, int]:
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or size is None:
        return 0, 1
    try:
        return int(rank), int(size)
    except ValueError:
        raise UsageError(
            f"RANK={rank!r} and WORLD_SIZE={size!r} must be integers; unset them or pass topology="
        ) from None
