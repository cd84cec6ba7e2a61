"""One life of an elastic run: resume from the last life's checkpoint, take some batches, save in every way."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import astuple
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import streamshard as ss

PARTS = 48


def even(sample):
    return sample["id"] % 2 == 0


def only_id(sample):
    return {"id": sample["id"]}


def twice(sample):
    yield {"id": sample["id"], "copy": 0}
    yield {"id": sample["id"], "copy": 1}


def twice_whole(sample):
    return [sample, sample]


def row_itself(row):
    return {"id": row["input_ids"]}


MODES = {  # name -> (steps, options of the dataset, items of a batch of the whole job or None, accumulation)
    "micro-batches": ((ss.Map(only_id), ss.Batch(4)), {"repeat": True}, None, 1),
    "rows": ((ss.Map(only_id),), {"repeat": True}, PARTS, 1),
    "accumulated": ((ss.Map(only_id),), {"repeat": True}, PARTS, 2),
    "finite": ((ss.Filter(even), ss.FlatMap(twice)), {"repeat": False}, 24, 1),
    "contents": ((ss.Map(only_id),), {"repeat": True, "snapshot": "contents"}, PARTS, 1),
    "mixed": ((ss.Pack(24, window=5), ss.Map(row_itself)), {"repeat": True}, PARTS, 1),
    "packed": ((ss.Pack(24, window=5), ss.Map(row_itself)), {"repeat": True}, PARTS, 1),
}


def made(url, mode, topology, workers, *, scale=1):
    """The loader of a mode; `scale` times its batch size."""
    steps, options, batch, accumulation = MODES[mode]
    source = ss.Mixture({"a": url, "b": ss.Source(url, ss.FlatMap(twice_whole))}, (3, 1)) if mode == "mixed" else url
    dataset = ss.StreamDataset(
        source, *steps, seed=5, shuffle_buffer=20, partitions=PARTS, topology=topology, **options
    )
    size = None if batch is None else scale * batch // topology.size
    return ss.StreamLoader(dataset, batch_size=size, workers=workers, start_method="fork", accumulation=accumulation)


def life(url, folder, number, workers, batches, way):
    """What this rank got in each mode. `way` to resume from: "dcp", "gathered" or "files" of life `number` - 1.

    The finite mode uses another size of batches in every life.
    """
    warnings.filterwarnings("ignore")
    number, workers, batches, rank, ranks = (
        int(number),
        int(workers),
        int(batches),
        dist.get_rank(),
        dist.get_world_size(),
    )
    got = {}
    for mode in MODES:
        loader = made(url, mode, ss.Topology(rank, ranks), workers, scale=1 + number % 2 if mode == "finite" else 1)
        if number:
            resume(loader, Path(folder) / f"{mode}-{number - 1}", way)
        wanted = None if batches == 0 and mode == "finite" else batches + (mode == "accumulated") * (batches % 2 == 0)
        got[mode] = [batch["id"].tolist() for batch in itertools.islice(loader, wanted)]
        save(loader, Path(folder) / f"{mode}-{number}")
        if mode == "mixed":
            got["sources"] = {path: list(astuple(one)) for path, one in loader.sources(over_ranks=True).items()}
        if mode == "packed":
            got["counted"] = loader.counts(over_ranks=True).as_dict()
        loader.close()
    return got


def save(loader, folder):
    """In all three ways; the files are checked to say the same."""
    rank = dist.get_rank()
    folder.mkdir(exist_ok=True)
    state = loader.state_dict()
    dcp.save({"data": ss.ShardedState(loader), "weight": torch.zeros(2)}, checkpoint_id=folder / "dcp")
    gathered = ss.gather_state(state)
    torch.save(state, folder / f"rank-{rank}.pt")
    if rank == 0:
        torch.save(gathered, folder / "gathered.pt")
    dist.barrier()
    assert of_dcp(loader_like(loader), folder) == of_files(folder) == gathered


def loader_like(loader):
    """A fresh holder of the same settings, for DCP to load into."""
    dataset = loader.dataset
    source = str(dataset._store.url) if dataset._mixing is None else dataset._mixing.mixture
    return ss.StreamDataset(
        source, *dataset.steps, seed=5, shuffle_buffer=20, partitions=PARTS, topology=dataset.topology,
        repeat=dataset._repeat, snapshot=dataset._snapshot,
    )  # fmt: skip


def of_files(folder):
    found = sorted(folder.glob("rank-*.pt"))
    return ss.merge_states([torch.load(path, weights_only=True) for path in found])


def of_dcp(holder, folder):
    dcp.load({"data": ss.ShardedState(holder), "weight": torch.zeros(2)}, checkpoint_id=folder / "dcp")
    return {**holder._pending.encode()}


def resume(loader, folder, way):
    if way == "dcp":
        dcp.load({"data": ss.ShardedState(loader)}, checkpoint_id=folder / "dcp")
    elif way == "gathered":
        loader.load_state_dict(torch.load(folder / "gathered.pt", weights_only=True))
    else:
        loader.load_state_dict(of_files(folder))


def third(sample):
    return sample["id"] % 3 == 0


def cursors(url, folder):
    """The partition that this rank holds, as it was saved, and all four as they came back."""
    warnings.filterwarnings("ignore")

    def holder():
        topology = ss.Topology(dist.get_rank(), 4)
        return ss.StreamDataset(url, ss.Filter(third), partitions=4, repeat=True, topology=topology)

    saved, loaded = holder(), holder()
    for _ in itertools.islice(iter(saved), 5):
        pass
    dcp.save({"data": ss.ShardedState(saved)}, checkpoint_id=Path(folder) / "dcp")
    dcp.load({"data": ss.ShardedState(loaded)}, checkpoint_id=Path(folder) / "dcp")
    return [saved.state_dict()["partitions"], loaded.state_dict()["partitions"]]
