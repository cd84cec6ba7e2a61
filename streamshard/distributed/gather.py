"""`gather_state`: the states of all ranks as one full state, on every rank."""

from __future__ import annotations

from typing import Any

import torch.distributed

from streamshard.state import State, merge_states


def gather_state(state: State, group: Any = None) -> State:
    """The full state made of what each rank of the process group passes; resumes on any number of ranks.

    For trainers that write one file for all ranks. A collective: every rank of `group` (default: the whole job) has to call it,
    at the same step. Without a process group, or with one rank, it returns `state`. Costs a few KB a rank over the network.

    Raises `StateError` on every rank if the states do not belong together.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return state
    size = torch.distributed.get_world_size(group)
    if size == 1:
        return state
    states: list[Any] = [None] * size
    torch.distributed.all_gather_object(states, state, group)
    return merge_states(states)
