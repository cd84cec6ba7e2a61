"""`StreamTrainer`: Hugging Face's ``Trainer`` on a loader of ours, resumed exactly.

What Trainer does (5.24), and what follows from it:
- It prepares its own DataLoader, which shards a dataset again that is one rank's part already. So it gets our loader as it is.
- It resumes by reading the epoch's batches again and dropping them. So ``ignore_data_skip`` is set, and the loader's state is a
  file in each checkpoint.
- It never asks for the end of an epoch, and counts epochs by steps. So with the last batch of an epoch the state is that of
  its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from streamshard.distributed.gather import gather_state
from streamshard.errors import StateError
from streamshard.loading.positioned import PositionedLoader

STATE_FILE = "streamshard_state.pt"


class StreamTrainer(Trainer):
    """``Trainer(...)`` with ``train_loader=`` instead of a training dataset.

    train_loader: a `StreamLoader`, or a DataLoader passed through `track`. Its batches are micro-batches: the Trainer takes
        ``gradient_accumulation_steps`` of them for a step.

    ``trainer.train(resume_from_checkpoint=...)`` goes on with the next batch, on any number of processes. It raises
    `StateError` for a checkpoint without the state of the loader.
    """

    def __init__(self, *args: Any, train_loader: PositionedLoader, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.ignore_data_skip = True
        train_loader.confirm_by_call()
        self._train = _Train(train_loader)
        self.add_callback(_SaveState(train_loader))

    def get_train_dataloader(self) -> Any:
        """The loader."""
        return self._train

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.train``."""
        path = resume_from_checkpoint
        if path is True:
            path = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]  # theirs
        if path:
            self._train.loader.load_state_dict(_load(Path(path)))
        return super().train(resume_from_checkpoint, *args, **kwargs)


class _Train:
    """What the Trainer iterates. Without ``set_epoch``: the loader knows its epoch."""

    def __init__(self, loader: PositionedLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        if self.loader.in_the_middle:  # the Trainer stopped early, or failed; what was trained on is in the state
            self.loader.load_state_dict(self.loader.state_dict())
        empty = True
        for batch in self.loader:
            empty = False
            yield batch
        if empty:  # the rest of an epoch saved with its last batch; the Trainer would take it for the end of all data
            yield from self.loader

    def __len__(self) -> int:
        return self.loader.full_length()


class _SaveState(TrainerCallback):
    """Tells the loader what was trained on, and adds the state to each checkpoint."""

    def __init__(self, loader: PositionedLoader) -> None:
        self._loader = loader

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """A micro-batch was trained on."""
        self._loader.confirm()
        self._loader.confirm_end()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """So was the last of a step."""
        self.on_substep_end()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  (Trainer's)
        gathered = gather_state(self._loader.state_dict())
        if args.should_save:
            torch.save(gathered, Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE_FILE)


def _load(folder: Path) -> Any:
    path = folder / STATE_FILE
    if not path.exists():
        raise StateError(
            f"{folder} has no {STATE_FILE}: it was saved by another Trainer, or its saving was cut short; resume from a "
            f"checkpoint that StreamTrainer finished"
        )
    return torch.load(path, weights_only=True)
