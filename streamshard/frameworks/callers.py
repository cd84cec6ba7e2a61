"""Who is asking: some trainers treat a loader in ways that its own methods cannot see, and must be told so early."""

from __future__ import annotations

import sys
from collections.abc import Callable

from streamshard.errors import UsageError

_DEPTH = 40  # frames between a trainer's loop and a loader; a look costs microseconds, once an iteration


def nearest(*modules: str) -> str | None:
    """The nearest caller's module among `modules`; None if none of them is near."""
    if modules[0] not in sys.modules:  # the one that is looked for; the others only say that it is not it
        return None
    frame, depth = sys._getframe(1), 0  # noqa: SLF001  (the documented way to look at callers)
    while frame is not None and depth < _DEPTH:
        name = frame.f_globals.get("__name__", "")
        if name in modules:
            return str(name)
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return None


def refuse_one_file_for_all(ranks: Callable[[], int]) -> None:
    """Raise if accelerate asks one of several ranks for its state: it keeps that of rank 0 for all."""
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
