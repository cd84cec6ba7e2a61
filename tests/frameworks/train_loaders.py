"""A loop over one of torch's loaders as a process of its own, saving after every batch; it can die at a batch."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchdata.nodes import IterableWrapper, Loader
from torchdata.stateful_dataloader import StatefulDataLoader

import streamshard as ss


def as_list(items):
    return [item["id"] for item in items]


def loader_of(kind: str, directory: str, workers: int):
    dataset = ss.StreamDataset(directory, partitions=48, shuffle_buffer=9, seed=5)
    options = {"batch_size": 4, "collate_fn": as_list, "num_workers": workers}
    if kind == "track":
        return ss.track(DataLoader(dataset, **options))
    if kind == "stateful":
        return StatefulDataLoader(dataset, **options)
    return Loader(IterableWrapper(ss.StreamLoader(dataset, batch_size=4, collate=as_list, workers=workers)))


def main(directory: str, folder: str, options: dict) -> None:
    loader = loader_of(options["kind"], directory, options["workers"])
    if "resume" in options:
        loader.load_state_dict(torch.load(options["resume"], weights_only=True))
    log, saved = Path(folder) / "ids.jsonl", Path(folder) / "state.pt"
    for count, batch in enumerate(loader, 1):
        with open(log, "a") as file:
            file.write(json.dumps(batch) + "\n")
        torch.save(loader.state_dict(), saved.with_suffix(".new"))
        saved.with_suffix(".new").rename(saved)
        if count == options.get("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
