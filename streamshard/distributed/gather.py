"""`gather_state` and `GatheredState`: the states of all ranks as one full state, on every rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch.distributed

from streamshard.distributed.job import running
from streamshard.errors import UsageError
from streamshard.state import State, merge_states

RAGGED = {"ragged"}  # allowed when states are merged; everything else when one is loaded


class Stateful(Protocol):
    """A loader or a dataset."""

    def state_dict(self) -> State: ...
    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None: ...


def load_allowing(holder: Stateful, state: State, allow: Collection[str]) -> None:
    """Load a full state; what was to be allowed when it was merged is not the holder's business."""
    holder.load_state_dict(state, set(allow) - RAGGED)


def gather_state(state: State, group: Any = None, allow: Collection[str] = ()) -> State:
    """The full state made of what each rank of the process group passes; resumes on any number of ranks.

    For trainers that write one file for all ranks. A collective: every rank of `group` (default: the whole job) has to call it,
    at the same step. Without a process group, or with one rank, it returns `state`. Costs a few KB a rank over the network.

    allow: as for `merge_states`. Raises `StateError` on every rank if the states do not belong together.
    """
    size = torch.distributed.get_world_size(group) if running() else 1
    if size == 1:
        if state.get("scope", "full") != "full":
            raise UsageError(
                f"gather_state: the state is that of {state['scope']}, and there is no process group of several ranks to "
                f"gather from; call torch.distributed.init_process_group first, or collect the states and pass "
                f"merge_states(states)"
            )
        return state
    states: list[Any] = [None] * size
    torch.distributed.all_gather_object(states, state, group)
    return merge_states(states, allow)


def gather_by_rank(rank: int, value: Any) -> list[Any]:
    """What the data-parallel ranks of the job pass, one of each rank. A collective of the whole job."""
    if not running():
        return [value]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (rank, value))
    return list(dict(reversed(found)).values())  # peers have the same


class GatheredState:
    """A loader as seen by a trainer that writes one file for all ranks: its state is that of all of them.

    For ``accelerator.register_for_checkpointing(GatheredState(loader))`` and the like. `state_dict` is a collective, see
    `gather_state`: the trainer has to ask for it on every rank. allow: as for `merge_states` and `load_state_dict`.
    """

    def __init__(self, loader: Stateful, group: Any = None, allow: Collection[str] = ()) -> None:
        self._loader = loader
        self._allow = set(allow)
        self._group = group

    def state_dict(self) -> State:
        """The full state."""
        return gather_state(self._loader.state_dict(), self._group, self._allow & RAGGED)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a full state, on any number of ranks."""
        load_allowing(self._loader, dict(state), self._allow)
