"""A Lightning training as a process of its own: logs the ids of each batch it trains on, checkpoints, and can die at a batch.

python -m tests.frameworks.train_lightning DATA FOLDER '{"ranks": 2, "die_after": 5, ...}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import streamshard as ss
from streamshard.frameworks.lightning import LightningData


def even(item):
    return item["id"] % 2 == 0


def only_id(item):
    return {"id": item["id"]}


class Model(pl.LightningModule):
    def __init__(self, folder: Path, die_after: int | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder, self.die_after = folder, die_after
        self.trained = 0

    def training_step(self, batch):
        self.folder.mkdir(exist_ok=True, parents=True)
        with open(self.folder / f"ids-{self.global_rank}.jsonl", "a") as log:
            log.write(json.dumps([self.current_epoch, self.global_step, batch["id"].tolist()]) + "\n")
        return self.layer(batch["id"].float()[:, None]).mean()

    def on_train_batch_start(self, *_):
        if self.trained == self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        self.trained += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)


def main(directory: str, folder: str, options: dict) -> None:
    steps = (ss.Filter(even), ss.Map(only_id)) if options.get("filter") else (ss.Map(only_id),)
    dataset = ss.StreamDataset(
        directory, *steps, partitions=12, shuffle_buffer=9, seed=5, repeat=options.get("repeat", False)
    )
    workers, size = options.get("workers", 0), options.get("batch_size", 4)
    if options.get("torch_loader"):
        loader = DataLoader(dataset, batch_size=size, num_workers=workers)
    else:
        loader = ss.StreamLoader(dataset, batch_size=size, workers=workers)
    checkpoint = ModelCheckpoint(
        dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=options.get("every", 1), save_last=True,
        save_on_train_epoch_end=options.get("at_epoch_end"),
    )  # fmt: skip
    ranks = options.get("ranks", 1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, max_epochs=options.get("epochs", 3), max_steps=options.get("max_steps", -1),
        limit_train_batches=options.get("limit"), logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[checkpoint], strategy=DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto",
    )  # fmt: skip
    model = Model(Path(folder), options.get("die_after"))
    last = options.get("resume")
    trainer.fit(model, datamodule=LightningData(loader), ckpt_path=last)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
