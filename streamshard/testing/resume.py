"""`assert_exact_resume`: stop at every item, resume, compare."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
import numpy as np
import torch


class Resumable(Protocol):
    """What is tested: anything iterable with torch's two state methods (a dataset, a loader)."""

    def __iter__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What was checked: the length of the uninterrupted run and the number of resumes that equalled its rest."""

    items: int
    resumes: int


def assert_exact_resume(
    factory: Callable[[], Resumable], *, items: int | None = None, stops: Iterable[int] | None = None, chain: int = 2
) -> ResumeReport:
    """Check that a run stopped after any item and resumed gives exactly the rest of the uninterrupted run.

    factory: makes a fresh dataset or loader, as a restarted job would.
    items: how many items of the uninterrupted run to look at; needed for endless ones. Default: all.
    stops: after how many items to stop. Default: after every one, and before the first.
    chain: stop and resume this many times in a row at each place (a state made by a resumed run must be as good).

    Without `items`, the state at the end must resume to what the finished run itself gives next: the next epoch.

    Each state passes through msgpack on its way, as a checkpoint on disk would. Items are compared by content: arrays and
    tensors by dtype, shape and bytes. Raises AssertionError naming the stop and the first item that differs.
    """
    finished = factory()
    whole = _digests(finished, items)
    resumes = 0
    if items is None:
        _check_end(factory(), finished)
        resumes += 1
    for stop in range(len(whole) + 1) if stops is None else stops:
        for lives in range(2, chain + 2):
            got, states = _in_lives(factory, len(whole), stop, lives, endless=items is not None)
            resumes += lives - 1
            compared = got[: len(whole)] if items is not None else got  # an endless run may be past the items looked at
            for place, (found, expected) in enumerate(itertools.zip_longest(compared, whole)):
                if found != expected:
                    raise AssertionError(
                        f"stopped after item {stop} and resumed {lives - 1} times: item {place} differs from the "
                        f"uninterrupted run ({len(got)} items against {len(whole)}); the last state was {states[-1]}"
                    )
    return ResumeReport(len(whole), resumes)


def _in_lives(
    factory: Callable[[], Resumable], total: int, stop: int, lives: int, *, endless: bool
) -> tuple[list[bytes], list[dict[str, Any]]]:
    """Digests of a run in several lives, the first `stop` items long, the others one item each but the last."""
    got: list[bytes] = []
    states: list[dict[str, Any]] = [{}]
    for life in range(lives):
        run = factory()
        if life:
            run.load_state_dict(through_msgpack(states[-1]))
        last = life == lives - 1
        wanted = stop if life == 0 else 1
        if last:
            wanted = max(0, total - len(got)) if endless else total + 1
        found = _digests(run, wanted)
        got += found
        states.append(run.state_dict())
        if len(found) < wanted:
            break  # it saw the end, and going on would mean the next epoch
    return got, states


def _check_end(resumed: Resumable, finished: Resumable) -> None:
    resumed.load_state_dict(through_msgpack(finished.state_dict()))
    if _digests(resumed, 1) != _digests(finished, 1):
        raise AssertionError("the state at the end of the run does not resume to what the run itself gives next")


def _digests(run: Iterable[Any], count: int | None) -> list[bytes]:
    return [] if count == 0 else [digest(item) for item in itertools.islice(run, count)]


def through_msgpack(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as it comes back from a checkpoint on disk."""
    back: dict[str, Any] = msgpack.unpackb(msgpack.packb(state), strict_map_key=False)
    return back


def digest(item: Any) -> bytes:
    """A hash of an item's content: maps, lists, arrays, tensors and plain values."""
    hasher = hashlib.blake2b(digest_size=16)
    _feed(hasher, item)
    return hasher.digest()


def _feed(hasher: Any, item: Any) -> None:
    if isinstance(item, torch.Tensor):
        hasher.update(f"tensor {item.dtype} {tuple(item.shape)}".encode())
        hasher.update(item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(item, np.ndarray):
        hasher.update(f"array {item.dtype} {item.shape}".encode())
        hasher.update(np.ascontiguousarray(item).data)
    elif isinstance(item, Mapping):
        hasher.update(f"map {len(item)}".encode())
        for key, value in item.items():
            _feed(hasher, key)
            _feed(hasher, value)
    elif isinstance(item, list | tuple):
        hasher.update(f"list {len(item)}".encode())
        for value in item:
            _feed(hasher, value)
    else:
        hasher.update(f"{type(item).__name__} {item!r}".encode())
