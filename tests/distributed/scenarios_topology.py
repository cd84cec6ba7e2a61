"""What ranks do in test_topology.py."""

from __future__ import annotations

import gc
import itertools
import logging

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import streamshard as ss
from streamshard.errors import DataError, UsageError
from tests.distributed.launch import refusal

MESHES = {  # name -> (shape, names, dims)
    "dp": ((8,), ("dp",), ("dp",)),
    "hybrid": ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), ("dp",)),
    "hybrid named": ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), ("dp_shard", "dp_replicate")),
    "pipeline": ((2, 2, 1, 2), ("pp", "dp", "cp", "tp"), ("dp",)),
    "context": ((2, 2, 2), ("dp_shard", "cp", "tp"), ("dp_shard",)),
    "inner": ((2, 4), ("tp", "dp"), ("dp",)),
    "no data": ((8,), ("tp",), ()),
}


def ids(dataset):
    return [item["id"] for item in dataset]


def meshes(url):
    """For each mesh: rank, size and peers, the ids read, and the same of a slice of the mesh."""
    found = {}
    logged = []
    logging.getLogger("streamshard").addFilter(lambda record: logged.append(record.getMessage()) or True)
    found["unasked"] = ids(ss.StreamDataset(url, partitions=48))
    ss.StreamDataset(url, partitions=48).resolve_partitions(0)
    found["warnings"] = logged
    for name, (shape, names, dims) in MESHES.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        topology = ss.Topology.from_mesh(mesh, dims)
        loader = ss.StreamLoader(ss.StreamDataset(url, partitions=48, topology=topology), batch_size=4, collate=list)
        found[name] = [topology.rank, topology.size, topology.peers, [item["id"] for batch in loader for item in batch]]
        if "tp" in names:
            found[f"{name}: unasked"] = refusal(lambda: ids(ss.StreamDataset(url, partitions=48)), UsageError)
        del mesh
        gc.collect()
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    sliced = ss.Topology.from_mesh(mesh["dp"])
    found["sliced"] = [sliced.rank, sliced.size, ids(ss.StreamDataset(url, partitions=48, topology=sliced))]
    split = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard_mod_ep", "tp"))
    found["split"] = ss.Topology.from_mesh(split).rank
    flat = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard_cp", "tp"))
    unnamed = init_device_mesh("cpu", (2, 4))
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))  # of the first four ranks
    found["refused"] = {
        "unnamed": refusal(lambda: ss.Topology.from_mesh(unnamed), UsageError),
        "no such": refusal(lambda: ss.Topology.from_mesh(mesh, ("data",)), UsageError),
        "model-parallel": refusal(lambda: ss.Topology.from_mesh(mesh, ("dp", "tp")), UsageError),
        "left out": refusal(lambda: ss.Topology.from_mesh(part, ("dp_shard",)), UsageError),
        "flattened": refusal(lambda: ss.Topology.from_mesh(flat), UsageError),
        "no mesh": refusal(lambda: ss.Topology.from_mesh("dp"), UsageError),
        "outside": refusal(lambda: ss.Topology.from_mesh(part), UsageError),
    }
    return found


def checks(url):
    """What each rank of four is told on the first step, for several kinds of disagreement."""
    rank = dist.get_rank()
    every = ss.Topology(rank, 4)

    def told(**options):
        chosen = {"partitions": 48, "topology": every, **options}
        message = refusal(lambda: next(iter(ss.StreamDataset(url, **chosen))), UsageError, DataError)
        dist.barrier()  # so that the scenarios do not meet
        return message

    def began(epoch):
        dataset = ss.StreamDataset(url, partitions=48, topology=every)
        dataset.set_epoch(epoch)
        message = refusal(lambda: next(iter(dataset)), UsageError)
        dist.barrier()
        return message

    def batch_of(steps, topology, **options):
        dataset = ss.StreamDataset(url, *steps, partitions=48, topology=topology, **options)
        message = refusal(lambda: next(iter(ss.StreamLoader(dataset, batch_size=4, collate=list))), DataError)
        dist.barrier()
        return message

    halves = ss.Topology(rank // 2, 2)
    return {
        "agree": told(),
        "seed": told(seed=18 if rank == 2 else 17),
        "partitions": told(partitions=24 if rank == 3 else 48),
        "size": told(topology=ss.Topology(0, 2) if rank == 1 else every),
        "same rank": told(topology=ss.Topology(0, 4)),
        "epoch": began(3 if rank == 1 else 2),
        "off": told(seed=rank, verify_ranks=False),
        "peers agree": batch_of((), halves),
        "peers differ": batch_of((ss.Map(with_rank),), halves),
        "peers differ, off": batch_of((ss.Map(with_rank),), halves, verify_ranks=False),
        "version": grown(url, rank, every),
        "resumed": resumed(url, rank, every),
        "late": late(url, rank, every),
        "compared": compared(rank),
    }


def with_rank(sample):
    return {**sample, "rank": dist.get_rank()}


def grown(url, rank, topology):
    """Rank 3 opens the dataset after rank 0 has appended to it."""
    dataset = ss.StreamDataset(url, partitions=48, topology=topology)
    if rank != 3:
        assert dataset.manifest
    dist.barrier()
    if rank == 0:
        with ss.DatasetWriter(url, append=True) as writer:
            writer.write({"id": -1, "tokens": np.zeros(1, np.uint16), "text": "new"})
    dist.barrier()
    message = refusal(lambda: next(iter(dataset)), UsageError)
    dist.barrier()
    return message


def resumed(url, rank, topology):
    """Rank 1 goes on from the end of its epoch, the others from the middle of theirs."""
    dataset = ss.StreamDataset(url, partitions=48, topology=topology)
    for _ in itertools.islice(iter(dataset), None if rank == 1 else 5):
        pass
    again = ss.StreamDataset(url, partitions=48, topology=topology)
    again.load_state_dict(dataset.state_dict())
    dist.barrier()
    return refusal(lambda: next(iter(again)), UsageError)


def late(url, rank, topology):
    """Rank 1 begins when rank 0 has read all of its own."""
    token = torch.zeros(1)
    if rank == 1:
        dist.recv(token, src=0)
    found = ids(ss.StreamDataset(url, partitions=48, topology=topology))
    if rank == 0:
        dist.send(token, dst=1)
    dist.barrier()
    return found


def compared(rank):
    """verify_replicas over all four, and over two of them; rank 2 has another mask, rank 3 another id."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    batch = {
        "tokens": torch.arange(6).reshape(2, 3), "nested": {"mask": torch.ones(2, dtype=torch.bfloat16)}, "id": ["a", b"b", 1]
    }  # fmt: skip
    same = refusal(lambda: ss.verify_replicas(batch), DataError)
    if rank == 2:
        batch["nested"]["mask"][1] = 0
    all_four = refusal(lambda: ss.verify_replicas(batch), DataError)
    two = refusal(lambda: ss.verify_replicas(batch, pair), DataError)
    if rank == 3:
        batch["tokens"] = batch["tokens"].reshape(3, 2)
    shape = refusal(lambda: ss.verify_replicas({"tokens": batch["tokens"]}), DataError)
    return {"same": same, "all": all_four, "two": two, "shape": shape}
