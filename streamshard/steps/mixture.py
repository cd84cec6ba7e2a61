"""The first stage of a partition that mixes sources: who gives the next sample is `order.mixture`'s, this hands it out.

A source in a partition is a *branch*: steps of its own over a first stage of its own, which may be a mixture. The cursor is

    ("mix", version, tokens, longest draw, stopped, (branch, ...))
    a branch: (name, cursor, credit, done, samples, tokens, left, first)

with what it has given so far beside where it stands; `first` is the epoch with which a dataset began, which may be read for
several before it ends, and `left` is what it had not given when another source ended the mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from streamshard.errors import DataError
from streamshard.order.cursor import MIX, Cursor, Ref, innermost
from streamshard.order.mixture import Mixer, Plan
from streamshard.steps.step import Stage

_END = object()


class BranchCursor(NamedTuple):
    """Where a branch stands, and what it has given."""

    name: str
    cursor: Cursor
    credit: int
    done: bool
    samples: int = 0
    tokens: int = 0
    left: int = 0
    first: int = 0


def states_of(states: Iterable[BranchCursor]) -> Cursor:
    """Branches as the last element of a mixture's cursor."""
    return tuple(tuple(state) for state in states)


def branches_of(cursor: Cursor) -> list[BranchCursor]:
    """The branches in a mixture's cursor."""
    return [BranchCursor(*state) for state in cursor[-1]]


def branches_in(cursor: Cursor, prefix: str = "") -> Iterator[tuple[str, BranchCursor]]:
    """(path, branch) of every dataset in a mixture's cursor, nested mixtures included."""
    for state in branches_of(cursor):
        inner = innermost(state.cursor)
        if inner[0] == MIX:
            yield from branches_in(inner, f"{prefix}{state.name}/")
        else:
            yield prefix + state.name, state


def epochs_in(cursor: Cursor) -> list[int]:
    """The epochs in which the datasets of a source's cursor are."""
    if cursor[0] == MIX:
        return [innermost(state.cursor)[0] for _, state in branches_in(cursor)]
    return [cursor[0]]


class Branch(Protocol):
    """A source at work in one partition."""

    name: str
    stage: Stage
    first: int

    def restart(self, cursor: Cursor) -> None:
        """Go on at `cursor`, where the source begins anew."""

    def following(self, cursor: Cursor) -> Cursor:
        """Where a source begins anew that ended at `cursor`."""

    def unread(self, cursor: Cursor) -> int:
        """Stored samples of the epoch that come after `cursor`."""

    def again(self, identities: Sequence[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], Any, Ref]]:
        """(identity, item) of items that it has given before."""

    def ref_of(self, identity: tuple[Any, ...]) -> Ref:
        """The stored sample of an identity."""

    def owns(self, path: str) -> bool:
        """Whether samples of the source `path` come through here."""


class Rules(NamedTuple):
    """What a mixture was asked for, besides weights: which sources end it when they end; whether it begins anew by itself."""

    stops: Sequence[bool]
    repeat: bool


class MixtureStage:
    """See the module. length: tokens of an item. parts: P."""

    def __init__(
        self,
        cursor: Cursor,
        branches: Sequence[Branch],
        plan: Plan,
        rules: Rules,
        *,
        length: Callable[[Any], int],
        parts: int,
    ) -> None:
        _, self._version, tokens, longest, self._stopped, _ = cursor
        states = branches_of(cursor)
        self._branches: Sequence[Branch] = branches
        self._rules = rules
        self._length = length
        self._parts = parts
        self._cursors = [state.cursor for state in states]
        self._samples = [state.samples for state in states]
        self._tokens = [state.tokens for state in states]
        self._left = [state.left for state in states]
        done = [state.done for state in states]
        self._mixer = Mixer(plan, parts, [state.credit for state in states], done, tokens=tokens, longest=longest)
        self._current = 0
        self._items: list[Iterator[Any]] = []
        self._barren = 0  # times that all began anew since something was given

    def __iter__(self) -> Iterator[Any]:
        self._items = [iter(branch.stage) for branch in self._branches]
        mixer, length = self._mixer, self._length
        while not self._stopped:
            source = mixer.choose()
            if source is None and not self._rules.repeat:
                return
            if source is None:
                self._begin_anew()
                continue
            item = next(self._items[source], _END)
            if item is _END:
                self._exhausted(source)
                continue
            tokens = self._measured(length, item, source)
            mixer.drew(source, tokens)
            self._cursors[source] = self._branches[source].stage.cursor()
            self._samples[source] += 1
            self._tokens[source] += tokens
            self._current, self._barren = source, 0
            yield item

    def _measured(self, length: Callable[[Any], int], item: Any, source: int) -> int:
        try:
            return length(item)
        except DataError as error:
            ref = self._branches[source].stage.ref()
            error.add_note(f"in a Mixture at source {ref.source!r}, shard {ref.shard}, row {ref.row}")
            raise

    def _exhausted(self, source: int) -> None:
        self._cursors[source] = self._branches[source].stage.cursor()
        self._mixer.leave(source)
        if not self._rules.stops[source]:
            return
        if self._rules.repeat:
            self._begin_anew()
            return
        self._stopped = True
        self._left = [
            0 if done else branch.unread(cursor)
            for branch, cursor, done in zip(self._branches, self._cursors, self._mixer.done, strict=True)
        ]

    def _begin_anew(self) -> None:
        """What has ended begins its next epoch."""
        self._barren += 1
        if self._barren > self._parts + 1:
            names = [branch.name for branch in self._branches]
            raise DataError(
                f"a Mixture of {names} gave nothing in {self._barren - 1} epochs of this partition: its sources' steps drop "
                f"all, and with repeat=True the search would never end. Loosen the steps, or use repeat=False"
            )
        for source in [source for source, done in enumerate(self._mixer.done) if done]:
            branch = self._branches[source]
            self._cursors[source] = branch.following(self._cursors[source])
            branch.restart(self._cursors[source])
            self._items[source] = iter(branch.stage)
            self._mixer.back(source)

    def cursor(self) -> Cursor:
        mixer = self._mixer
        names = [branch.name for branch in self._branches]
        firsts = [branch.first for branch in self._branches]
        rows = zip(
            names,
            self._cursors,
            mixer.credits,
            mixer.done,
            self._samples,
            self._tokens,
            self._left,
            firsts,
            strict=True,
        )
        return MIX, self._version, mixer.tokens, mixer.longest, self._stopped, tuple(rows)

    def identity(self) -> tuple[Any, ...]:
        return self._branches[self._current].stage.identity()

    def ref(self) -> Ref:
        return self._branches[self._current].stage.ref()

    def ref_of(self, identity: tuple[Any, ...]) -> Ref:
        return self._owner(identity[0]).ref_of(identity)

    def _owner(self, path: str) -> Branch:
        return next(branch for branch in self._branches if branch.owns(path))

    def counters(self) -> Iterator[tuple[str, int]]:
        for branch, left in zip(self._branches, self._left, strict=True):
            for name, count in branch.stage.counters():
                yield f"{branch.name}: {name}", count
            if self._stopped:
                yield f"{branch.name}: samples left when the mixture stopped", left

    def again(self, identities: Sequence[tuple[Any, ...]]) -> MixtureAgain:
        by_branch = [[i for i in identities if branch.owns(i[0])] for branch in self._branches]
        found = [branch.again(mine) for branch, mine in zip(self._branches, by_branch, strict=True) if mine]
        return MixtureAgain(found)


class MixtureAgain:
    """The first stage over items that a mixture has given before, source by source."""

    def __init__(self, found: Sequence[Iterator[tuple[tuple[Any, ...], Any, Ref]]]) -> None:
        self._found = found
        self._identity: tuple[Any, ...] = ()
        self._ref = Ref("", -1, -1)

    def __iter__(self) -> Iterator[Any]:
        for items in self._found:
            for self._identity, item, self._ref in items:
                yield item

    def cursor(self) -> Cursor:
        return self._identity

    def identity(self) -> tuple[Any, ...]:
        return self._identity

    def ref(self) -> Ref:
        return self._ref

    def ref_of(self, identity: tuple[Any, ...]) -> Ref:  # noqa: ARG002  (the protocol's)
        return self._ref

    def counters(self) -> Iterator[tuple[str, int]]:
        return iter(())

    def again(self, identities: Sequence[tuple[Any, ...]]) -> MixtureAgain:  # noqa: ARG002  (the protocol's)
        raise LookupError("what is made again cannot be made again from")
