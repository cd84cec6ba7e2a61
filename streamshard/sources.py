"""`Mixture` and `Source`: what a dataset reads when it reads several. Descriptions only; `mixing.py` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any

from streamshard.errors import UsageError
from streamshard.order.mixture import Plan, integer_weights
from streamshard.steps.contract import Length
from streamshard.steps.pipeline import BATCHING, check_steps
from streamshard.steps.step import Step

_EXHAUSTED = ("repeat", "stop", "drop")
_UNITS = ("tokens", "samples")

WeightsGiven = Mapping[str, float] | Sequence[float]


@dataclass(frozen=True, init=False)
class Source:
    """A dataset in a mixture, with steps of its own, applied before it is mixed.

    only: of a dataset that was written with ``split_by=``, only the shards with this value of the field.
    storage_options: of this source; default those of the `StreamDataset`.
    """

    url: str
    steps: tuple[Step, ...]
    only: str | None
    storage_options: Mapping[str, Any] | None

    def __init__(
        self, url: str, *steps: Step, only: str | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        check_steps(steps)
        if only is not None and not isinstance(only, str):
            raise UsageError(f"Source(only={only!r}): pass a value of the field that the dataset was split by, a str")
        object.__setattr__(self, "only", only)
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "storage_options", storage_options)


class Mixture:
    """Several sources in exact proportions, everywhere and at every moment.

    sources: name -> URL, `Source` with steps of its own, or another `Mixture`.
    weights: name -> share, or shares in the order of the sources; any positive numbers. 0 parks a source: it keeps its place.
    unit: what is divided, ``"tokens"`` or ``"samples"``. Tokens are those of the samples that leave the source's own steps.
    exhausted: what happens when a source has given all it has, for all sources or by name. ``"repeat"``: it begins its next
        epoch, in another order. ``"drop"``: it leaves, and the others share its part. ``"stop"``: the mixture ends.
    max_epochs: how often a source is read before it leaves, with ``"repeat"``; for all sources or by name.
    schedule: ``[(tokens, weights), ...]``: other weights from so many tokens of the mixture on. Each partition switches when
        its own tokens reach its share of them.
    length: the field that has a sample's tokens, or their number; default ``input_ids`` or ``tokens``, as for `Pack`.

    Raises `UsageError` for weights that are negative, all zero, or of unknown sources, and for schedules out of order.
    Immutable. docs/mixture.md has the guarantees.
    """

    def __init__(
        self,
        sources: Mapping[str, str | Source | Mixture],
        weights: WeightsGiven | None = None,
        *,
        unit: str = "tokens",
        exhausted: str | Mapping[str, str] = "repeat",
        max_epochs: int | Mapping[str, int] | None = None,
        schedule: Sequence[tuple[int, WeightsGiven]] = (),
        length: str | None = None,
    ) -> None:
        _check_sources(sources)
        self.sources: dict[str, Source | Mixture] = {
            name: source if isinstance(source, Source | Mixture) else Source(source) for name, source in sources.items()
        }
        if unit not in _UNITS:
            raise UsageError(f"Mixture(unit={unit!r}): choose one of {', '.join(map(repr, _UNITS))}")
        if length is not None and not isinstance(length, str):
            raise UsageError(f"Mixture(length={length!r}): pass the name of a field")
        self.unit = unit
        self.length = length
        self.exhausted = self._by_name("exhausted", exhausted, "repeat")
        for name, policy in self.exhausted.items():
            if policy not in _EXHAUSTED:
                raise UsageError(
                    f"Mixture(exhausted=...): {policy!r} for source {name!r}; choose one of {', '.join(map(repr, _EXHAUSTED))}"
                )
        self.max_epochs = self._by_name("max_epochs", max_epochs, None)
        self._check_max_epochs()
        self.plan = self._plan(weights, schedule)
        for path, source in self.leaves() if unit == "tokens" else ():
            batching = [step.label for step in source.steps if step.fingerprint()["step"] in BATCHING]
            if batching:
                raise UsageError(
                    f"Mixture: source {path!r} gives batches, by {batching[0]}, and tokens of batches are not counted: put it "
                    f"behind the mixture, or mix with unit='samples'"
                )

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.sources)})"

    def _by_name(self, argument: str, given: Any, default: Any) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            return dict.fromkeys(self.sources, default if given is None else given)
        self._check_names(argument, given)
        return {name: given.get(name, default) for name in self.sources}

    def _check_names(self, argument: str, given: Mapping[str, Any]) -> None:
        unknown = [name for name in given if name not in self.sources]
        if unknown:
            raise UsageError(
                f"Mixture({argument}=...): no source is called {unknown[0]!r}; there are {[*self.sources]}"
            )

    def _check_max_epochs(self) -> None:
        for name, most in self.max_epochs.items():
            if most is None:
                continue
            if type(most) is not int or most < 1:
                raise UsageError(f"Mixture(max_epochs=...): {most!r} for source {name!r}; pass an int >= 1")
            if isinstance(self.sources[name], Mixture):
                raise UsageError(
                    f"Mixture(max_epochs=...): source {name!r} is a mixture, which has no epochs of its own; give them to its "
                    f"sources"
                )
            if self.exhausted[name] != "repeat":
                raise UsageError(
                    f"Mixture(max_epochs=...): source {name!r} has exhausted={self.exhausted[name]!r}, which reads it once; "
                    f"leave one of the two out"
                )

    def _plan(self, weights: WeightsGiven | None, schedule: Sequence[tuple[int, WeightsGiven]]) -> Plan:
        entries = [(0, weights)] if weights is not None else []
        if not isinstance(schedule, Sequence):
            raise UsageError(f"Mixture(schedule={schedule!r}): pass a list of (tokens, weights) pairs")
        for entry in schedule:
            if not isinstance(entry, Sequence) or len(entry) != 2 or type(entry[0]) is not int or entry[0] < 0:
                raise UsageError(f"Mixture(schedule=...): {entry!r}; pass (tokens, weights) pairs, tokens an int >= 0")
            entries.append((entry[0], entry[1]))
        starts = [start for start, _ in entries]
        if starts[:1] != [0]:
            raise UsageError("Mixture: pass weights=, or a schedule= that begins at 0 tokens")
        if any(later <= earlier for earlier, later in pairwise(starts)):
            raise UsageError(f"Mixture(schedule=...): the token counts {starts} must rise")
        segments = tuple((start, integer_weights(self._weights(given))) for start, given in entries)
        return Plan(segments, tokens=self.unit == "tokens")

    def _weights(self, given: WeightsGiven) -> list[float]:
        if isinstance(given, Mapping):
            self._check_names("weights", given)
            absent = [name for name in self.sources if name not in given]
            if absent:
                raise UsageError(f"Mixture(weights=...): source {absent[0]!r} has none; pass 0 to park it")
            given = [given[name] for name in self.sources]
        if not isinstance(given, Sequence) or len(given) != len(self.sources):
            raise UsageError(f"Mixture(weights={given!r}): pass one for each of {[*self.sources]}")
        values: list[Any] = [*given]
        for name, weight in zip(self.sources, values, strict=True):
            if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 <= float(weight) < float("inf"):
                raise UsageError(f"Mixture(weights=...): {weight!r} for source {name!r}; pass a number >= 0")
        if not any(given):
            raise UsageError(f"Mixture(weights={[*given]}): all are 0, so nothing would be read")
        return [*given]

    @property
    def never_ends(self) -> bool:
        """Whether some source goes on for ever and none ends the mixture."""
        weighted = [name for name, weight in zip(self.sources, self.plan.largest, strict=True) if weight]
        endless = {name: self._endless(name) for name in weighted}
        if any(self.exhausted[name] == "stop" and not endless[name] for name in weighted):
            return False
        return any(endless.values())

    def _endless(self, name: str) -> bool:
        """Whether a source never ends."""
        source, repeated = self.sources[name], self.exhausted[name] == "repeat"
        if isinstance(source, Mixture):
            return repeated or source.never_ends
        return repeated and self.max_epochs[name] is None

    @property
    def weighted(self) -> int:
        """How many datasets are drawn again and again for ever: those that last; all, if none does."""
        drawn = [name for name, weight in zip(self.sources, self.plan.segments[-1][1], strict=True) if weight]
        lasting = [name for name in drawn if self._endless(name)] or drawn
        found = [self.sources[name] for name in lasting]
        return sum(source.weighted if isinstance(source, Mixture) else 1 for source in found)

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Source]]:
        """(path, source) of every dataset in it, also in nested mixtures, in the order of listing."""
        for name, source in self.sources.items():
            if isinstance(source, Mixture):
                yield from source.leaves(f"{prefix}{name}/")
            else:
                yield prefix + name, source

    def tokens_of(self) -> Callable[[Any], int]:
        """A function that says how many tokens an item has; 0 where that is not known and does not matter."""
        return Length(self.length, needed=self.unit == "tokens" or len(self.plan.segments) > 1)


def _check_sources(sources: object) -> None:
    if not isinstance(sources, Mapping) or not sources:
        raise UsageError(f"Mixture({sources!r}): pass a mapping of names to URLs, Sources or Mixtures")
    for name, source in sources.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise UsageError(f"Mixture: a source is called {name!r}; pass text without '/'")
        if not isinstance(source, str | Source | Mixture):
            cure = "a StreamDataset has an order of its own: pass its URL, with steps as Source(url, step, ...)"
            raise UsageError(f"Mixture: source {name!r} is a {type(source).__name__}; {cure}")
