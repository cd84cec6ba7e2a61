"""Steps put together: checks at construction, stages in a partition, and the fingerprint of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from streamshard.errors import UsageError
from streamshard.order.cursor import Cursor
from streamshard.steps.batch import Batch
from streamshard.steps.map import Map
from streamshard.steps.step import Stage, Step, StepContext

_STEP_VERBS = ("label", "fingerprint", "start", "inner", "left", "open")


def check_steps(steps: Sequence[Any]) -> None:
    """Refuse pipelines that cannot work, naming the step and the cure (`UsageError`)."""
    batched: str | None = None
    for place, step in enumerate(steps):
        if isinstance(step, type) or not all(hasattr(step, verb) for verb in _STEP_VERBS):
            cure = f"Map({getattr(step, '__name__', '...')})" if callable(step) else "Map, Filter, FlatMap or Batch"
            raise UsageError(f"step {place} is {step!r}, which is not a step; pass {cure}")
        if batched is not None and isinstance(step, Map) and step.rng:
            raise UsageError(
                f"step {place}, {step.label} with rng=True, comes after {batched}: a batch has no single sample to seed "
                f"a generator from; move it before {batched}"
            )
        if isinstance(step, Batch):
            batched = step.label


def start_cursor(steps: Sequence[Step], source: Cursor) -> Cursor:
    """The cursor of a fresh pipeline over a source that stands at `source`."""
    cursor = source
    for step in steps:
        cursor = step.start(cursor)
    return cursor


def open_stages(
    steps: Sequence[Step], cursor: Cursor, context: StepContext, source: Callable[[Cursor], Stage]
) -> Stage:
    """The stages of one partition, resumed at `cursor`: the last one, which pulls from the others."""
    cursors = _cursors(steps, cursor)
    stage = source(cursors.pop())
    for place, step in enumerate(steps):
        stage = step.open(stage, cursors.pop(), replace(context, place=place))
    return stage


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


def steps_fingerprint(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Names and parameters of the steps, in order, without batch sizes."""
    return [{k: v for k, v in step.fingerprint().items() if k != "size"} for step in steps]


def batch_fingerprint(steps: Sequence[Step]) -> list[int]:
    """The sizes of the `Batch` steps: apart, because a change of batch size can be allowed by itself."""
    return [step.size for step in steps if isinstance(step, Batch)]


def wants_refs(steps: Sequence[Step]) -> bool:
    """Whether the refs of samples are asked for at every item, so that tracking them pays."""
    return any(isinstance(step, Map) and (step.rng or step.threads) for step in steps)
