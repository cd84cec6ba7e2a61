"""Honest counts: tokens that a model computes on, tokens that were written, tokens that it learns from; by source.

They are part of a partition's cursor, and so of every state: what was counted is what was handed out, whatever was killed,
resumed or resharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any

from streamshard.order.cursor import Cursor


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """What has left of one source. Documents count when their first token leaves, or when they are dropped.

    samples: stored samples whose first document has left or was dropped. documents: what came to be packed or batched, one or
    several a sample. real: tokens of documents. loss: those that are labels (a segment's first token is none). split: documents
    cut over several rows. truncated, dropped: documents cut short, left out; and tokens lost by it.
    """

    samples: int = 0
    documents: int = 0
    real: int = 0
    loss: int = 0
    split: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Counts:
    """What has been handed out, in the run so far (with ``repeat=False``: in the epoch).

    rows; physical: their tokens, padding included, which is what a model computes on; sources: the rest, by source (a plain
    dataset is called ""). Everything only grows. Add them up with ``+``.
    """

    rows: int = 0
    physical: int = 0
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        names = sorted({*self.sources, *other.sources})
        nothing = SourceCounts()
        sources = {n: self.sources.get(n, nothing) + other.sources.get(n, nothing) for n in names}
        return Counts(self.rows + other.rows, self.physical + other.physical, sources)

    def as_dict(self) -> dict[str, Any]:
        """Names and numbers, for JSON and logs."""
        return {
            "rows": self.rows, "physical": self.physical,
            "sources": {path: asdict(counts) for path, counts in self.sources.items()},
        }  # fmt: skip

    @property
    def total(self) -> SourceCounts:
        """All sources together."""
        return sum(self.sources.values(), SourceCounts())

    @property
    def real(self) -> int:
        """Tokens without padding: what schedules and progress should run on."""
        return self.total.real

    @property
    def loss(self) -> int:
        """Tokens that a model learns from."""
        return self.total.loss

    @property
    def padding(self) -> float:
        """Share of physical tokens that are padding."""
        return 1 - self.real / self.physical if self.physical else 0.0

    @property
    def truncation(self) -> float:
        """Share of the documents' tokens that were lost, by truncating or dropping."""
        total = self.total
        lost = total.truncated_tokens + total.dropped_tokens
        return lost / (total.real + lost) if lost else 0.0

    @property
    def splitting(self) -> float:
        """Share of documents that were cut over several rows."""
        total = self.total
        return total.split / total.documents if total.documents else 0.0


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """What a mixture has had of a source: samples and tokens that were mixed, stored samples taken up for it, and how many the
    source has.
    """

    samples: int
    tokens: int
    taken: int
    size: int

    @property
    def epochs(self) -> float:
        """How often the source has been read."""
        return self.taken / self.size

    @property
    def repeats(self) -> int:
        """Stored samples that were taken up again."""
        return max(0, self.taken - self.size)


_NAMES = [f.name for f in fields(SourceCounts)]
# Places of a source's numbers in a `Tally`.
SAMPLES, DOCUMENTS, REAL, LOSS, SPLIT, TRUNCATED, TRUNCATED_TOKENS, DROPPED, DROPPED_TOKENS = range(len(_NAMES))


class Tally:
    """Counts as they grow, inside a stage. `frozen` is their form in a cursor."""

    def __init__(self, frozen: Cursor) -> None:
        self._rows, self._physical, sources = frozen
        self._sources: dict[str, list[int]] = {path: list(numbers) for path, *numbers in sources}

    @property
    def rows(self) -> int:
        """That have left."""
        return int(self._rows)

    def row(self, physical: int) -> None:
        """A row has left."""
        self._rows += 1
        self._physical += physical

    def of(self, path: str) -> list[int]:
        """The numbers of a source, to be raised: see the names of their places."""
        numbers = self._sources.get(path)
        if numbers is None:
            numbers = self._sources[path] = [0] * len(_NAMES)
        return numbers

    def drop(self, path: str, tokens: int, *, first: bool) -> None:
        """A document of `tokens` is left out; `first`: the first one of its stored sample."""
        numbers = self.of(path)
        numbers[SAMPLES] += first
        numbers[DOCUMENTS] += 1
        numbers[DROPPED] += 1
        numbers[DROPPED_TOKENS] += tokens

    def merge(self, other: Tally) -> None:
        """What another has counted, too."""
        for path, numbers in other._sources.items():
            mine = self.of(path)
            mine[:] = map(sum, zip(mine, numbers, strict=True))

    def clear(self) -> None:
        """Begin again."""
        self._rows = self._physical = 0
        self._sources = {}

    def frozen(self) -> Cursor:
        """Immutable, safe for JSON, the same for the same counts."""
        return self._rows, self._physical, tuple((path, *numbers) for path, numbers in sorted(self._sources.items()))


NOTHING: Cursor = (0, 0, ())


def thaw(frozen: Cursor) -> Counts:
    """Counts out of a cursor."""
    rows, physical, sources = frozen
    return Counts(rows, physical, {path: SourceCounts(*numbers) for path, *numbers in sources})
