"""`Topology`: which data-parallel rank this process is, out of how many."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from streamshard.distributed.job import running
from streamshard.distributed.mesh import model_parallel_mesh, place_in
from streamshard.errors import UsageError

_logger = logging.getLogger("streamshard")
_told: set[tuple[int, int]] = set()


@dataclass(frozen=True, slots=True)
class Topology:
    """Data-parallel rank `rank` of `size`.

    Tensor-, pipeline- and context-parallel peers read the same samples, so they share one rank: pass the coordinate of the
    data-parallel dimension, not the global rank, or let `from_mesh` find it. Every process of a job needs a topology of the
    same size, and every rank needs its processes: one that nobody reads is never trained on.

    peers: how many processes share this rank. 0, the default, means not known: then as many as the processes of the job
        divided by `size`. It does not shape the order; the checks of the first step use it.
    """

    rank: int
    size: int
    peers: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if not all(type(v) is int for v in (self.rank, self.size)) or not 0 <= self.rank < self.size:
            raise UsageError(
                f"Topology(rank={self.rank!r}, size={self.size!r}): rank must be an int from 0 to size - 1"
            )

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dims: Sequence[str] = ("dp",)) -> Topology:
        """Where this process stands along the data-parallel dimensions of a device mesh; along all others it has peers.

        dims: the names of the data-parallel dimensions. "dp" also stands for "dp_replicate" and "dp_shard" where the mesh has
            these instead. () is a job without data parallelism: all processes read the same.

        Sends nothing. Raises `UsageError` for a mesh without names, for dimensions that it does not have, for known
        model-parallel ones among `dims`, and for known data-parallel ones that `dims` leaves out.
        """
        return cls(*place_in(mesh, dims))

    @classmethod
    def from_environment(cls) -> Topology:
        """What torchrun says in RANK and WORLD_SIZE: every process is a data-parallel rank. One rank where it says nothing."""
        return cls(*_from_environment())


def resolve(topology: Topology | None) -> Topology:
    """The topology asked for, else the process group's, else torchrun's environment, else one rank.

    Without an explicit topology every process of a job counts as a data-parallel rank. That is right for plain data
    parallelism, hence the warning, and wrong with model parallelism, which is refused where a mesh tells of it.
    """
    if topology is not None:
        return topology
    if running():
        found = Topology(torch.distributed.get_rank(), torch.distributed.get_world_size())
        where = "the default process group"
    else:
        found = Topology.from_environment()
        where = "the environment variables RANK and WORLD_SIZE"
    if found.size == 1:
        return found
    mesh = model_parallel_mesh()
    if mesh is not None:
        raise UsageError(
            f"no topology was given, and this process is in the device mesh {mesh}: read as rank {found.rank} of {found.size}, "
            f"model-parallel peers would get different samples. Pass topology=Topology.from_mesh(mesh, dims=...), or "
            f"Topology(data_parallel_rank, data_parallel_size)"
        )
    if (found.rank, found.size) not in _told:
        _told.add((found.rank, found.size))
        _logger.warning(
            "no topology was given: reading as rank %d of %d, from %s. With tensor, pipeline or context parallelism pass "
            "topology=Topology.from_mesh(mesh); without, topology=Topology(%d, %d) says that this is meant",
            found.rank, found.size, where, found.rank, found.size,
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
