"""A training with Hugging Face's Trainer as a process of its own; see `train_lightning`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import TrainingArguments

import streamshard as ss
from streamshard.frameworks.transformers import StreamTrainer


def even(item):
    return item["id"] % 2 == 0


def only_id(item):
    return {"ids": item["id"]}


class Model(torch.nn.Module):
    def __init__(self, folder: Path, die_after: int | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder, self.die_after, self.trained = folder, die_after, 0

    def forward(self, ids):
        if self.trained == self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        self.trained += 1
        with open(self.folder / f"ids-{os.environ.get('RANK', '0')}.jsonl", "a") as log:
            log.write(json.dumps(ids.tolist()) + "\n")
        return {"loss": self.layer(ids.float()[:, None]).mean() * 0}


def main(directory: str, folder: str, options: dict) -> None:
    steps = (ss.Filter(even), ss.Map(only_id)) if options.get("filter") else (ss.Map(only_id),)
    repeat = options.get("repeat", False)
    dataset = ss.StreamDataset(directory, *steps, partitions=12, shuffle_buffer=9, seed=5, repeat=repeat)
    loader = ss.StreamLoader(dataset, batch_size=4)
    Path(folder).mkdir(parents=True, exist_ok=True)
    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=options.get("epochs", 2),
        max_steps=options.get("max_steps", -1), save_steps=options.get("every", 1), save_strategy="steps",
        logging_strategy="no", gradient_accumulation_steps=options.get("accumulation", 1),
    )  # fmt: skip
    model = Model(Path(folder), options.get("die_after"))
    trainer = StreamTrainer(model, arguments, train_loader=loader)
    trainer.train(resume_from_checkpoint=options.get("resume"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
