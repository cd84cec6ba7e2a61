"""A `Mixture` being read: its datasets opened, its branches put together in each partition, its parameters kept over lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from streamshard.branches import DatasetBranch, MixedSource, MixtureBranch, Place
from streamshard.catalog import load_manifest
from streamshard.errors import StateError, UsageError
from streamshard.iteration import Book, Finished, Kit
from streamshard.order.cursor import MIX, Cursor, innermost, with_innermost
from streamshard.order.mixture import UNSCALED, phases
from streamshard.order.partition import OrderSpec
from streamshard.prefetch.access import ShardAccess
from streamshard.resolved import Resolved, changes, plan_of, resolve, resolved_leaves
from streamshard.shard.manifest import Manifest
from streamshard.sources import Mixture, Source
from streamshard.steps.mixture import BranchCursor, Rules, branches_of, states_of
from streamshard.steps.pipeline import open_stages, start_cursor
from streamshard.steps.step import StepContext
from streamshard.storage.store import Store


class Drawn(NamedTuple):
    """What a partition has had of one dataset: samples and tokens that were mixed, and stored samples taken up for it."""

    samples: int
    tokens: int
    taken: int


class Mixing:
    """The datasets of `mixture`, by path. Sends no request before one is asked about."""

    def __init__(self, mixture: Mixture, open_source: Callable[[Source], Store]) -> None:
        self.mixture = mixture
        self.leaves = dict(mixture.leaves())
        self.stores = {path: open_source(source) for path, source in self.leaves.items()}
        self.versions: list[Resolved] = []  # of parameters; the last one holds
        self._manifests: dict[str, Manifest] = {}

    @property
    def manifests(self) -> dict[str, Manifest]:
        """By path, read together on first use and then kept."""
        if not self._manifests:
            with ThreadPoolExecutor(min(8, len(self.stores)), thread_name_prefix="streamshard-manifests") as pool:
                found = pool.map(self._manifest, self.stores)
                self._manifests = dict(zip(self.stores, found, strict=True))
        return self._manifests

    def _manifest(self, path: str) -> Manifest:
        manifest, only = load_manifest(self.stores[path]), self.leaves[path].only
        if only is None:
            return manifest
        split = manifest.split
        if split is None or only not in split.values:
            has = "was not written with split_by=" if split is None else f"has {split.field} in {sorted(split.values)}"
            raise UsageError(f"source {path!r} has only={only!r}, and {self.stores[path].url} {has}")
        return manifest.only(only)

    @property
    def datasets(self) -> dict[str, str]:
        """The version of each dataset, by path."""
        return {path: manifest.version for path, manifest in self.manifests.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each dataset."""
        return {path: manifest.total_samples for path, manifest in self.manifests.items()}

    def settle(self, slots: int) -> list[Resolved]:
        """The parameters, resolved the first time with a shuffle buffer of `slots`."""
        if not self.versions:
            self.versions = [resolve(self.mixture, slots, self.sizes)]
        return self.versions

    def loaded(
        self, saved: list[Resolved], datasets: Mapping[str, str], slots: int, *, allowed: bool
    ) -> list[Resolved]:
        """The parameters that hold after loading a state with these; nothing is changed. Raises `StateError` for what differs,
        unless it may and is `allowed`.
        """
        found = changes(saved[-1], self.mixture)
        if found and not allowed:
            raise StateError(
                f"the Mixture is not that of the state: {'; '.join(found)}. Use the same, or pass allow={{'mixture'}} if the "
                f"change is meant"
            )
        for path, version in datasets.items():
            if self.datasets[path] != version:
                raise StateError(
                    f"source {path!r} was saved with version {version} and has version {self.datasets[path]}: in a Mixture a "
                    f"dataset cannot grow during a run; restore the version that was used"
                )
        return [*saved, resolve(self.mixture, slots, self.sizes, saved[-1])] if found else saved

    def mean_length(self, paths: Sequence[str], length: str | None) -> int:
        """Tokens of a stored sample, for phases; 0 if the manifests do not say, or speak of another field."""
        manifests = [self.manifests[path] for path in paths]
        if any(not one.total_length or length not in (None, one.length_field) for one in manifests):
            return 0
        return max(1, sum(one.total_length for one in manifests) // sum(one.total_samples for one in manifests))


class MixedOrigin:
    """Where partitions get the samples of a mixture from.

    spec: the order, but for what differs by source. epoch: of a finite run; the first one of an endless run.
    """

    def __init__(self, mixing: Mixing, spec: OrderSpec, epoch: int) -> None:
        self.mixing = mixing
        self.spec = spec
        self.epoch = epoch
        self._books: dict[str, Book] = {}
        self._check_stops(self._latest, "")

    def _check_stops(self, resolved: Resolved, prefix: str) -> None:
        weights = plan_of(resolved).largest
        for source, weight in zip(resolved["sources"], weights, strict=True):
            path = prefix + source["name"]
            paths = [path]
            if "mixture" in source:
                self._check_stops(source["mixture"], f"{path}/")
                paths = [found for found, _ in resolved_leaves(source["mixture"], f"{path}/")]
            size = sum(self.mixing.sizes[found] for found in paths)
            if weight and source["exhausted"] == "stop" and size < self.spec.partitions:
                raise UsageError(
                    f"source {path!r} has {size} samples for {self.spec.partitions} partitions and exhausted='stop': some "
                    f"partitions would end before they begin. Use 'repeat' or 'drop', or fewer partitions"
                )

    @property
    def _latest(self) -> Resolved:
        return self.mixing.versions[-1]

    @property
    def stripes(self) -> int:
        return self.spec.interleave * len(self.mixing.leaves)

    def book(self, path: str) -> Book:
        """The order of one dataset."""
        books = self._books
        if path not in books:
            leaf = dict(resolved_leaves(self._latest))[path]
            spec = replace(self.spec, path=path, buffer=leaf["buffer"], repeat=True)  # places count on over epochs
            access = ShardAccess(self.mixing.stores[path], self.mixing.manifests[path])
            books[path] = Book(spec, [(0, access)], base=leaf["offset"])
        return books[path]

    def starts(self) -> list[Cursor]:
        """Where the partitions begin."""
        return self._starts(self._latest, self.mixing.mixture, "")

    def _starts(self, resolved: Resolved, mixture: Mixture, prefix: str) -> list[Cursor]:
        paths = [path for path, _ in resolved_leaves(resolved, prefix)]
        mean = self.mixing.mean_length(paths, mixture.length)
        owed = phases(plan_of(resolved), self.spec.partitions, mean or 1)
        inner = [self._starts_of(source, mixture, prefix) for source in resolved["sources"]]
        version, longest = len(self.mixing.versions) - 1, 0 if mean else UNSCALED
        return [
            (MIX, version, 0, longest, False, states_of(map(_with_credit, states, credit)))
            for states, credit in zip(zip(*inner, strict=True), owed, strict=True)
        ]

    def _starts_of(self, source: Resolved, mixture: Mixture, prefix: str) -> list[BranchCursor]:
        """Of one source, in each partition."""
        name, described = source["name"], mixture.sources[source["name"]]
        if isinstance(described, Mixture):
            inside = self._starts(source["mixture"], described, f"{prefix}{name}/")
            return [BranchCursor(name, cursor, 0, done=False) for cursor in inside]
        first = self.epoch if self.spec.repeat else self.epoch * (_epochs(source) or 1)
        state = BranchCursor(name, start_cursor(described.steps, (first, 0)), 0, done=False, first=first)
        return [state] * self.spec.partitions

    # -------------------------------------------------------------------------------------------------- what is read

    def open(self, p: int, cursor: Cursor, kit: Kit) -> MixedSource:
        resolved = self.mixing.versions[cursor[1]]
        slots = sum(leaf["buffer"] for _, leaf in resolved_leaves(resolved))
        return self.open_mixture(resolved, self.mixing.mixture, "", cursor, Place(p, kit, self.spec.repeat, slots))

    def open_mixture(
        self, resolved: Resolved, mixture: Mixture, prefix: str, cursor: Cursor, place: Place
    ) -> MixedSource:
        """A mixture, or one inside of it, in one partition."""
        branches: list[DatasetBranch | MixtureBranch] = []
        for source, state in zip(resolved["sources"], branches_of(cursor), strict=True):
            described, path = mixture.sources[state.name], prefix + state.name
            if isinstance(described, Mixture):
                inside = place._replace(repeat=source["exhausted"] == "repeat")
                opened = partial(self.open_mixture, source["mixture"], described, f"{path}/", place=inside)
                branches.append(MixtureBranch(opened, path, state.cursor))
            else:
                branches.append(DatasetBranch(self.book(path), described.steps, path, state, _epochs(source), place))
        rules = Rules([source["exhausted"] == "stop" for source in resolved["sources"]], place.repeat)
        parts = self.spec.partitions
        return MixedSource(cursor, branches, plan_of(resolved), rules, length=mixture.tokens_of(), parts=parts)

    def finished(self, cursor: Cursor) -> Finished:
        return Finished(("", 0), [*self._counters(cursor, self.mixing.mixture)])

    def _counters(self, cursor: Cursor, mixture: Mixture) -> Iterator[tuple[str, int]]:
        stopped = cursor[4]
        for state in branches_of(cursor):
            described = mixture.sources[state.name]
            if isinstance(described, Mixture):
                found = self._counters(state.cursor, described)
            else:
                context = StepContext(self.spec.seed, self.spec.partitions)
                found = open_stages(described.steps, state.cursor, context, Finished).counters()
            yield from ((f"{state.name}: {name}", count) for name, count in found)
            if stopped:
                yield f"{state.name}: samples left when the mixture stopped", state.left

    def drawn(self, p: int, cursor: Cursor) -> dict[str, Drawn]:
        """What partition `p` has had of each dataset at `cursor`."""
        return dict(self._drawn(p, cursor, self._latest, ""))

    def _drawn(self, p: int, cursor: Cursor, resolved: Resolved, prefix: str) -> Iterator[tuple[str, Drawn]]:
        sources = {source["name"]: source for source in resolved["sources"]}
        for state in branches_of(cursor):
            source, path = sources[state.name], prefix + state.name
            if "mixture" in source:
                yield from self._drawn(p, state.cursor, source["mixture"], f"{path}/")
                continue
            first = self.epoch if self.spec.repeat else state.first
            epoch, k = innermost(state.cursor)
            before = [self.book(path).epoch(number)[0].turns_before(p) for number in (epoch, first)]
            yield path, Drawn(state.samples, state.tokens, before[0] + k - before[1])

    # ------------------------------------------------------------------------------------------- changed parameters

    def adopted(self, p: int, cursor: Cursor) -> Cursor | None:
        if cursor[1] == len(self.mixing.versions) - 1:
            return None
        return self._adopted(p, cursor, self._latest, self.mixing.mixture, "")

    def _adopted(self, p: int, cursor: Cursor, resolved: Resolved, mixture: Mixture, prefix: str) -> Cursor:
        known = {state.name: state for state in branches_of(cursor)}
        states = []
        for source in resolved["sources"]:
            name = source["name"]
            described = mixture.sources[name]
            if name not in known:
                states.append(self._starts_of(source, mixture, prefix)[p])
            elif isinstance(described, Mixture):
                inner = self._adopted(p, known[name].cursor, source["mixture"], described, f"{prefix}{name}/")
                states.append(known[name]._replace(cursor=inner))
            else:
                states.append(_allowed_on(known[name], _epochs(source)))
        mix, _, tokens, longest, stopped, _ = cursor
        return mix, len(self.mixing.versions) - 1, tokens, longest, stopped, states_of(states)


def _with_credit(state: BranchCursor, credit: int) -> BranchCursor:
    return state._replace(credit=credit)


def _allowed_on(state: BranchCursor, epochs: int | None) -> BranchCursor:
    """A dataset that had ended goes on if it may now be read for more epochs."""
    epoch, _ = innermost(state.cursor)
    if state.done and (epochs is None or epoch < state.first + epochs - 1):
        return state._replace(done=False, cursor=with_innermost(state.cursor, (epoch + 1, 0)))
    return state


def _epochs(leaf: Resolved) -> int | None:
    """How many epochs of a dataset are read before it ends; None: for ever."""
    if leaf["exhausted"] == "repeat":
        found: int | None = leaf["max_epochs"]
        return found
    return 1
