"""What a contender is: a writer of its own format, a loader over it, and, where it can, a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.corpora import Corpus
from benchmarks.peers.place import Place

BATCH = 32


class Contender(Protocol):
    """A module of this package. `REMOTE` says whether it reads from S3, `RESUMES` whether it has a state of its own,
    `DATA` which contender has written what it reads.
    """

    DATA: str
    PACKAGE: str
    REMOTE: bool
    RESUMES: bool

    def write(self, samples: Iterator[dict], directory: Path, corpus: Corpus) -> None:
        """The corpus in the library's format, shards of about 64 MB."""

    def load(self, place: Place, corpus: Corpus, workers: int, seed: int) -> Iterable[list[dict]]:
        """One shuffled epoch in batches of `BATCH`."""

    def state(self, loader: Any, iterator: Any) -> Any:
        """The state in the middle of an epoch."""

    def resume(self, loader: Any, state: Any) -> Iterator[list[dict]]:
        """A fresh loader going on from `state`."""


def as_list(items: list[dict]) -> list[dict]:
    """Collation that leaves samples as they are: ragged tokens cannot be stacked, and all contenders do the same."""
    return items


def state(loader: Any, iterator: Any) -> Any:  # noqa: ARG001  (all alike)
    """Of a loader that has it itself."""
    return loader.state_dict()


def resume(loader: Any, state: Any) -> Iterator[list[dict]]:
    """A loader that takes its own state."""
    loader.load_state_dict(state)
    return iter(loader)
