"""The state of a dataset: its format, what must fit on resume, and how the states of many holders become one.

A state is a dictionary of plain immutable leaves (int, str, bytes), safe for msgpack, JSON-like stores and
``torch.load(weights_only=True)``:

    format       1
    scope        "full", "rank 0/4" or "worker 0/4 1/2": whose partitions it holds
    fingerprint  JSON: dataset version and everything else that shapes the order
    epoch        the epoch of a finite iteration; with repeat=True the first one (each partition's cursor has its own)
    partitions   {"0": JSON of [turn, done, cursor], ...}
    held         how many there are: whatever takes a state apart to store it has to put all of it together again
    contents     {"0,2,4": bytes, ...}, only with snapshot="contents": samples that a resume then need not read again
    batches      only of loaders: how many batches of the epoch a rank had handed out
    ended        only of loaders: 0 while the end of the epoch has not shown, even if no item is left
    workers      only of loaders whose workers' batches take turns: JSON, rank by rank the partitions of each worker, the next
                 one first
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamshard.errors import StateError, UsageError
from streamshard.order.cursor import Cursor, freeze
from streamshard.order.rotation import Reader, divisors

FORMAT = 1
ALLOWED = ("batch", "dataset", "mixture", "steps")

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Where a partition stands after `turn` items."""

    turn: int
    done: bool
    cursor: Cursor

    def encode(self) -> str:
        return json.dumps([self.turn, int(self.done), self.cursor], separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> PartitionState:
        turn, done, cursor = json.loads(text)
        return cls(turn, bool(done), freeze(cursor))


@dataclass(frozen=True)
class Snapshot:
    """A state in usable form. `partitions` is empty for a state from before the first start without `partitions=`."""

    scope: str
    fingerprint: dict[str, Any]
    epoch: int
    partitions: dict[int, PartitionState] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    batches: int | None = None
    ended: bool = True
    workers: tuple[tuple[int, ...], ...] = ()

    @property
    def at_end(self) -> bool:
        """Whether the reader saw the end of the epoch, so that going on means the next."""
        return self.ended and bool(self.partitions) and all(part.done for part in self.partitions.values())

    def encode(self) -> State:
        """A new dictionary; nothing in it is shared with anything live."""
        state: State = {
            "format": FORMAT,
            "scope": self.scope,
            "fingerprint": json.dumps(self.fingerprint, sort_keys=True, separators=(",", ":")),
            "epoch": self.epoch,
            "partitions": {str(p): part.encode() for p, part in sorted(self.partitions.items())},
            "held": len(self.partitions),
        }
        if self.contents:
            state["contents"] = dict(self.contents)
        if self.batches is not None:
            state["batches"] = self.batches
            state["ended"] = int(self.ended)
        if self.workers:
            state["workers"] = json.dumps(self.workers, separators=(",", ":"))
        return state


def decode_state(state: Any) -> Snapshot:
    """A snapshot out of a state dictionary; `StateError` if it is anything else."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise StateError(
            f"this is no state of a streamshard dataset: {_short(state)}; pass what state_dict() returned, or merge_states "
            f"of several"
        )
    if state["format"] != FORMAT:
        raise StateError(f"the state has format {state['format']!r}, this package reads {FORMAT}; upgrade it")
    try:
        snapshot = Snapshot(
            scope=str(state["scope"]),
            fingerprint=json.loads(state["fingerprint"]),
            epoch=int(state["epoch"]),
            partitions={int(p): PartitionState.decode(text) for p, text in state["partitions"].items()},
            contents=dict(state.get("contents", {})),
            batches=state.get("batches"),
            ended=bool(state.get("ended", True)),
            workers=freeze(json.loads(state.get("workers", "[]"))),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise StateError(
            f"the state is damaged ({type(error).__name__}: {error}); resume from an earlier checkpoint"
        ) from error
    found = len(snapshot.partitions)
    if state.get("held", found) != found:
        raise StateError(
            f"the state says that it holds {state['held']} partitions and comes with {found}: it was taken apart on its way, "
            f"as torch.distributed.checkpoint does. Save and load ShardedState(loader) there"
        )
    return snapshot


def scope_name(reader: Reader) -> str:
    """The scope of a state that `reader` writes."""
    if reader.readers == 1:
        return "full"
    if reader.workers == 1:
        return f"rank {reader.rank}/{reader.ranks}"
    return f"worker {reader.rank}/{reader.ranks} {reader.worker}/{reader.workers}"


def check_scope(scope: str, reader: Reader) -> None:
    """Whether a state of `scope` may be resumed by `reader`."""
    rank = scope_name(Reader(reader.rank, reader.ranks))
    if scope in ("full", rank, scope_name(reader)):
        return
    raise StateError(
        f"the state is that of {scope}, and this reader is {scope_name(reader)}: a state that holds a part of the "
        f"partitions resumes only in its own place. Collect the states of all ranks and workers and pass "
        f"merge_states(states), which resumes anywhere"
    )


def check_epoch_number(epoch: object) -> None:
    """Whether ``set_epoch(epoch)`` names one."""
    if not isinstance(epoch, int) or epoch < 0:
        raise UsageError(f"set_epoch({epoch!r}): an epoch is an int >= 0")


def check_epoch(pending: Snapshot | None, epoch: int) -> None:
    """Whether ``set_epoch(epoch)`` agrees with a loaded state: its own epoch, or after the end of that the next."""
    if pending is None or epoch == pending.epoch or (pending.at_end and epoch == pending.epoch + 1):
        return
    place = "at the end of" if pending.at_end else "in"
    raise UsageError(
        f"set_epoch({epoch}) contradicts the loaded state, which is {place} epoch {pending.epoch}; iterate first, or call "
        f"set_epoch({pending.epoch + pending.at_end})"
    )


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any], allow: Iterable[str]) -> None:
    """Refuse a state that was made with other settings, naming the first one that differs."""
    for name in allow:
        if name not in ALLOWED:
            raise UsageError(f"allow={name!r} is unknown; {', '.join(map(repr, ALLOWED))} can be allowed")
    for name in sorted(saved.keys() | current.keys()):
        if name in allow or saved.get(name) == current.get(name):
            continue
        if name == "partitions" and None in (saved.get(name), current.get(name)):
            continue  # not chosen by the one side: the other side's choice holds
        raise StateError(_misfit(name, saved.get(name), current.get(name)))


def _misfit(name: str, saved: Any, current: Any) -> str:
    cures = {
        "dataset": "point at the dataset version that was used, or pass allow={'dataset'} to go on with the new one from "
        "the next epoch",
        "steps": "use the same steps, or pass allow={'steps'} if the change is meant",
        "batch": "use the same Batch sizes, or pass allow={'batch'} if the change is meant",
        "partitions": f"pass partitions={saved} (its divisors {divisors(saved)} can be ranks x workers)"
        if isinstance(saved, int)
        else "pass the same number of partitions",
    }
    cure = cures.get(name, f"pass {name}={saved!r}, or start a new run without this state")
    return f"the state was saved with {name}={_short(saved)}, and this dataset has {name}={_short(current)}: {cure}"


def merge_states(states: Sequence[State], allow: Collection[str] = ()) -> State:
    """One full state out of the states of all ranks and workers, which resumes on any number of them.

    A state may also be one of torchdata's StatefulDataLoader, whose workers' states are taken out of it. One that was saved
    between snapshots is refused, since its batches after the snapshot would come again: set ``snapshot_every_n_steps`` to 1 or
    to the interval of your checkpoints.

    Equal duplicates are fine (tensor-parallel peers hold the same partitions). Raises `StateError` for states of different
    runs, epochs or steps, for partitions that two states hold differently, and for missing ones.

    allow: ``{"ragged"}`` accepts loaders' states from different steps, as after ranks have failed one by one. They resume
        exactly once; how much further some were is logged.
    """
    for name in allow:
        if name != "ragged":
            raise UsageError(f"merge_states(allow={name!r}): only 'ragged' can be allowed")
    if not states:
        raise StateError("merge_states got no state; pass those of all ranks and workers")
    snapshots = [snapshot for state in states for snapshot in _snapshots_inside(state)]
    first = snapshots[0]
    partitions: dict[int, PartitionState] = {}
    for number, snapshot in enumerate(snapshots):
        check_fingerprint(first.fingerprint, snapshot.fingerprint, ())
        if snapshot.epoch != first.epoch:
            raise StateError(
                f"state 0 is from epoch {first.epoch} and state {number} from epoch {snapshot.epoch}; merge states saved "
                f"at the same moment"
            )
        for p, part in snapshot.partitions.items():
            if partitions.setdefault(p, part) != part:
                raise StateError(
                    f"state {number} ({snapshot.scope}) has partition {p} at {part.encode()}, another state at "
                    f"{partitions[p].encode()}; merge states of one save only"
                )
    _check_same_ranks(snapshots)
    if "ragged" not in allow:
        _check_same_step(snapshots)
    # One of a rank that owns nothing has no partitions either, but a scope that says so.
    unstarted = [number for number, s in enumerate(snapshots) if not s.partitions and s.scope == "full"]
    if len(unstarted) == len(snapshots):
        return first.encode()
    if unstarted:
        raise StateError(
            f"states {unstarted} were saved before their first item and the others after it: which partitions these ranks, or "
            f"workers, would have taken is not in them; save when all have given something (with n DataLoader workers: after n "
            f"batches of an epoch), or before any has"
        )
    total = first.fingerprint["partitions"]
    if total is not None and len(partitions) < total:
        absent = sorted(set(range(total)) - set(partitions))
        raise StateError(
            f"partitions {_short(absent)} of {total} are in none of the {len(states)} states "
            f"({_short([s.scope for s in snapshots])}); pass the states of all ranks and workers"
        )
    contents = {key: blob for snapshot in snapshots for key, blob in snapshot.contents.items()}
    counts = [snapshot.batches for snapshot in snapshots if snapshot.batches is not None]
    batches = max(counts) if len(counts) == len(snapshots) else None
    ended = all(snapshot.ended for snapshot in snapshots)
    workers = _workers_of_all(snapshots)
    return Snapshot("full", first.fingerprint, first.epoch, partitions, contents, batches, ended, workers).encode()


def _check_same_ranks(snapshots: Sequence[Snapshot]) -> None:
    parts = [(number, snapshot.scope) for number, snapshot in enumerate(snapshots) if snapshot.scope != "full"]
    totals = {re.split(r"[/ ]", scope)[2]: (number, scope) for number, scope in parts}
    if len(totals) > 1:
        (first, one), (second, other) = sorted(totals.values())[:2]
        raise StateError(
            f"state {first} is that of {one} and state {second} that of {other}: saves of different numbers of ranks are "
            f"mixed. Take all from one"
        )


def _check_same_step(snapshots: Sequence[Snapshot]) -> None:
    """Loaders saved together have handed out equally many batches, those at the end of a finite epoch perhaps fewer."""
    counted = [
        (number, snapshot)
        for number, snapshot in enumerate(snapshots)
        if snapshot.batches is not None and not all(part.done for part in snapshot.partitions.values())
    ]
    for number, snapshot in counted[1:]:
        first, other = counted[0]
        if snapshot.batches != other.batches:
            raise StateError(
                f"state {first} ({other.scope}) was saved after {other.batches} batches and state {number} ({snapshot.scope}) "
                f"after {snapshot.batches}: two saves are mixed. Take all from one; if the ranks really stopped at different "
                f"steps, merge_states(states, allow={{'ragged'}}) goes on without repeating or skipping anything"
            )


def _workers_of_all(snapshots: Sequence[Snapshot]) -> tuple[tuple[int, ...], ...]:
    """Whose workers' batches take turns: rank by rank, if every rank is there."""
    by_scope = {snapshot.scope: snapshot.workers for snapshot in snapshots}
    ranks = [f"rank {rank}/{len(by_scope)}" for rank in range(len(by_scope))]
    if set(ranks) != set(by_scope) or len({len(found) for found in by_scope.values()}) != 1:
        return ()
    return tuple(held for rank in ranks for held in by_scope[rank])


def of_stateful_dataloader(state: Mapping[Any, Any]) -> bool:
    """Whether torchdata's StatefulDataLoader has saved this, which has the states of its workers' datasets."""
    return "format" not in state and bool({"_snapshot", "dataset_state"} & set(state))


def states_inside(state: Any) -> list[State]:
    """The state, or those of datasets in what a StatefulDataLoader saved."""
    return [snapshot.encode() for snapshot in _snapshots_inside(state)]


def _snapshots_inside(state: Any) -> list[Snapshot]:
    if not isinstance(state, Mapping) or not of_stateful_dataloader(state):
        return [decode_state(state)]
    behind = state.get("_steps_since_snapshot", 0)
    if behind:
        raise StateError(
            f"a StatefulDataLoader was saved {behind} batches after its last snapshot, and its workers' states are those of "
            f"the snapshot: merged, these batches would come again. Use snapshot_every_n_steps=1, or save at its multiples"
        )
    holders = state["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in state else [state]
    snapshots = [decode_state(holder["dataset_state"]) for holder in holders]
    if not state.get("_iterator_finished"):
        return snapshots
    # It has seen the end of the epoch, which may be news to workers whose last batch was a full one.
    return [
        replace(found, partitions={p: replace(part, done=True) for p, part in found.partitions.items()})
        for found in snapshots
    ]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
