"""Checks of the first step: whether the ranks of a job read the same dataset in the same way, and peers the same batch.

They wait for nobody and cannot hang. Each process writes what it has into the job's key-value store unless another was first,
and compares itself with whoever that was; so it is the later one of two that notices, which ends the job as well. A process
that never comes is not missed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed

from streamshard.distributed.replicas import CURE, digests, first_difference
from streamshard.distributed.topology import Topology
from streamshard.errors import DataError, UsageError

_begun: Counter[str] = Counter()  # iterations of a dataset in this process: every process counts alike


class FirstStep:
    """The checks of one iteration over the dataset called `name`. Does nothing without a process group, or where no other
    process reads the same. Not for worker processes.
    """

    def __init__(self, name: str, topology: Topology) -> None:
        self._topology = topology
        self._peers = topology.peers
        self._key = ""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        world = torch.distributed.get_world_size()
        if topology.size > 1 and not self._peers and world % topology.size == 0:
            self._peers = world // topology.size
        if topology.size > 1 or self._peers > 1:
            _begun[name] += 1
            self._key = f"streamshard/{_begun[name]}/{name}"

    def begins(self, settings: Mapping[str, Any], epoch: int | None) -> None:
        """Compare `settings` with those of the rank that began first, and see that every rank has its processes only.

        epoch: None where it need not be that of others: one rank's state may be of an epoch's end, another's from before it.
        Raises `UsageError` naming both ranks, the first setting that differs and both values.
        """
        if not self._key:
            return
        mine = json.loads(json.dumps({"ranks": self._topology.size, **settings, "epoch": epoch}))
        first, theirs = self._first("settings", mine)
        for field, value in mine.items():
            unknown = field == "epoch" and None in (value, theirs["epoch"])
            if theirs.get(field) != value and not unknown:
                raise UsageError(
                    f"{self._named()} reads with {field}={value!r} and {first} with {field}={theirs.get(field)!r}: the "
                    f"ranks of a job must agree, or samples are read twice and others never. Make them equal; "
                    f"verify_ranks=False if these are not one job"
                )
        if self._peers:
            rank = self._topology.rank
            holders = _store().add(f"{self._key}/holders/{rank}", 1)
            if holders > self._peers:
                raise UsageError(
                    f"{holders} processes, this one with global rank {torch.distributed.get_rank()}, read as data-parallel "
                    f"rank {rank} of {self._topology.size}, and {self._peers} should: give each its own "
                    f"Topology(data_parallel_rank, data_parallel_size), or Topology.from_mesh(mesh)"
                )

    def first_batch(self, batch: Any) -> None:
        """Compare the first batch with that of the peer that had its own first. Raises `DataError` naming both, and the
        field.
        """
        if not self._key or self._peers < 2:
            return
        mine = digests(batch)
        first, theirs = self._first(f"batch/{self._topology.rank}", mine)
        field = first_difference(theirs, mine)
        if field is not None:
            raise DataError(
                f"{field!r} of the first batch differs between {self._named()} and {first}, its peer. {CURE}. "
                f"verify_ranks=False switches this check off"
            )

    def _first(self, what: str, mine: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Who said the first thing about `what`, and what it was."""
        said = json.dumps([self._named(), mine])
        first, theirs = json.loads(_store().compare_set(f"{self._key}/{what}", "", said))
        return first, theirs

    def _named(self) -> str:
        return f"global rank {torch.distributed.get_rank()} (data-parallel rank {self._topology.rank})"


def _store() -> Any:
    # torch has no public name for it: what every process group of the job was set up with.
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001
