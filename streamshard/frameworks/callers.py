"""Who is asking: some trainers treat a loader in ways that its own methods cannot see, and must be told so early."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from streamshard.errors import UsageError

_DEPTH = 40  # frames between a trainer's loop and a loader; a look costs microseconds, once an iteration


def nearest(*modules: str, depth: int = _DEPTH) -> str | None:
    """The nearest caller's module among `modules`, at most so many frames away; None if none of them is near."""
    frame = _frame(modules, depth)
    return None if frame is None else str(frame.f_globals["__name__"])


def trainer_trains() -> bool:
    """Whether Hugging Face's Trainer asks for training, not for an evaluation."""
    frame = _frame(("transformers.trainer",), _DEPTH)
    return frame is not None and "eval" not in frame.f_code.co_name and "predict" not in frame.f_code.co_name


def _frame(modules: tuple[str, ...], depth: int) -> FrameType | None:
    if not any(module in sys.modules for module in modules):
        return None
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001  (the documented way to look at callers)
    while frame is not None and depth > 0:
        if frame.f_globals.get("__name__") in modules:
            return frame
        frame, depth = frame.f_back, depth - 1
    return None


def lightning_trains() -> bool:
    """Whether Lightning's own data fetcher asks, for its training loop: not a hook of the user's, nor an evaluation."""
    if nearest(*_lightning("loops.fetchers", "utilities.combined_loader"), depth=8) is None:
        return False
    trains, evaluates = (
        ("loops.fit_loop", "loops.training_epoch_loop"),
        ("loops.evaluation_loop", "loops.prediction_loop"),
    )
    return nearest(*_lightning(*trains, *evaluates)) in _lightning(*trains)


def _lightning(*names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for package in ("lightning.pytorch", "pytorch_lightning") for name in names)


def refuse_bare_dcp(name: str) -> None:
    """Raise if torch.distributed.checkpoint asks for a state, itself or through an object of the user's: of what all ranks have
    under the same key it keeps one. `ShardedState` and StatefulDataLoader may ask, and what is far away.
    """
    modules = tuple(f"torch.distributed.checkpoint.state_dict_{verb}" for verb in ("saver", "loader"))
    others = "streamshard.distributed.sharded", "torchdata.stateful_dataloader.stateful_dataloader"
    if modules[0] in sys.modules and nearest(*modules, *others, depth=6) in modules:
        raise UsageError(
            f"torch.distributed.checkpoint would take the state of this {name} apart, and mix those of the ranks: pass "
            f"ShardedState({'dataset' if name.endswith('Dataset') else 'loader'}), from streamshard, to dcp.save and dcp.load"
        )


def refuse_one_file_for_all(ranks: Callable[[], int]) -> None:
    """Raise if accelerate asks one of several ranks for its state: it keeps that of rank 0 for all."""
    if "accelerate.checkpointing" not in sys.modules:  # `state_dict()` comes here after every batch of some loops
        return
    asks = nearest("accelerate.checkpointing", "streamshard.distributed.gather")
    if asks == "accelerate.checkpointing" and ranks() > 1:
        raise UsageError(
            "accelerate writes one state for all ranks, that of rank 0: the others could not go on. Register "
            "GatheredState(loader), from streamshard, instead of the loader"
        )


def shards_again(ranks: Callable[[], int]) -> bool:
    """Whether accelerate's own loader asks; raises if it would shard what is one rank's part already."""
    if nearest("accelerate.data_loader") is None:
        return False
    count = ranks()
    if count > 1:
        raise UsageError(
            f"accelerator.prepare() shards a dataset that is already one of {count} ranks' parts: {count - 1} of every {count} "
            f"samples would never be seen. Do not prepare the DataLoader: use StreamLoader(dataset, ..., "
            f"device=accelerator.device), or track(DataLoader(...)), and register "
            f"GatheredState(loader) for checkpointing. (With topology=Topology(0, 1) every rank reads everything and "
            f"accelerate may divide it)"
        )
    return True
