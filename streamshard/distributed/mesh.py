"""Which dimensions of a device mesh carry different data, and where this process stands in them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from math import prod

import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from streamshard.errors import UsageError

# Names that torchtitan, Lightning, accelerate, DeepSpeed and Megatron give to dimensions. Others, such as "ep", say nothing
# about data: expert-parallel peers read different samples in most programs.
DATA = {"dp", "ddp", "fsdp", "hsdp", "data", "data_parallel", "replicate", "shard"}  # and what begins with "dp_"
MODEL = {
    "tp", "pp", "cp", "sp", "mp", "model", "tensor", "pipeline", "context", "sequence",
    "tensor_parallel", "pipeline_parallel", "context_parallel", "sequence_parallel", "model_parallel",
}  # fmt: skip


def place_in(mesh: DeviceMesh, dims: Sequence[str]) -> tuple[int, int, int]:
    """(rank, size, peers) of this process: its place along `dims`, how many there are, and how many processes share it (0: not
    known, since the mesh is a slice of another).

    Places are counted in the mesh's own order of dimensions, the last one fastest, in whatever order `dims` names them.
    """
    names = _names(mesh)
    chosen = _chosen(names, (dims,) if isinstance(dims, str) else tuple(dims))
    _check_names(names, chosen, mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(
            f"this process (global rank {torch.distributed.get_rank()}) is not in the mesh {_shape(mesh)}: build loaders only "
            f"in the processes that are"
        )
    rank = 0
    for at, extent, name in zip(coordinate, mesh.shape, names, strict=True):
        if name in chosen:
            rank = rank * extent + at
    size = prod(extent for extent, name in zip(mesh.shape, names, strict=True) if name in chosen)
    return rank, size, mesh.size() // size if mesh.size() == torch.distributed.get_world_size() else 0


def _names(mesh: object) -> tuple[str, ...]:
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"Topology.from_mesh takes a torch.distributed.device_mesh.DeviceMesh, not a {type(mesh).__name__}; "
            f"init_device_mesh(device, shape, mesh_dim_names=...) makes one"
        )
    if mesh.mesh_dim_names is None:
        raise UsageError(
            f"the mesh of shape {tuple(mesh.shape)} has no names, so which dimension is data-parallel is not known: pass "
            f"mesh_dim_names= to init_device_mesh, or Topology(rank, size) instead"
        )
    return tuple(mesh.mesh_dim_names)


def _chosen(names: tuple[str, ...], dims: tuple[str, ...]) -> tuple[str, ...]:
    """`dims`, with "dp" standing for its parts where it has been split: dp_replicate, dp_shard, dp_shard_mod_ep ..."""
    found: list[str] = []
    for dim in dims:
        parts = [name for name in names if name.startswith("dp_")]
        found += parts if dim == "dp" and dim not in names and parts else [dim]
    return tuple(dict.fromkeys(found))


def _of_data(name: str) -> bool:
    return name in DATA or name.startswith("dp_")


def _of_model(name: str) -> bool:
    """Whether some processes along `name` must read the same; flattened ones, such as dp_shard_cp, have several."""
    return name in MODEL or (name.startswith("dp_") and bool(MODEL & set(name.split("_"))))


def _check_names(names: tuple[str, ...], chosen: tuple[str, ...], mesh: DeviceMesh) -> None:
    data = tuple(name for name in names if _of_data(name) and not _of_model(name))
    for dim in chosen:
        if dim not in names:
            raise UsageError(
                f"the mesh {_shape(mesh)} has no dimension {dim!r}: pass dims={data or ('...',)!r} with the names of its "
                f"data-parallel dimensions, or dims=() if there is none"
            )
        if _of_model(dim):
            raise UsageError(
                f"dims={chosen!r}: processes along {dim!r} work on the same samples and must not read different ones; pass "
                f"dims={data!r}, of the mesh before it was flattened"
            )
    for dim, extent in zip(names, mesh.shape, strict=True):
        if dim in data and dim not in chosen and extent > 1:
            raise UsageError(
                f"dims={chosen!r} leaves out the data-parallel dimension {dim!r} of the mesh {_shape(mesh)}: its {extent} "
                f"processes would train on the same samples. Pass dims={data!r}; if that is meant, Topology(rank, size)"
            )


def model_parallel_mesh() -> str | None:
    """A mesh of this process in which some processes must read the same samples; None if there is none.

    torch keeps no list of meshes, so the collector is asked who refers to their class: 50 ms in a large program, a few times
    for each iteration that begins without a topology on several ranks.
    """
    for mesh in gc.get_referrers(DeviceMesh):
        if isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names is not None:
            extents = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
            if any(_of_model(name) and extent > 1 for name, extent in extents.items()):
                return _shape(mesh)
    return None


def _shape(mesh: DeviceMesh) -> str:
    return "(" + ", ".join(f"{n}={e}" for n, e in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) + ")"
