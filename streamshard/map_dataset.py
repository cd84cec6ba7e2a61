"""`MapDataset`: random access by index, and `IndexSampler`, its seeded distributed sampler with exact resume."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from torch.utils.data import Dataset, Sampler

from streamshard.balanced import BalancedSampler
from streamshard.catalog import load_manifest
from streamshard.distributed.topology import Topology, resolve
from streamshard.errors import StateError, UsageError
from streamshard.order.partition import ALGORITHM
from streamshard.order.permutation import indices_of_run
from streamshard.order.rotation import Reader, Rotation, check_divides, owned, resolve_partitions
from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.plan import BlockPiece, plan_blocks, plan_units
from streamshard.shard.manifest import Manifest
from streamshard.shard.records import Sample
from streamshard.state import (
    PartitionState,
    Snapshot,
    State,
    check_epoch,
    check_epoch_number,
    check_fingerprint,
    check_scope,
    decode_state,
    scope_name,
)
from streamshard.storage.open import open_store
from streamshard.storage.policy import StoragePolicy

_UNIT = 8 << 20
_CHUNK = 1024  # indices computed at a time


class MapDataset(Dataset[Any]):
    """A dataset as a sequence: ``len``, ``[i]``, ``[a:b]``, and ``[[i, j, ...]]``, which reads every block once.

    Indices count samples in file order, from either end. The unit of reading is a block, so that a list of indices costs
    much less than its indices one by one; torch's DataLoader hands over lists by itself. `cached_blocks` decoded blocks are
    kept. Raises `IndexError` for an index outside, and the errors of reading. Use from one thread.
    """

    def __init__(
        self,
        source: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        cached_blocks: int = 16,
        transport: str | None = None,
        storage_policy: StoragePolicy | None = None,
    ) -> None:
        self._store = open_store(source, storage_options, transport=transport, policy=storage_policy)
        self._access: ShardAccess | None = None
        self._cached_blocks = cached_blocks
        self._cache: OrderedDict[tuple[int, int], list[Sample]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict()}

    @property
    def manifest(self) -> Manifest:
        """The manifest that is read, opened on first use and then kept."""
        return self._opened().manifest

    def _opened(self) -> ShardAccess:
        if self._access is None:
            self._access = ShardAccess(self._store, load_manifest(self._store))
            self._ends = np.cumsum(self._access.manifest.sample_counts)
        return self._access

    def __len__(self) -> int:
        return self.manifest.total_samples

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | np.ndarray) -> list[Sample]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        if isinstance(index, list | tuple | range | np.ndarray):
            return self.__getitems__(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | np.ndarray) -> list[Sample]:
        """The samples at `indices`, in their order; the name is the one that torch's DataLoader looks for."""
        positions = np.array([self._checked(index) for index in indices], dtype=np.int64)
        if not len(positions):
            return []
        access = self._opened()
        shards = np.searchsorted(self._ends, positions, side="right")
        rows = positions - (self._ends[shards] - access.manifest.sample_counts[shards])
        places = list(zip(shards.tolist(), rows.tolist(), strict=True))
        pieces = list(plan_blocks([(s, r, r + 1) for s, r in sorted(set(places))], access.index))
        blocks = self._read(access, pieces)
        found: dict[tuple[int, int], Sample] = {}
        for piece in pieces:
            for first, last in piece.slices:
                for row in range(first, last):
                    found[piece.shard, piece.first_row + row] = blocks[piece.shard, piece.block][row]
        return [_own(found[place]) for place in places]

    def _checked(self, index: Any) -> int:
        try:
            number = operator.index(index)
        except TypeError:
            raise UsageError(
                f"index {index!r} of type {type(index).__name__} must be an int, slice or list of ints"
            ) from None
        size = len(self)
        if not -size <= number < size:
            raise IndexError(f"index {number} is outside of a dataset of {size} samples ({self._store.url})")
        return number % size

    def _read(self, access: ShardAccess, pieces: list[BlockPiece]) -> dict[tuple[int, int], list[Sample]]:
        """Decoded blocks, from the cache or with one ranged GET for each run of neighbours."""
        blocks = {
            (p.shard, p.block): self._cache[p.shard, p.block] for p in pieces if (p.shard, p.block) in self._cache
        }
        units = list(plan_units([p for p in pieces if (p.shard, p.block) not in blocks], lambda: _UNIT))
        buffer = bytearray()
        for unit, frames in zip(units, access.fetch(units), strict=True):
            for piece, frame in zip(unit, frames, strict=True):
                blocks[piece.shard, piece.block] = access.decode(piece, frame, buffer)
        for place, samples in blocks.items():
            self._cache[place] = samples
            self._cache.move_to_end(place)
        while len(self._cache) > self._cached_blocks:
            self._cache.popitem(last=False)
        return blocks

    def sampler(
        self,
        *,
        seed: int = 0,
        shuffle: bool = True,
        repeat: bool = False,
        partitions: int | None = None,
        topology: Topology | None = None,
    ) -> IndexSampler:
        """A sampler over this dataset for torch's DataLoader; see `IndexSampler`."""
        return IndexSampler(self, seed=seed, shuffle=shuffle, repeat=repeat, partitions=partitions, topology=topology)

    def balanced(
        self,
        *,
        max_tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        repeat: bool = False,
        drop_last: bool = False,
        topology: Topology | None = None,
    ) -> BalancedSampler:
        """Batches of at most `max_tokens` a rank, planned over all ranks so that each costs the same; see `BalancedSampler`."""
        return BalancedSampler(
            self,
            max_tokens=max_tokens,
            seed=seed,
            shuffle=shuffle,
            repeat=repeat,
            drop_last=drop_last,
            topology=topology,
        )

    def lengths_of(self, shard: int) -> np.ndarray:
        """The length of each sample of a shard, from its index. Raises `UsageError` for a dataset without ``length_field``."""
        lengths = self._opened().index(shard).lengths
        if lengths is None:
            raise UsageError(
                "the dataset was written without length_field=, so the lengths of its samples are not known"
            )
        return lengths


def _own(value: Any) -> Any:
    """A copy that shares nothing with the cached block: writable arrays, lists and maps of the caller's own."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {name: _own(inner) for name, inner in value.items()}
    return [_own(inner) for inner in value] if isinstance(value, list) else value


class _IndexRun:
    """One partition of a sampler: the indices at slots turn * P + p, from `turn` on."""

    def __init__(self, sampler: IndexSampler, p: int, turn: int, epoch: int) -> None:
        self.p = p
        self.turn = turn
        self.done = False
        self._epoch = epoch
        self._sampler = sampler
        self.items = self._indices()

    def _indices(self) -> Iterator[int]:
        sampler, parts = self._sampler, self._sampler.partitions
        size = len(sampler.dataset)
        while True:
            slots = np.arange(self.turn, self.turn + _CHUNK) * parts + self.p
            if not sampler.repeat:
                slots = slots[slots < size]
            if not len(slots):
                self.done = True
                return
            for index in sampler.indices(slots, self._epoch):
                self.turn += 1
                yield index


class IndexSampler(Sampler[int]):
    """Indices of a `MapDataset` in a seeded order, each once an epoch over all ranks, with the state rules of `StreamDataset`.

    The global order is a random permutation of all indices (never held in memory); rank r of R gets every R-th. States are
    merged with `merge_states` and resume on any number of ranks that divides `partitions`. The state describes the last
    index *taken* from the sampler; a DataLoader with workers takes indices ahead of the batches it returns.
    """

    def __init__(
        self, dataset: MapDataset, *, seed: int, shuffle: bool, repeat: bool, partitions: int | None,
        topology: Topology | None,
    ) -> None:  # fmt: skip
        self.dataset = dataset
        self.repeat = repeat
        self._seed = seed
        self._shuffle = shuffle
        self._asked = partitions
        self._topology = topology
        self._epoch = 0
        self._iteration_epoch = 0
        self._advance = False
        self._pending: Snapshot | None = None
        self._rest_first = False  # see StreamDataset
        self._runs: list[_IndexRun] = []
        self._carried: dict[int, PartitionState] = {}
        self._resolved = partitions
        self._reader = Reader()

    @property
    def partitions(self) -> int:
        """P, resolved at the first start or by a state."""
        if self._resolved is None:
            self._resolved = resolve_partitions(self._asked, self._current_reader(), shuffle=True)
        return self._resolved

    def _current_reader(self) -> Reader:
        topology = resolve(self._topology)
        return Reader(topology.rank, topology.size)

    def indices(self, slots: np.ndarray, epoch: int) -> list[int]:
        """The indices at global `slots`, counted from the beginning of `epoch`."""
        found: list[int] = indices_of_run(slots, epoch, len(self.dataset), self._seed, shuffle=self._shuffle).tolist()
        return found

    def __len__(self) -> int:
        """Indices of this rank in a whole epoch."""
        if self.repeat:
            raise TypeError("a sampler with repeat=True has no length")
        reader = self._current_reader()
        return len(range(reader.rank, len(self.dataset), reader.ranks))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        check_epoch_number(epoch)
        pending = self._pending
        check_epoch(pending, epoch)
        self._rest_first = pending is not None and epoch == pending.epoch
        self._epoch, self._advance = epoch, False

    def __iter__(self) -> Iterator[int]:
        reader = self._current_reader()
        pending = self._pending
        if pending is not None:
            check_scope(pending.scope, reader)
        check_divides(self.partitions, reader)
        self._pending = None  # consumed only now: a state that was refused is refused again
        if pending is not None and pending.at_end and not self._rest_first:
            self._epoch, self._advance = pending.epoch, True  # as the finished sampler itself goes on
            pending = None
        self._epoch = pending.epoch if pending is not None else self._epoch + self._advance
        self._advance = self._rest_first = False
        self._reader, self._iteration_epoch = reader, self._epoch
        fresh = {p: PartitionState(turn=0, done=False, cursor=(self._epoch, 0)) for p in range(self.partitions)}
        states = pending.partitions if pending is not None and pending.partitions else fresh
        done = {p for p, state in states.items() if state.done}
        turns = {p: state.turn for p, state in states.items()}
        if pending is not None and pending.scope != "full":
            live, carried = sorted(set(turns) - done), sorted(done)
        else:
            live, carried = owned(turns, done, self.partitions, reader)
        self._carried = {p: states[p] for p in carried}
        runs = self._runs = [_IndexRun(self, p, turns[p], self._epoch) for p in live]
        yield from Rotation(runs)
        if runs is self._runs:
            self._advance = True

    def state_dict(self) -> State:
        """Where the sampler stands after the last index taken."""
        if self._pending is not None:
            return self._pending.encode()
        states = {run.p: PartitionState(run.turn, run.done, (self._iteration_epoch, run.turn)) for run in self._runs}
        if not states and not self._carried:
            return Snapshot("full", self._fingerprint(), self._epoch).encode()
        partitions = {**self._carried, **states}
        return Snapshot(scope_name(self._reader), self._fingerprint(), self._iteration_epoch, partitions).encode()

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Go on from `state` with the next iteration. Raises `StateError` for a state that does not fit."""
        snapshot = decode_state(state)
        check_fingerprint(snapshot.fingerprint, {**self._fingerprint(), "partitions": self._asked}, allow)
        if snapshot.partitions and snapshot.fingerprint["dataset"] != self.dataset.manifest.version:
            raise StateError(
                f"the state was saved with dataset={snapshot.fingerprint['dataset']} and this one is "
                f"{self.dataset.manifest.version}: a permutation of other samples cannot go on in the middle; start a new run, "
                f"or use StreamDataset, which can take a grown dataset into its next epoch"
            )
        self._resolved = snapshot.fingerprint["partitions"] if self._asked is None else self._asked
        self._pending = Snapshot(snapshot.scope, self._fingerprint(), snapshot.epoch, snapshot.partitions)
        self._rest_first = False

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "algorithm": ALGORITHM, "dataset": self.dataset.manifest.version, "kind": "IndexSampler", "seed": self._seed,
            "shuffle": self._shuffle, "repeat": self.repeat, "partitions": self._resolved,
        }  # fmt: skip
