"""What ranks do in test_equal_steps.py."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import streamshard as ss
from streamshard.errors import WorkerError
from tests.distributed.launch import refusal

SIZE = 4


def masked(sample):
    return {"id": sample["id"], "loss_mask": np.ones(3, np.int64), "labels": np.arange(3), "name": f"n{sample['id']}"}


def only_id(sample):
    return {"id": sample["id"]}


def skewed(sample):
    """Drops most of the first half."""
    return sample["id"] % 7 == 0 or sample["id"] > 100


def first_shard_gone(sample):
    return sample["id"] >= 2


def nothing(sample):
    return False


CASES = {  # name -> (steps, options of the loader)
    "rows": ((ss.Map(masked),), {"batch_size": SIZE}),
    "samples": ((ss.Map(masked),), {"batch_size": SIZE, "collate": list}),
    "filtered": ((ss.Filter(skewed), ss.Map(masked)), {"batch_size": SIZE}),
    "workers": ((ss.Filter(skewed), ss.Map(masked)), {"batch_size": SIZE, "workers": 2, "start_method": "fork"}),
    "apart": (
        (ss.Filter(skewed), ss.Map(masked)),
        {"batch_size": SIZE, "collate": list, "workers": 2, "start_method": "fork"},
    ),
    "micro-batches": ((ss.Filter(skewed), ss.Map(masked), ss.Batch(3)), {}),
    "at once": ((ss.Filter(skewed), ss.Map(masked)), {"batch_size": SIZE, "prefetch": 0}),
    "staged": ((ss.Filter(skewed), ss.Map(masked)), {"batch_size": SIZE, "device": "cpu"}),
    "nothing": ((ss.Filter(nothing),), {"batch_size": SIZE, "collate": list}),
}


def plain(batch):
    """A batch, or item, for JSON."""
    if isinstance(batch, dict):
        return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in batch.items()}
    return [plain(sample) for sample in batch]


def every_way(url):
    """For each case and policy: the batches of two epochs, counters, and length."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, (steps, options) in CASES.items():
        for policy in ("keep", "drop", "pad"):
            dataset = ss.StreamDataset(url, *steps, partitions=48, topology=ss.Topology(rank, ranks))
            with ss.StreamLoader(dataset, remainder=policy, **options) as loader:
                batches = [plain(batch) for batch in loader]
                counters, state = loader.counters(), loader.state_dict()
                again = sum(1 for _ in loader)
                found[f"{name}, {policy}"] = {
                    "batches": batches, "again": again, "dropped": counters.remainder_dropped,
                    "padded": counters.remainder_padded, "length": length(loader), "state": state,
                }  # fmt: skip
    return found


def length(loader):
    try:
        return len(loader)
    except TypeError:
        return None


def small(url):
    """Five samples on two ranks; the first shard has two of them, and a filter drops these."""
    rank = dist.get_rank()
    found = {}
    for policy in ("drop", "pad"):
        for parts in (2, 4):
            dataset = ss.StreamDataset(
                url,
                ss.Filter(first_shard_gone),
                ss.Map(only_id),
                shuffle=False,
                partitions=parts,
                topology=ss.Topology(rank, 2),
            )
            with ss.StreamLoader(dataset, batch_size=1, remainder=policy) as loader:
                began = time.monotonic()
                batches = [plain(batch) for batch in loader]
                found[f"{policy} {parts}"] = [batches, time.monotonic() - began]
    return found


def resumed(url):
    """Left after three batches and resumed; left again, and begun anew; with peers that share batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def loader(policy):
        dataset = ss.StreamDataset(
            url, ss.Filter(skewed), ss.Map(only_id), partitions=48, topology=ss.Topology(rank, ranks)
        )
        return ss.StreamLoader(dataset, batch_size=SIZE, remainder=policy)

    found = {}
    for policy in ("drop", "pad"):
        with loader(policy) as first:
            begun = [plain(batch) for batch in itertools.islice(first, 3)]
            own = first.state_dict()
            everybody = ss.gather_state(own)
            whole = [plain(batch) for batch in first]
        rests = []
        for state in (own, everybody):
            with loader(policy) as second:
                second.load_state_dict(state)
                rests.append([plain(batch) for batch in second])
        found[policy] = [begun, *rests, whole]
    return found


def peers(url):
    """Two data-parallel ranks of two peers; in the second round one peer of each reads for both."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = []
    for shared in (False, True):
        dataset = ss.StreamDataset(
            url, ss.Filter(skewed), ss.Map(only_id), partitions=48, topology=ss.Topology(rank // 2, 2)
        )
        with ss.StreamLoader(dataset, batch_size=SIZE, remainder="pad") as loader:
            if shared:
                ss.broadcast_batches(loader, groups[rank // 2])
            found.append([plain(batch) for batch in loader])
    return found


def begun(url, ranks):
    """This rank, and its batches, in a job whose processes wait four seconds for one another."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    dataset = ss.StreamDataset(url, partitions=48, topology=ss.Topology(rank, ranks))
    return rank, iter(ss.StreamLoader(dataset, batch_size=1, collate=list, remainder="drop"))


def one_dies(url, folder):
    """Without torchrun, which would end the others: rank 2 kills itself after two batches."""
    rank, batches = begun(url, 3)
    next(batches), next(batches)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in batches:
            pass
    except WorkerError as error:
        (Path(folder) / f"told-{rank}").write_text(f"{time.monotonic() - began:.1f} {error}")
        raise


def store_gone(url, folder):
    """Rank 0, which keeps the store, dies."""
    rank, batches = begun(url, 2)
    if rank == 0:
        next(batches)
        os.kill(os.getpid(), signal.SIGKILL)
    message = refusal(lambda: list(batches), WorkerError)
    (Path(folder) / f"told-{rank}").write_text(f"0 {message}")
    os._exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"one_dies": one_dies, "store_gone": store_gone}[sys.argv[1]](*sys.argv[2:])
