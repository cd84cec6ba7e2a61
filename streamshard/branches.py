"""The sources of a mixture at work in one partition: what `MixedOrigin` opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from streamshard.iteration import Book, Kit, open_leaf
from streamshard.order.cursor import Cursor, Ref, innermost, with_innermost
from streamshard.prefetch.source import Kept
from streamshard.steps.mixture import BranchCursor, MixtureStage, branches_of, states_of
from streamshard.steps.pipeline import Needed, StepsPast, open_stages, still_needed, wants_refs
from streamshard.steps.step import Stage, Step


class Place(NamedTuple):
    """Where a branch is opened: in which partition, with what, in a mixture that begins anew by itself or not. slots: of all
    shuffle buffers.
    """

    p: int
    kit: Kit
    repeat: bool
    slots: int


class DatasetBranch:
    """A dataset in one partition of a mixture, with its steps."""

    def __init__(  # noqa: PLR0917  (made in one place)
        self, book: Book, steps: Sequence[Step], path: str, state: BranchCursor, epochs: int | None, place: Place
    ) -> None:
        self.name = state.name
        self.first = state.first
        self._epochs = epochs
        self._share = book.slots / place.slots
        self._path = path
        self._book = book
        self._steps = steps
        self._place = place
        context = replace(place.kit.context, prefix=f"{path}:", sources=1)
        self._context = replace(context, refs=context.refs or wants_refs(steps))
        self._kit = replace(place.kit, context=self._context)
        self._open(state.cursor)

    def _open(self, cursor: Cursor) -> None:
        last = None if self._epochs is None else self.first + self._epochs - 1
        self.source = open_leaf(
            self._book, self._place.p, innermost(cursor), self._kit, last=last, path=self._path, share=self._share
        )
        self.stage: Stage = open_stages(self._steps, cursor, self._context, lambda _: self.source)

    def restart(self, cursor: Cursor) -> None:
        self.first = innermost(cursor)[0]
        self.source.close()
        self._open(cursor)

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
        self.first = 0
        self._open = opened
        self._prefix = f"{path}/"
        self.source = opened(cursor)
        self.stage: Stage = self.source

    def restart(self, cursor: Cursor) -> None:
        self.source.close()
        self.source = self._open(cursor)
        self.stage = self.source

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
        for place, branch in enumerate(self._branches):
            if self._mixer.may_give(place):
                branch.source.open()

    def close(self) -> None:
        """Let go of what was requested and not begun."""
        for branch in self._branches:
            branch.source.close()

    def forget(self, base: Cursor, needed: Needed) -> None:
        """No cursor before `base` will be asked for again, but for the samples `needed`."""
        for branch, state in zip(self._branches, branches_of(base), strict=False):  # `base` may be from before a change
            branch.forget(state.cursor, needed)

    def kept(self) -> list[Kept]:
        """What a contents snapshot has of it."""
        return [kept for branch in self._branches for kept in branch.source.kept()]

    def following(self, cursor: Cursor) -> Cursor:
        """Where it begins anew: only what had ended does."""
        mix, version, tokens, longest, _, _ = cursor
        states = []
        for branch, state in zip(self._branches, branches_of(cursor), strict=True):
            if state.done:
                at = branch.following(state.cursor)
                epoch = innermost(at)[0]
                state = state._replace(cursor=at, done=False, first=epoch if isinstance(epoch, int) else 0)
            states.append(state._replace(left=0))
        return mix, version, tokens, longest, False, states_of(states)

    def unread(self, cursor: Cursor) -> int:
        """Stored samples of the epoch that come after `cursor`, of all sources that had not ended."""
        states = zip(self._branches, branches_of(cursor), strict=True)
        return sum(branch.unread(state.cursor) for branch, state in states if not state.done)
