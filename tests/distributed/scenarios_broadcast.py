"""What ranks do in test_broadcast.py: two data-parallel ranks of two peers each, of which the second has no shards."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import streamshard as ss
from streamshard.errors import UsageError, WorkerError
from tests.distributed.launch import refusal

PAD = functools.partial(ss.collate, ragged="pad")


class Fragile:
    """Cannot be received."""

    def __reduce__(self):
        return broken, ()


def broken():
    raise ValueError("it does not arrive")


@dataclass
class Row:
    """Neither a map nor a list: torch's tensors in it travel inside."""

    ids: torch.Tensor


def fragile(items):
    return Fragile()


def of_class(items):
    return Row(torch.tensor([item["id"] for item in items]))


def only_id(sample):
    return {"id": sample["id"]}


def fails_at_100(sample):
    if sample["id"] == 100:
        raise ValueError("a hundred")
    return sample


def shared(url, without_shards, folder):
    """What each process gets of its peers' batches, in several ways of loading, and of leaving."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    topology, group = ss.Topology.from_mesh(mesh), mesh.get_group("tp")
    reads = dist.get_rank() % 2 == 0

    def dataset(*steps, **options):
        options = {"partitions": 48, "seed": 3, "topology": topology, **options}
        return ss.StreamDataset(url if reads else without_shards, *steps, **options)

    def loader(*steps, collate=list, of=None, **options):
        made = ss.StreamLoader(of or dataset(*steps), batch_size=7, collate=collate, **options)
        return ss.broadcast_batches(made, group)

    def agreed(batch):
        ss.verify_replicas(batch, group)
        return ids(batch)

    with loader() as plain:
        lists = [(agreed(batch), plain.state_dict()) for batch in plain]
        second = [agreed(batch) for batch in plain]
    with loader(collate=PAD, device="cpu", accumulation=2) as staged:
        tensors = [agreed(batch) for batch in staged]
    with loader(ss.Map(only_id), collate=None, workers=2) as in_processes:
        of_workers = [agreed(batch) for batch in in_processes]
    with loader() as left:
        parts = [[agreed(batch) for batch in itertools.islice(left, count)] for count in (3, 1)]
        whole = [agreed(batch) for batch in left]
    resumed = loader()
    resumed.load_state_dict(lists[4][1])
    rest = [agreed(batch) for batch in resumed]
    resumed.close()
    failing = loader(ss.Map(fails_at_100))
    failure = refusal(lambda: list(failing), WorkerError, ss.DataError, ValueError)
    with loader(collate=of_class) as classes:
        objects = [batch.ids.tolist() for batch in classes]
    with loader(collate=fragile) as lost:
        arrived = refusal(lambda: next(iter(lost)), ValueError)
    with loader() as early:
        batches = iter(early)
        next(batches)
        if reads:
            batches.close()
        leaves = "" if reads else refusal(lambda: list(batches), WorkerError)
    other = ss.StreamDataset(url, partitions=48, topology=topology, verify_ranks=False)
    wrong = ss.broadcast_batches(ss.StreamLoader(other, batch_size=7, collate=list), mesh.get_group("dp"))
    not_peers = refusal(lambda: next(iter(wrong)), UsageError)
    dist.barrier()
    wrong.close()
    alone = ss.StreamLoader(dataset(), batch_size=7, collate=list) if reads else []
    return {
        "alone": [ids(batch) for batch in alone],
        "lists": [found for found, _ in lists],
        "states": [state for _, state in lists],
        "next epoch": second,
        "tensors": tensors,
        "workers": of_workers,
        "parts": parts,
        "whole": whole,
        "rest": rest,
        "failure": failure,
        "objects": objects,
        "arrived": arrived,
        "leaves": leaves,
        "not peers": not_peers,
    }


def ids(batch):
    return batch["id"].tolist() if isinstance(batch, dict) else [item["id"] for item in batch]


def killed(url, without_shards, folder):
    """The reader dies while its peer waits for a batch; the peer's message goes to a file."""
    rank = dist.get_rank()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when it sees that the reader is gone
    dataset = ss.StreamDataset(url, repeat=True, partitions=4, topology=ss.Topology(0, 1, peers=dist.get_world_size()))
    loader = ss.broadcast_batches(ss.StreamLoader(dataset, batch_size=4, collate=list), dist.group.WORLD)
    batches = iter(loader)
    next(batches)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    message = refusal(lambda: [None for _ in batches], WorkerError)
    (Path(folder) / f"told-{rank}").write_text(f"{time.monotonic() - began:.1f} {message}")
    os._exit(1)
