"""States of other steps than the one a run is at, without reading what lies between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamshard.errors import StateError
from streamshard.state import PartitionState, Snapshot, State, decode_state
from streamshard.steps.pipeline import start_cursor
from streamshard.steps.step import Step
from streamshard.whereabouts import Whereabouts


def state_after(state: State, steps: int, where: Whereabouts, pipeline: Sequence[Step]) -> State:
    """The full state `steps` steps after `state`, which may be that of one rank: all make the same of theirs.

    Raises `StateError` for a state whose partitions are not at one place of the order, `UsageError` beyond an epoch's end.
    """
    snapshot = decode_state(state)
    turns = {p: part.turn for p, part in snapshot.partitions.items()}
    slot = sum(turns.values()) * (1 if snapshot.scope == "full" else where.ranks)
    if any(turn != where.turns(slot)[p] for p, turn in turns.items()):
        raise StateError(
            "the partitions of this state are not at one place of the order (it is ragged, or some have ended): go on from a "
            "state that all ranks have saved at the same step"
        )
    target = slot + where.slots(steps)
    parts = {
        p: PartitionState(turn, done=False, cursor=start_cursor(pipeline, cursor))
        for p, (turn, cursor) in enumerate(zip(where.turns(target), where.cursors(target), strict=True))
    }
    batches = (snapshot.batches or 0) + steps
    return Snapshot("full", where.fingerprint, snapshot.epoch, parts, {}, batches).encode()


def start_of(state: State) -> State:
    """Where the run of a state began; with finite epochs, the state's epoch."""
    snapshot = decode_state(state)
    return replace(snapshot, scope="full", partitions={}, contents={}, batches=None, ended=True, workers=()).encode()
