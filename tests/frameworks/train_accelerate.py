"""A training with Hugging Face accelerate as a process of its own; see `train_lightning`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

import streamshard as ss


def as_tensor(items):
    return torch.tensor([item["id"] for item in items])


def dataset_of(directory: str, topology=None) -> ss.StreamDataset:
    return ss.StreamDataset(directory, partitions=12, shuffle_buffer=9, seed=5, topology=topology)


def log(folder: str, rank: int, entry: object) -> None:
    with open(Path(folder) / f"ids-{rank}.jsonl", "a") as file:
        file.write(json.dumps(entry) + "\n")


def train(directory: str, folder: str, options: dict) -> None:
    """Trains two epochs, saving after every batch."""
    accelerator = Accelerator(cpu=True)
    loader = ss.StreamLoader(dataset_of(directory), batch_size=3, collate=as_tensor)
    accelerator.register_for_checkpointing(ss.GatheredState(loader))
    if "resume" in options:
        accelerator.load_state(options["resume"])
    steps = 0
    while loader.dataset.epoch < 2:
        for batch in loader:
            log(folder, accelerator.process_index, batch.tolist())
            steps += 1
            accelerator.save_state(Path(folder) / "saved")
            if steps == options.get("die_after"):
                os.kill(os.getpid(), signal.SIGKILL)


def prepare(directory: str, folder: str, options: dict) -> None:
    """What `prepare` makes of a DataLoader over a dataset: the ids, or the error."""
    for dispatch in (False, True):
        for workers in (0, 1):
            configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
            accelerator = Accelerator(cpu=True, dataloader_config=configuration)
            topology = ss.Topology(0, 1) if options.get("everything") else None
            loader = DataLoader(
                dataset_of(directory, topology), batch_size=3, collate_fn=as_tensor, num_workers=workers
            )
            try:
                found = [batch.tolist() for batch in accelerator.prepare(loader)]
            except ss.UsageError as error:
                found = str(error)
            log(folder, accelerator.process_index, [dispatch, workers, found])


if __name__ == "__main__":
    asked = json.loads(sys.argv[3])
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    {"train": train, "prepare": prepare}[asked["kind"]](sys.argv[1], sys.argv[2], asked)
