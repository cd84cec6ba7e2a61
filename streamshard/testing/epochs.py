"""`assert_exact_epochs`: run several epochs, resume from states out of each of them, compare what follows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from streamshard.errors import UsageError
from streamshard.testing.resume import Resumable, ResumeReport, digest, through_msgpack

R = TypeVar("R", bound=Resumable)


def assert_exact_epochs(
    factory: Callable[[], R],
    *,
    epochs: int = 3,
    stops: Collection[int] | None = None,
    set_epoch: Callable[[R, int], None] | None = None,
    close: Callable[[R], None] | None = None,
) -> ResumeReport:
    """Check that a loader resumed from a state out of any epoch gives the rest of that epoch and then the next.

    For any loader with ``state_dict`` and ``load_state_dict``: torchdata's StatefulDataLoader, a tracked DataLoader, a
    StreamLoader, torchdata.nodes' Loader.

    factory: makes a fresh loader, as a restarted job would.
    stops: after how many batches of an epoch to stop, from 1; negative numbers count from its end, so that -1 is one before the
        last. The last batch, and the end of the epoch, are always among them. Default: the middle.
    set_epoch: called with the loader and the number of the epoch before each, for loaders whose epoch a script has to set.
    close: ends a loader that is of no more use.

    States pass through msgpack. Batches are compared by content. Raises AssertionError naming the epoch and the stop.
    """
    whole = factory()
    runs: list[list[bytes]] = []
    states: list[list[dict[str, Any]]] = []
    for epoch in range(epochs + 1):
        _set(set_epoch, whole, epoch)
        states.append([])
        runs.append([])
        for batch in whole:
            runs[-1].append(digest(batch))
            states[-1].append(through_msgpack(whole.state_dict()))
        states[-1].append(through_msgpack(whole.state_dict()))  # of the end
    _close(close, whole)
    resumes = 0
    for epoch in range(epochs):
        length = len(runs[epoch])
        chosen = {max(1, length // 2)} if stops is None else {stop if stop > 0 else length + stop for stop in stops}
        if not all(0 < stop <= length for stop in chosen):
            raise UsageError(f"stops={stops!r}: epoch {epoch} has {length} batches; stop after 1 to {length} of them")
        for stop in sorted(chosen | {length, length + 1}):
            loader = factory()
            loader.load_state_dict(states[epoch][stop - 1])
            ended = stop > length
            if not ended:
                _set(set_epoch, loader, epoch)
                _compare(loader, runs[epoch][stop:], f"epoch {epoch}, resumed after {stop} of {length} batches")
            _set(set_epoch, loader, epoch + 1)
            place = f"epoch {epoch + 1}, resumed {'at the end' if ended else f'after {stop} batches'} of the one before"
            _compare(loader, runs[epoch + 1], place)
            _close(close, loader)
            resumes += 1
    return ResumeReport(sum(map(len, runs)), resumes)


def _compare(loader: Any, expected: list[bytes], place: str) -> None:
    found = [digest(batch) for batch in loader]
    for number, (got, wanted) in enumerate(itertools.zip_longest(found, expected)):
        if got != wanted:
            raise AssertionError(f"{place}: batch {number} differs ({len(found)} batches instead of {len(expected)})")


def _set(set_epoch: Callable[[R, int], None] | None, loader: R, epoch: int) -> None:
    if set_epoch is not None:
        set_epoch(loader, epoch)


def _close(close: Callable[[R], None] | None, loader: R) -> None:
    if close is not None:
        close(loader)
