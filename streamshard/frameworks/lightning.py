"""`LightningData`: a loader as a Lightning data module that is checkpointed exactly.

What Lightning does with a loader, and what follows from it (2.6):
- Without a length it takes one batch ahead of the one it trains on, with a length it does not. So a batch counts when
  Lightning says that it has been trained on, which a callback hears.
- With a length it never asks for the end of an epoch. So the loader finds it with the last batch, and the callback
  confirms both at once.
- It saves only rank 0's copy of the state. So the state that it gets is that of all ranks.
- It does not restore a loader's state from a checkpoint of an epoch's end. So the state is the data module's.
- A pass that it cut short (``limit_train_batches``, ``max_steps``) is begun anew with the next epoch. So a new pass goes on
  where the training stopped: with ``repeat=True`` the stream would begin again otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader

from streamshard.distributed.gather import gather_state
from streamshard.frameworks.track import track
from streamshard.loading.positioned import PositionedLoader
from streamshard.state import State


class LightningData(LightningDataModule):
    """Hand it to ``trainer.fit(model, datamodule=LightningData(loader), ckpt_path=...)``; nothing else is needed.

    loader: a `StreamLoader`, or a torch DataLoader over a `StreamDataset`, which is tracked.
    validation: what ``val_dataloader()`` returns; its state is not saved.

    The next batch after a resume is the one after the last that was trained on, whatever Lightning has taken ahead, on any
    number of ranks. Checkpoints must be saved on all ranks at once, as ``trainer.save_checkpoint`` and ``ModelCheckpoint`` do.
    """

    def __init__(self, loader: PositionedLoader | DataLoader[Any], validation: Any = None) -> None:
        super().__init__()
        self.loader = loader if isinstance(loader, PositionedLoader) else track(loader)
        self.loader.confirm_by_call()
        self._validation = validation
        self._train = _Train(self.loader)

    def setup(self, stage: str) -> None:
        """Called by Lightning; puts the callback first, so that it runs before those that save."""
        if stage == "fit" and self.trainer is not None:
            callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
            callbacks[:] = [_Confirm(self.loader), *(found for found in callbacks if not isinstance(found, _Confirm))]

    def train_dataloader(self) -> Any:
        """What Lightning iterates."""
        return self._train

    def state_dict(self) -> State:
        """The state of all ranks after the last batch trained on; Lightning puts it into its checkpoint."""
        return gather_state(self.loader.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What Lightning calls with what it finds in a checkpoint."""
        self.loader.load_state_dict(state_dict)

    def val_dataloader(self) -> Any:
        """What was passed as `validation`."""
        return [] if self._validation is None else self._validation


class _Train:
    """What Lightning iterates."""

    def __init__(self, loader: PositionedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        if loader.in_the_middle:
            loader.load_state_dict(loader.state_dict())
        return iter(loader)

    def __len__(self) -> int:
        # Lightning asks once and takes the answer for every epoch. The first after a resume on other ranks can be another.
        length, full = len(self._loader), self._loader.full_length()
        if length != full:
            raise TypeError(
                f"this epoch has {length} batches in all, begun on other ranks or workers; the next have {full}"
            )
        return length


class _Confirm(Callback):
    """Tells the loader which batches were trained on."""

    def __init__(self, loader: PositionedLoader) -> None:
        self.loader = loader

    def on_train_batch_end(self, *_: Any) -> None:
        self.loader.confirm()
        self.loader.confirm_end()  # with its last batch an epoch is over for Lightning, also when it is resumed from there
