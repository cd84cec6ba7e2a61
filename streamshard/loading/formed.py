"""What travels from where batches are formed to where they are handed out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamshard.iteration import Mark
from streamshard.staging.buffers import Buffers


@dataclass(slots=True)
class Formed:
    """A batch, or whatever is handed out at once, and where the partitions that gave it stood after it.

    last: there is no batch, only the marks of the end. buffers: the reused memory that the batch lies in, if it does. rows: of
    the batch, if it was formed of so many items.
    """

    batch: Any
    marks: dict[int, Mark]
    last: bool = False
    buffers: Buffers | None = field(default=None, repr=False)
    rows: int = 1


class Source(Protocol):
    """Where batches come from. Read by one thread; `interrupt`, `acknowledge` and `contents` may come from another."""

    def batches(self) -> Iterator[Formed]:
        """Batches in order, then one `Formed` with ``last``."""

    def interrupt(self) -> None:
        """Make the thread that reads stop waiting, with an error or an end: nothing more is wanted."""

    def close(self) -> None:
        """Let go of everything; called when nobody reads any more."""

    def acknowledge(self, marks: Mapping[int, Mark]) -> None:
        """These places will be the earliest ever asked for."""

    def contents(self) -> dict[str, bytes]:
        """The samples of a contents snapshot at what was acknowledged last; {} unless they are kept."""
