"""One life of a training that is going to be killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import streamshard as ss

PARTS, SIZE, EVERY = 48, 4, 3


def only_id(sample):
    return {"id": sample["id"]}


def twice(sample):
    return [sample, sample]


def tokens_as_id(item):
    return {"id": item["input_ids"]}


STEPS = {
    "batches": (ss.Map(only_id), ss.Batch(SIZE)),
    "packed": (ss.Pack(32, window=9), ss.Map(tokens_as_id)),
    "buckets": (ss.BucketBatch([6, 9], 40, window=9), ss.Map(tokens_as_id)),
}  # of one dataset, and the other two of a mixture


def loader_of(url, topology, workers):
    """The url may begin with what is made of it: ``packed:/data``."""
    kind, _, url = url.rpartition(":")
    source = url if not kind else ss.Mixture({"a": url, "b": ss.Source(url, ss.FlatMap(twice))}, (2, 1))
    dataset = ss.StreamDataset(
        source,
        *STEPS[kind or "batches"],
        seed=11,
        partitions=PARTS,
        shuffle_buffer=20,
        repeat=True,
        topology=topology,
    )
    return ss.StreamLoader(dataset, workers=workers, start_method="fork")


def last_checkpoint(folder):
    """(slot, folder) of the newest that is whole, or (0, None): DCP writes its .metadata last."""
    whole = [path.parent for path in Path(folder).glob("at-*/.metadata")]
    return max(((int(path.name[3:]), path) for path in whole), default=(0, None))


def life(url, folder, name, workers, slots, victim, after_s):
    """Train until all slots are done, saving every third step; rank `victim` is killed so many seconds after its first batch.

    Each rank logs (slot, ids) of what it has trained on, when the step is over on all ranks.
    """
    warnings.filterwarnings("ignore")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loader = loader_of(url, ss.Topology(rank, ranks), int(workers))
    begin, newest = last_checkpoint(folder)
    if newest is not None:
        dcp.load({"data": ss.ShardedState(loader)}, checkpoint_id=newest)
    with (Path(folder) / f"log-{name}-{rank}.jsonl").open("w") as log:
        for step, batch in enumerate(loader):
            if step == 0 and rank == int(victim):
                timer = threading.Timer(float(after_s), os.kill, (os.getpid(), signal.SIGKILL))
                timer.daemon = True
                timer.start()
            dist.barrier()  # the gradients
            print(json.dumps([begin + step * ranks + rank, batch["id"].tolist()]), file=log, flush=True)
            done = begin + (step + 1) * ranks
            if (step + 1) % EVERY == 0:
                dcp.save({"data": ss.ShardedState(loader)}, checkpoint_id=Path(folder) / f"at-{done}")
            if done >= int(slots):
                break
    loader.close()
    return begin
