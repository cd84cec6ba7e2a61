"""`BalancedSampler`: batches of a `MapDataset` that cost the same on every rank, planned over all ranks from the lengths.

The items of a global step are consecutive in one random permutation of the dataset, whatever the number of ranks; only who gets
which of them, and where a step ends, depends on it. So where a run stands is one number, the same on all ranks, and it
resumes on any number of them with each sample once an epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from streamshard.distributed.topology import Topology, resolve
from streamshard.errors import UsageError
from streamshard.order.balance import next_step
from streamshard.order.partition import ALGORITHM, Ints
from streamshard.order.permutation import indices_of_run
from streamshard.shard.manifest import Manifest
from streamshard.state import (
    PartitionState,
    Snapshot,
    State,
    check_epoch,
    check_epoch_number,
    check_fingerprint,
    decode_state,
)

_INDEXES_AT_ONCE = 16  # indexes of shards that are read together at the start


Lengths = NDArray[np.uint32]


class Indexed(Protocol):
    """What is asked of the dataset."""

    @property
    def manifest(self) -> Manifest: ...
    def lengths_of(self, shard: int) -> np.ndarray: ...


class BalancedSampler(Sampler[list[int]]):
    """Lists of indices for ``DataLoader(dataset, batch_sampler=...)``: this rank's part of each global step.

    max_tokens: of a rank in a step. drop_last: leave out a last step of an epoch in which some rank would have nothing; else
    those ranks end a step earlier. efficiency, utilisation: of the steps so far, see docs/packing.md.

    The dataset needs a ``length_field``. The first iteration reads the indexes of all shards, and keeps 4 bytes a sample. The
    state describes the last batch *taken*: a DataLoader with workers takes some ahead. Not thread-safe.
    """

    def __init__(
        self, dataset: Indexed, *, max_tokens: int, seed: int, shuffle: bool, repeat: bool, drop_last: bool,
        topology: Topology | None,
    ) -> None:  # fmt: skip
        if type(max_tokens) is not int or max_tokens < 1:
            raise UsageError(f"balanced(max_tokens={max_tokens!r}): it must be an int >= 1")
        self.dataset = dataset
        self.repeat = repeat
        self.dropped = 0
        self._max_tokens = max_tokens
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._topology = topology
        self._lengths: Lengths | None = None
        self._epoch = self._position = self._steps = 0
        self._done = False
        self._pending: Snapshot | None = None
        self._tokens = self._rooms = 0
        self._busy = 0.0
        self._seen = 0

    @property
    def efficiency(self) -> float:
        """Tokens of the steps so far over what they had room for, ``ranks x max_tokens`` each."""
        return self._tokens / self._rooms if self._rooms else 0.0

    @property
    def utilisation(self) -> float:
        """Mean over the steps so far of (mean cost of a rank / cost of the dearest): how busy ranks are that wait for it."""
        return self._busy / self._seen if self._seen else 0.0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        check_epoch_number(epoch)
        check_epoch(self._pending, epoch)
        if self._pending is None:
            self._epoch, self._position, self._steps, self._done = epoch, 0, 0, False

    def __iter__(self) -> Iterator[list[int]]:
        self._begin()
        rank, ranks = self._ranks()
        while not self._done:
            indices = self._upcoming(ranks)
            if not len(indices):
                self._done = True
                return
            lengths = self._all_lengths()[indices].astype(np.int64)
            step = next_step(lengths.tolist(), ranks, self._max_tokens)
            taken = sum(map(len, step))
            self._position += taken
            if self._drop_last and not all(step):  # only where the epoch ends: else there were more to deal out
                self.dropped += taken
                continue
            self._steps += 1
            self._note(lengths, step)
            if step[rank]:
                yield indices[step[rank]].tolist()

    def _begin(self) -> None:
        pending, self._pending = self._pending, None
        ended, self._done = self._done, False
        if pending is None:
            self._epoch, self._position, self._steps = self._epoch + ended, 0, 0
            return
        (part,) = pending.partitions.values()
        self._epoch, self._position, self._steps = pending.epoch, part.cursor[1], part.turn
        if part.done:
            self._epoch, self._position, self._steps = pending.epoch + 1, 0, 0

    def _ranks(self) -> tuple[int, int]:
        topology = resolve(self._topology)
        return topology.rank, topology.size

    def _upcoming(self, ranks: int) -> Ints:
        """Indices from the next position on: more than a step can have, or all that is left of a finite epoch."""
        lengths, size = self._all_lengths(), len(self._all_lengths())
        room = ranks * self._max_tokens
        count = 64 + 2 * room * size // max(1, int(lengths.sum(dtype=np.int64)))
        while True:
            stop = self._position + count if self.repeat else min(size, self._position + count)
            indices = self._indices(np.arange(self._position, stop))
            if (not self.repeat and stop == size) or int(lengths[indices].sum(dtype=np.int64)) > room:
                return indices
            count *= 2

    def _indices(self, positions: Ints) -> Ints:
        """Indices at positions of the run, or epoch, that began with `self._epoch`."""
        return indices_of_run(positions, self._epoch, len(self._all_lengths()), self._seed, shuffle=self._shuffle)

    def _all_lengths(self) -> Lengths:
        if self._lengths is None:
            manifest = self.dataset.manifest
            if manifest.length_field is None:
                raise UsageError("balanced() plans by lengths, and the dataset was written without length_field=")
            with ThreadPoolExecutor(_INDEXES_AT_ONCE, thread_name_prefix="streamshard-lengths") as pool:
                found = np.concatenate([*pool.map(self.dataset.lengths_of, range(len(manifest)))])
            longest = int(found.max())
            if longest > self._max_tokens:
                raise UsageError(
                    f"balanced(max_tokens={self._max_tokens}): index {int(found.argmax())} has the length {longest}, and a "
                    f"rank's part of a step must hold it; raise max_tokens, or write the dataset with shorter samples"
                )
            self._lengths = np.maximum(1, found).astype(np.uint32)
        return self._lengths

    def _note(self, lengths: Ints, step: list[list[int]]) -> None:
        costs = [int((lengths[places] ** 2).sum()) for places in step]
        self._tokens += sum(int(lengths[places].sum()) for places in step)
        self._rooms += len(step) * self._max_tokens
        self._busy += sum(costs) / len(costs) / max(costs)
        self._seen += 1

    def state_dict(self) -> State:
        """Where the sampler stands after the last batch taken: the same on every rank."""
        if self._pending is not None:
            return self._pending.encode()
        part = PartitionState(self._steps, self._done, (self._epoch, self._position))
        return Snapshot("full", self._fingerprint(), self._epoch, {0: part}).encode()

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Go on from `state` with the next iteration, on any number of ranks. Raises `StateError` for one that does not fit."""
        snapshot = decode_state(state)
        check_fingerprint(snapshot.fingerprint, self._fingerprint(), allow)
        self._pending = snapshot

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "algorithm": ALGORITHM, "dataset": self.dataset.manifest.version, "kind": "BalancedSampler",
            "seed": self._seed, "shuffle": self._shuffle, "repeat": self.repeat, "partitions": 1,
        }  # fmt: skip
