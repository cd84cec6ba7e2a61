"""A `Mixture` being read: its datasets opened, its branches put together in each partition, its parameters kept over lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from streamshard.catalog import load_manifest
from streamshard.errors import StateError, UsageError
from streamshard.iteration import Book, Finished, Kit, open_leaf
from streamshard.order.cursor import MIX, Cursor, Ref, innermost, with_innermost
from streamshard.order.mixture import phases
from streamshard.order.partition import OrderSpec
from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.source import Kept
from streamshard.shard.manifest import Manifest
from streamshard.sources import Mixture, Resolved, Source, changes, plan_of, resolve, resolved_leaves
from streamshard.steps.mixture import BranchCursor, MixtureStage, Rules
from streamshard.steps.pipeline import Needed, StepsPast, open_stages, start_cursor, still_needed, wants_refs
from streamshard.steps.step import Stage, Step, StepContext
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

    @property
    def weighted(self) -> int:
        """How many datasets are ever drawn."""
        return self.mixture.weighted

    def settle(self, slots: int) -> list[Resolved]:
        """The parameters, resolved the first time with a shuffle buffer of `slots`."""
        if not self.versions:
            self.versions = [resolve(self.mixture, slots, self.sizes)]
        return self.versions

    def load(self, saved: list[Resolved], datasets: Mapping[str, str], slots: int, *, allowed: bool) -> None:
        """Take over what a state has. Raises `StateError` for what has changed, unless it may and is `allowed`."""
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
        self.versions = [*saved, resolve(self.mixture, slots, self.sizes, saved[-1])] if found else saved

    def mean_length(self, paths: Sequence[str]) -> int:
        """Tokens of a sample, for phases: by the manifests' lengths, and where those are not known by bytes."""
        manifests = [self.manifests[path] for path in paths]
        samples = sum(manifest.total_samples for manifest in manifests)
        known = all(manifest.total_length for manifest in manifests)
        total = sum(manifest.total_length if known else manifest.total_bytes for manifest in manifests)
        return max(1, total // samples)


@dataclass(frozen=True)
class MixedOrigin:
    """Where partitions get the samples of a mixture from.

    spec: the order, but for what differs by source. epoch: of a finite run; the first one of an endless run.
    """

    mixing: Mixing
    spec: OrderSpec
    epoch: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_books", {})
        for path, leaf in resolved_leaves(self._latest):
            size = self.mixing.sizes[path]
            if leaf["exhausted"] == "stop" and size < self.spec.partitions:
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
        books: dict[str, Book] = self._books  # type: ignore[attr-defined]  # see __post_init__
        if path not in books:
            leaf = dict(resolved_leaves(self._latest))[path]
            spec = replace(self.spec, path=path, buffer=leaf["buffer"], repeat=True)  # places count on over epochs
            access = ShardAccess(self.mixing.stores[path], self.mixing.manifests[path])
            books[path] = Book(spec, [(0, access)], base=leaf["offset"], epochs=_epochs(leaf))
        return books[path]

    def starts(self) -> list[Cursor]:
        """Where the partitions begin."""
        return self._starts(self._latest, self.mixing.mixture, "")

    def _starts(self, resolved: Resolved, mixture: Mixture, prefix: str) -> list[Cursor]:
        paths = [path for path, _ in resolved_leaves(resolved, prefix)]
        owed = phases(plan_of(resolved), self.spec.partitions, self.mixing.mean_length(paths))
        inner = [self._starts_of(source, mixture, prefix) for source in resolved["sources"]]
        names = [source["name"] for source in resolved["sources"]]
        nobody = [False] * len(names)
        return [
            (
                MIX,
                len(self.mixing.versions) - 1,
                0,
                0,
                False,
                _states(map(BranchCursor, names, cursors, credit, nobody)),
            )
            for cursors, credit in zip(zip(*inner, strict=True), owed, strict=True)
        ]

    def _starts_of(self, source: Resolved, mixture: Mixture, prefix: str) -> list[Cursor]:
        described = mixture.sources[source["name"]]
        if isinstance(described, Mixture):
            return self._starts(source["mixture"], described, f"{prefix}{source['name']}/")
        first = self.epoch if self.spec.repeat else self.epoch * (_epochs(source) or 1)
        return [start_cursor(described.steps, (first, 0))] * self.spec.partitions

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
        for source, state in zip(resolved["sources"], _branches(cursor), strict=True):
            described, path = mixture.sources[state.name], prefix + state.name
            if isinstance(described, Mixture):
                inside = place._replace(repeat=source["exhausted"] == "repeat")
                opened = partial(self.open_mixture, source["mixture"], described, f"{path}/", place=inside)
                branches.append(MixtureBranch(opened, path, state.cursor))
            else:
                branches.append(DatasetBranch(self.book(path), described.steps, path, state.cursor, place))
        rules = Rules([source["exhausted"] == "stop" for source in resolved["sources"]], place.repeat)
        parts = self.spec.partitions
        return MixedSource(cursor, branches, plan_of(resolved), rules, length=mixture.tokens_of(), parts=parts)

    def finished(self, cursor: Cursor) -> Finished:
        return Finished(("", 0), [*self._counters(cursor, self.mixing.mixture)])

    def _counters(self, cursor: Cursor, mixture: Mixture) -> Iterator[tuple[str, int]]:
        stopped = cursor[4]
        for state in _branches(cursor):
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
        for state in _branches(cursor):
            source, path = sources[state.name], prefix + state.name
            if "mixture" in source:
                yield from self._drawn(p, state.cursor, source["mixture"], f"{path}/")
                continue
            first = self.epoch if self.spec.repeat else self.epoch * (_epochs(source) or 1)
            epoch, k = innermost(state.cursor)
            before = [self.book(path).epoch(number)[0].turns_before(p) for number in (epoch, first)]
            yield path, Drawn(state.samples, state.tokens, before[0] + k - before[1])

    # ------------------------------------------------------------------------------------------- changed parameters

    def adopted(self, cursor: Cursor) -> Cursor | None:
        if cursor[1] == len(self.mixing.versions) - 1:
            return None
        return self._adopted(cursor, self._latest, self.mixing.mixture, "")

    def _adopted(self, cursor: Cursor, resolved: Resolved, mixture: Mixture, prefix: str) -> Cursor:
        known = {state.name: state for state in _branches(cursor)}
        states = []
        for source in resolved["sources"]:
            name = source["name"]
            described = mixture.sources[name]
            if name not in known:
                start = self._starts_of(source, mixture, prefix)[0]
                states.append(BranchCursor(name, start, 0, done=False))
            elif isinstance(described, Mixture):
                inner = self._adopted(known[name].cursor, source["mixture"], described, f"{prefix}{name}/")
                states.append(known[name]._replace(cursor=inner))
            else:
                states.append(known[name])
        mix, _, tokens, longest, stopped, _ = cursor
        return mix, len(self.mixing.versions) - 1, tokens, longest, stopped, _states(states)


class Place(NamedTuple):
    """Where a branch is opened: in which partition, with what, in a mixture that begins anew by itself or not. slots: of all
    shuffle buffers.
    """

    p: int
    kit: Kit
    repeat: bool
    slots: int


def _states(states: Iterable[BranchCursor]) -> Cursor:
    return tuple(tuple(state) for state in states)


def _branches(cursor: Cursor) -> list[BranchCursor]:
    return [BranchCursor(*state) for state in cursor[-1]]


def _epochs(leaf: Resolved) -> int | None:
    """How many epochs of a dataset are read before it ends; None: for ever."""
    if leaf["exhausted"] == "repeat":
        found: int | None = leaf["max_epochs"]
        return found
    return 1


class DatasetBranch:
    """A dataset in one partition of a mixture, with its steps."""

    def __init__(self, book: Book, steps: Sequence[Step], path: str, cursor: Cursor, place: Place) -> None:
        self._share = book.slots / place.slots
        self.name = path.rpartition("/")[2]
        self._path = path
        self._book = book
        self._steps = steps
        self._place = place
        context = place.kit.context
        self._context = replace(context, prefix=f"{path}:", refs=context.refs or wants_refs(steps), sources=1)
        self.restart(cursor)

    def restart(self, cursor: Cursor) -> None:
        kit = replace(self._place.kit, context=self._context)
        self.source = open_leaf(self._book, self._place.p, innermost(cursor), kit, path=self._path, share=self._share)
        self.stage: Stage = open_stages(self._steps, cursor, self._context, lambda _: self.source)

    def following(self, cursor: Cursor) -> Cursor:
        return with_innermost(cursor, (innermost(cursor)[0] + 1, 0))

    def unread(self, cursor: Cursor) -> int:
        epoch, k = innermost(cursor)
        return int(self._book.epoch(epoch)[0].partition_size(self._place.p)) - int(k)

    def again(self, identities: Sequence[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], Any, Ref]]:
        return StepsPast(self._steps, self.source, self._context).items(identities)

    def ref_of(self, identity: tuple[Any, ...]) -> Ref:
        return self.source.ref_of(identity)

    def owns(self, path: str) -> bool:
        return path == self._path

    def forget(self, cursor: Cursor, needed: Needed) -> None:
        self.source.forget(innermost(cursor), needed | still_needed(self._steps, cursor))


class MixtureBranch:
    """A mixture inside of a mixture, in one partition."""

    def __init__(self, opened: Callable[[Cursor], MixedSource], path: str, cursor: Cursor) -> None:
        self.name = path.rpartition("/")[2]
        self._open = opened
        self._prefix = f"{path}/"
        self.restart(cursor)

    def restart(self, cursor: Cursor) -> None:
        self.source = self._open(cursor)
        self.stage: Stage = self.source

    def following(self, cursor: Cursor) -> Cursor:
        return self.source.following(cursor)

    def unread(self, cursor: Cursor) -> int:
        return self.source.unread(cursor)

    def again(self, identities: Sequence[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], Any, Ref]]:
        stage = self.source.again(identities)
        return ((stage.identity(), item, stage.ref()) for item in stage)

    def ref_of(self, identity: tuple[Any, ...]) -> Ref:
        return self.source.ref_of(identity)

    def owns(self, path: str) -> bool:
        return path.startswith(self._prefix)

    def forget(self, cursor: Cursor, needed: Needed) -> None:
        self.source.forget(cursor, needed)


class MixedSource(MixtureStage):
    """The first stage of a partition of a mixture, with what an iteration asks of it."""

    _branches: Sequence[DatasetBranch | MixtureBranch]

    def open(self) -> None:
        """Request the first blocks of all sources."""
        for branch, done in zip(self._branches, self._mixer.done, strict=True):
            if not done:
                branch.source.open()

    def close(self) -> None:
        """Let go of what was requested and not begun."""
        for branch in self._branches:
            branch.source.close()

    def forget(self, base: Cursor, needed: Needed) -> None:
        """No cursor before `base` will be asked for again, but for the samples `needed`."""
        for branch, state in zip(self._branches, _branches(base), strict=False):  # `base` may be from before a change
            branch.forget(state.cursor, needed)

    def kept(self) -> list[Kept]:
        """What a contents snapshot has of it."""
        return [kept for branch in self._branches for kept in branch.source.kept()]

    def following(self, cursor: Cursor) -> Cursor:
        """Where it begins anew: only what had ended does."""
        mix, version, tokens, longest, _, _ = cursor
        states = [
            state._replace(cursor=branch.following(state.cursor) if state.done else state.cursor, done=False, left=0)
            for branch, state in zip(self._branches, _branches(cursor), strict=True)
        ]
        return mix, version, tokens, longest, False, _states(states)

    def unread(self, cursor: Cursor) -> int:
        """Stored samples of the epoch that come after `cursor`, of all sources that had not ended."""
        states = zip(self._branches, _branches(cursor), strict=True)
        return sum(branch.unread(state.cursor) for branch, state in states if not state.done)
