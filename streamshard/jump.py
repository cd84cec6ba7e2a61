"""States of other steps than the one a run is at, without reading what lies between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamshard.errors import StateError
from streamshard.order.cursor import innermost
from streamshard.state import PartitionState, Snapshot, State, decode_state
from streamshard.steps.pipeline import start_cursor
from streamshard.steps.step import Step
from streamshard.whereabouts import Whereabouts


def state_after(state: State, steps: int, where: Whereabouts, pipeline: Sequence[Step]) -> State:
    """The full state `steps` steps after `state`, which may be that of one rank: all make the same of theirs.

    Raises `StateError` for a state whose partitions are not at one place of the order, `UsageError` beyond an epoch's end.
    """
    snapshot = decode_state(state)
    slot = _slot(snapshot, where.parts)
    expected = where.turns(slot)
    for p, part in snapshot.partitions.items():
        if part.turn == expected[p] and where.agrees(p, part.turn, innermost(part.cursor)):
            continue
        raise StateError(
            "the partitions of this state are not at one place of the order (it is ragged, some have ended, or steps were "
            "changed in mid-run): go on from a state that all ranks have saved at the same step"
        )
    target = slot + where.slots(steps)
    parts = {
        p: PartitionState(turn, done=False, cursor=start_cursor(pipeline, cursor))
        for p, (turn, cursor) in enumerate(zip(where.turns(target), where.cursors(target), strict=True))
    }
    batches = (snapshot.batches or 0) + steps
    return Snapshot("full", where.fingerprint, snapshot.epoch, parts, {}, batches).encode()


def _slot(snapshot: Snapshot, parts: int) -> int:
    """The next slot of all ranks: that of rank r is r further, since ranks divide the slots from where their run began."""
    rank = 0 if snapshot.scope == "full" else int(snapshot.scope.removeprefix("rank ").partition("/")[0])
    live = [part.turn * parts + p for p, part in snapshot.partitions.items() if not part.done]
    return min(live) - rank if live else 0


def start_of(state: State) -> State:
    """Where the run of a state began; with finite epochs, the state's epoch."""
    snapshot = decode_state(state)
    return replace(snapshot, scope="full", partitions={}, contents={}, batches=None, ended=True, workers=()).encode()
