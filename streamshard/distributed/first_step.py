"""Checks of the first step: whether the ranks of a job read the same dataset in the same way, and peers the same batch.

Once for each dataset object, since that is what ranks have alike. They wait for nobody and cannot hang. Each process writes
what it has into the job's key-value store unless another was first, and compares itself with whoever that was; so it is the
later one of two that notices, which ends the job as well. A process that never comes is not missed.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed

from streamshard.distributed.job import life, running, store
from streamshard.distributed.replicas import CURE, digests, first_difference
from streamshard.distributed.topology import Topology
from streamshard.errors import DataError, UsageError

_logger = logging.getLogger("streamshard")
_begun: Counter[str] = Counter()  # datasets of a name in this process: every process counts alike


class FirstStep:
    """The checks of the first iteration over a dataset called `name`. Does nothing without a process group, or where no other
    process reads the same. Not for worker processes. A job without a working store is not checked.
    """

    def __init__(self, name: str, topology: Topology) -> None:
        self._topology = topology
        self._peers = topology.peers
        self._key = ""
        self._batch_compared = False
        if not running():
            return
        world = torch.distributed.get_world_size()
        if topology.size > 1 and not self._peers and world % topology.size == 0:
            self._peers = world // topology.size
        if topology.size > 1 or self._peers > 1:
            _begun[name] += 1
            self._key = f"streamshard/first/{life()}/{_begun[name]}/{name}"

    def begins(self, settings: Mapping[str, Any], epoch: int | None) -> None:
        """Compare `settings` with those of the rank that began first, and see that every rank has its processes only.

        epoch: None where it need not be that of others: one rank's state may be of an epoch's end, another's from before it.
        Raises `UsageError` naming both ranks, the first setting that differs and both values.
        """
        if not self._key:
            return
        mine = json.loads(json.dumps({"ranks": self._topology.size, **settings, "epoch": epoch}))
        found = self._first("settings", mine)
        if found is None:
            return
        first, theirs = found
        for field, value in mine.items():
            unknown = field == "epoch" and None in (value, theirs["epoch"])
            if theirs.get(field) != value and not unknown:
                raise UsageError(
                    f"{self._named()} reads with {field}={value!r} and {first} with {field}={theirs.get(field)!r}: the "
                    f"ranks of a job must agree, or samples are read twice and others never. Make them equal; "
                    f"verify_ranks=False if these are not one job"
                )
        if self._peers and len(holders := self._holders()) > self._peers:
            raise UsageError(
                f"the processes with global ranks {sorted(holders)} read as data-parallel rank {self._topology.rank} of "
                f"{self._topology.size}, and {self._peers} should: give each its own "
                f"Topology(data_parallel_rank, data_parallel_size), or Topology.from_mesh(mesh)"
            )

    def first_batch(self, batch: Any) -> None:
        """Compare the first batch, once, with that of the peer that had its own first. Raises `DataError` naming both, and the
        field.
        """
        if not self._key or self._peers < 2 or self._batch_compared:
            return
        self._batch_compared = True
        mine = digests(batch)
        found = self._first(f"batch/{self._topology.rank}", mine)
        field = first_difference(found[1], mine) if found is not None else None
        if found is not None and field is not None:
            raise DataError(
                f"{field!r} of the first batch differs between {self._named()} and {found[0]}, its peer. {CURE}. "
                f"verify_ranks=False switches this check off"
            )

    def _first(self, what: str, mine: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Who said the first thing about `what`, and what it was; None if the store cannot be asked."""
        said = json.dumps([self._named(), mine])
        try:
            first, theirs = json.loads(store().compare_set(f"{self._key}/{what}", "", said))
        except RuntimeError as error:
            self._not_checked(error)
            return None
        return first, theirs

    def _holders(self) -> set[int]:
        """Global ranks that read as this data-parallel rank, as far as they have come."""
        key = f"{self._key}/holders/{self._topology.rank}"
        try:
            store().append(key, f"{torch.distributed.get_rank()} ")
            return set(map(int, store().get(key).split()))
        except RuntimeError as error:  # not all kinds of stores can append
            self._not_checked(error)
            return set()

    def _not_checked(self, error: Exception) -> None:
        _logger.info("ranks are not compared: the job's store says %s", str(error).partition("\n")[0])

    def _named(self) -> str:
        return f"global rank {torch.distributed.get_rank()} (data-parallel rank {self._topology.rank})"
