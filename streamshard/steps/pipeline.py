"""Steps put together: checks at construction, stages in a partition, and the fingerprint of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from streamshard.errors import UsageError
from streamshard.order.cursor import Cursor, Ref, innermost
from streamshard.steps.batch import Batch
from streamshard.steps.counts import Counts
from streamshard.steps.filter import Filter
from streamshard.steps.flat_map import FlatMap
from streamshard.steps.map import Map
from streamshard.steps.step import Counting, Holding, SourceStage, Stage, Step, StepContext

BATCHING = ("Batch", "TokenBatch", "BucketBatch")  # steps, by the names in fingerprints, whose items are batches
_STEP_VERBS = ("label", "fingerprint", "start", "inner", "left", "open")


def check_steps(steps: Sequence[Any]) -> None:
    """Refuse pipelines that cannot work, naming the step and the cure (`UsageError`)."""
    batched: str | None = None
    for place, step in enumerate(steps):
        if isinstance(step, type) or not all(hasattr(step, verb) for verb in _STEP_VERBS):
            cure = f"Map({getattr(step, '__name__', '...')})" if callable(step) else "Map, Filter, FlatMap or Batch"
            if isinstance(step, type) and all(hasattr(step, verb) for verb in _STEP_VERBS):
                cure = f"an instance: {step.__name__}(...)"
            raise UsageError(f"step {place} is {step!r}, which is not a step; pass {cure}")
        if batched is not None and isinstance(step, Map) and step.rng:
            raise UsageError(
                f"step {place}, {step.label} with rng=True, comes after {batched}: what it gives has no single sample to seed "
                f"a generator from; move it before {batched}"
            )
        if batched is not None and isinstance(step, Batch) and step.max_tokens is not None:
            raise UsageError(
                f"step {place}, {step.label}, comes after {batched}: it puts documents into rows, and these are rows already. "
                f"Use Batch(n), or a StreamLoader with batch_size=n"
            )
        if isinstance(step, Holding):
            _check_before(step.label, steps[:place])
        if isinstance(step, Batch | Holding):
            batched = step.label


def _check_before(label: str, before: Sequence[Step]) -> None:
    """A step that holds items back has them made again on resume, from the stored samples."""
    for step in before:
        if not isinstance(step, Map | Filter | FlatMap):
            raise UsageError(
                f"{step.label} comes before {label}, which makes its input again on resume and can do that through Map, Filter "
                f"and FlatMap only; move {step.label} behind it"
            )


def start_cursor(steps: Sequence[Step], source: Cursor, counts: Cursor | None = None) -> Cursor:
    """The cursor of a fresh pipeline over a source that stands at `source`; a step that counts goes on from `counts`."""
    cursor = source
    for step in steps:
        cursor = step.start(cursor)
        if counts is not None and isinstance(step, Counting) and step.counts(cursor) is not None:
            cursor = *cursor[:-1], counts
    return cursor


def open_stages(
    steps: Sequence[Step], cursor: Cursor, context: StepContext, source: Callable[[Cursor], SourceStage]
) -> Stage:
    """The stages of one partition, resumed at `cursor`: the last one, which pulls from the others."""
    cursors = _cursors(steps, cursor)
    stage: Stage = (first := source(cursors.pop()))
    for place, step in enumerate(steps):
        past = StepsPast(steps[:place], first, context)
        named = f"{context.prefix}{place}" if context.prefix else place
        stage = step.open(stage, cursors.pop(), replace(context, place=named, past=past))
    return stage


class StepsPast:
    """Items that left the last of `steps` before, made again: the source's samples once more, through steps of their own."""

    def __init__(self, steps: Sequence[Step], source: SourceStage, context: StepContext) -> None:
        self._steps = steps
        self._source = source
        self._context = context

    def items(self, identities: Sequence[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], Any, Ref]]:
        if not identities:
            return iter(())
        again = self._source.again(identities)  # now, so that it is there when the iteration opens
        return self._through(open_stages(self._steps, start_cursor(self._steps, ()), self._context, lambda _: again))

    @staticmethod
    def _through(stage: Stage) -> Iterator[tuple[tuple[Any, ...], Any, Ref]]:
        for item in stage:
            yield stage.identity(), item, stage.ref()

    def ref(self, identity: tuple[Any, ...]) -> Ref:
        return self._source.ref_of(identity)


def _cursors(steps: Sequence[Step], cursor: Cursor) -> list[Cursor]:
    """`cursor` taken apart: that of the last step first, the source's last."""
    cursors = [cursor]
    for step in reversed(steps):
        cursors.append(step.inner(cursors[-1]))
    return cursors


def items_left(steps: Sequence[Step], cursor: Cursor, samples: int) -> int | None:
    """Items that a partition at `cursor`, whose source has `samples` to come in this finite epoch, will still give.

    None where only reading tells; `uncounted` says which step it is.
    """
    cursors = _cursors(steps, cursor)
    left: int | None = samples
    for step, own in zip(steps, cursors[-2::-1], strict=True):
        if left is None:
            return None
        left = step.left(left, own)
    return left


def uncounted(steps: Sequence[Step]) -> str | None:
    """The first step that makes the number of items unknown before they are read."""
    for step in steps:
        if step.left(1, step.start(())) is None:
            return step.label
    return None


Needed = frozenset[tuple[str, int, int]]  # (source path, epoch, k) of samples


def still_needed(steps: Sequence[Step], cursor: Cursor) -> Needed:
    """Samples emitted before the source's place in `cursor` that a resume from it reads again."""
    held = _holding(steps, cursor)
    return frozenset(piece.identity[:3] for step, own in held for piece in step.carried(own))


def reached(steps: Sequence[Step], cursor: Cursor) -> int:
    """An epoch after which nothing has left at `cursor` of a plain dataset."""
    epoch: int = innermost(cursor)[0]
    if not at_border(steps, cursor):
        # A sample, or a group of a Map's, may have been taken across an epoch's end, or over several of few samples.
        groups = [step.batch or 1 for step in steps if isinstance(step, Map)]
        epoch += max([1, *groups])
    return max([epoch, *(step.reached(own) for step, own in _holding(steps, cursor))])


def at_border(steps: Sequence[Step], cursor: Cursor) -> bool:
    """Whether no step holds anything at `cursor`: what comes next depends on what the source gives next, and on nothing
    that was planned before.
    """
    cursors = _cursors(steps, cursor)
    return all(step.border(own) for step, own in zip(reversed(steps), cursors, strict=False) if hasattr(step, "border"))


def counted(steps: Sequence[Step], cursor: Cursor) -> Counts | None:
    """What had left at `cursor`, as the last step that counts has it; None if none does."""
    for step, own in zip(reversed(steps), _cursors(steps, cursor), strict=False):
        if isinstance(step, Counting) and (found := step.counts(own)) is not None:
            return found
    return None


def _holding(steps: Sequence[Step], cursor: Cursor) -> Iterator[tuple[Holding, Cursor]]:
    for step, own in zip(reversed(steps), _cursors(steps, cursor), strict=False):
        if isinstance(step, Holding):
            yield step, own


def steps_fingerprint(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Names and parameters of the steps, in order, without batch sizes."""
    return [{k: v for k, v in step.fingerprint().items() if k != "size"} for step in steps]


def batch_fingerprint(steps: Sequence[Step]) -> list[int]:
    """The sizes of the `Batch` steps: apart, because a change of batch size can be allowed by itself."""
    return [
        step.size for step in steps if isinstance(step, Batch) and step.size is not None and step.max_tokens is None
    ]


def window(steps: Sequence[Step]) -> int:
    """About how many samples the steps take before the first item leaves."""
    return max((getattr(step, "window", 0) for step in steps), default=0)


def wants_refs(steps: Sequence[Step]) -> bool:
    """Whether the refs of samples are asked for at every item, so that tracking them pays."""
    return any(isinstance(step, Map) and (step.rng or step.threads) for step in steps)
