"""`ShardedState`: a loader's state for torch.distributed.checkpoint (DCP), which saves by key and reshards by key.

DCP takes a state apart into leaves. Of leaves with equal keys on several ranks it keeps one, and when it loads, each rank is
given the leaves whose keys it asks for. So what belongs to a holder of partitions must not have a key that all holders share,
and a rank that is about to load must ask for all partitions:

    format        1
    fingerprint   the same on all ranks
    partitions    {"0": bytes, ... one for each of P}: JSON of [turn, done, cursor] or null, and of the holder it comes from;
                  then a newline and, in the first partition of a holder, the samples of a contents snapshot

A rank saves the partitions that it holds; one that has not begun has no partitions of its own and writes all of them as null,
which is also what it asks for when it loads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from streamshard.distributed.gather import RAGGED, Stateful, load_allowing
from streamshard.errors import StateError, UsageError
from streamshard.state import FORMAT, PartitionState, Snapshot, State, decode_state, merge_states


class ShardedState:
    """A loader, or dataset, as ``torch.distributed.checkpoint`` saves and loads it.

    ``dcp.save({"model": ..., "data": ShardedState(loader)}, checkpoint_id=...)``, and ``dcp.load`` with the same. A checkpoint
    resumes on any number of ranks and workers. All ranks save at the same step. Load into a loader that has not begun: what
    one that is being read holds is only a part. `StreamDataset` needs ``partitions=``, which is what the ranks of the next run
    will ask for.

    allow: as for `StreamDataset.load_state_dict` and `merge_states`.

    `load_state_dict` raises `StateError` for a folder in which two saves are mixed, or partitions are missing.
    """

    def __init__(self, loader: Stateful, allow: Collection[str] = ()) -> None:
        self._loader = loader
        self._allow = set(allow)

    def state_dict(self) -> dict[str, Any]:
        """What this rank holds, by partition. A few µs for each; no collective."""
        return take_apart(self._loader.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what DCP has put together."""
        load_allowing(self._loader, put_together(state, self._allow & RAGGED), self._allow)


def take_apart(state: State) -> dict[str, Any]:
    """A state by keys that only its holder has."""
    snapshot = decode_state(state)
    total = snapshot.fingerprint.get("partitions")
    if total is None:
        raise UsageError(
            "ShardedState: the number of partitions is not settled, so a checkpoint's could differ from it; pass partitions= "
            "to StreamDataset (48 or 240 leave many numbers of ranks open)"
        )
    holder = {
        "scope": snapshot.scope,
        "epoch": snapshot.epoch,
        "batches": snapshot.batches,
        "ended": int(snapshot.ended),
        "workers": snapshot.workers,
        "run": _digest(state["fingerprint"]),
    }
    blobs = {int(key.partition(",")[0]): (key, blob) for key, blob in snapshot.contents.items()}
    begun = snapshot.partitions or snapshot.scope != "full"  # a rank may own none
    held = snapshot.partitions if begun else dict.fromkeys(range(total))
    entries = {}
    for p, part in held.items():
        key, blob = blobs.get(p, ("", b""))
        entry = [None if part is None else [part.turn, int(part.done), part.cursor], holder, key]
        entries[str(p)] = json.dumps(entry, separators=(",", ":")).encode() + b"\n" + blob
    return {"format": FORMAT, "fingerprint": state["fingerprint"], "partitions": entries}


def put_together(sharded: Mapping[str, Any], allow: Collection[str] = ()) -> State:
    """The full state out of all partitions of `take_apart`, whoever held them."""
    fingerprint, entries = sharded["fingerprint"], sharded["partitions"]
    total = json.loads(fingerprint).get("partitions")
    absent = [p for p in range(total) if str(p) not in entries]
    if absent:
        raise StateError(
            f"the checkpoint has {total} partitions, and {len(absent)} of them, {absent[:8]} ..., were not asked for: load "
            f"into a loader that has not begun, with partitions={total} as in the run that saved"
        )
    held: dict[str, Snapshot] = {}
    for p in range(total):
        head, _, blob = bytes(entries[str(p)]).partition(b"\n")
        part, holder, key = json.loads(head)
        if holder["run"] != _digest(fingerprint):
            raise StateError(
                f"partition {p} was saved by another run, or with other settings, than the checkpoint around it: two saves are "
                f"mixed in this folder. Load an earlier checkpoint, and save each into a folder of its own"
            )
        snapshot = held.setdefault(json.dumps(holder), _empty(fingerprint, holder))
        if part is not None:
            snapshot.partitions[p] = PartitionState.decode(json.dumps(part))
        if key:
            snapshot.contents[key] = blob
    scopes = [snapshot.scope for snapshot in held.values()]
    if len(set(scopes)) < len(scopes):
        raise StateError(
            f"the partitions of {next(s for s in scopes if scopes.count(s) > 1)} are from different moments: two saves are "
            f"mixed in this folder. Load an earlier checkpoint, and save each into a folder of its own"
        )
    return merge_states([snapshot.encode() for snapshot in held.values()], allow)


def _empty(fingerprint: str, holder: Mapping[str, Any]) -> Snapshot:
    return replace(
        Snapshot(holder["scope"], json.loads(fingerprint), holder["epoch"], {}, {}),
        batches=holder["batches"],
        ended=bool(holder["ended"]),
        workers=tuple(map(tuple, holder["workers"])),
    )


def _digest(fingerprint: str) -> str:
    return hashlib.blake2b(fingerprint.encode(), digest_size=6).hexdigest()
