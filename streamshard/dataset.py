"""`StreamDataset`: a dataset in an object store as a torch ``IterableDataset`` whose position can be saved exactly.

The composition root: the only place where storage, shards, order, steps and topology meet. The rules it keeps towards
other loaders (why ``__iter__`` is a generator function, why a loaded state waits for the next iteration) are in
docs/state.md.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from streamshard.catalog import load_manifest
from streamshard.distributed.equal_steps import StepAgreement
from streamshard.distributed.first_step import FirstStep
from streamshard.distributed.gather import gather_by_rank
from streamshard.distributed.topology import Topology, resolve
from streamshard.errors import StateError, UsageError
from streamshard.frameworks.callers import refuse_bare_dcp, refuse_one_file_for_all, shards_again, trainer_trains
from streamshard.iteration import Book, Finished, Iteration, Mark, Plain, Share, dropped
from streamshard.jump import start_of, state_after
from streamshard.mixing import MixedOrigin, Mixing
from streamshard.observe.events import Hook, StorageCounters, add_counters
from streamshard.order.cursor import innermost
from streamshard.order.partition import ALGORITHM, OrderSpec
from streamshard.order.rotation import Reader, check_divides, owned, raggedness, resolve_partitions
from streamshard.prefetch.access import ShardAccess
from streamshard.prefetch.source import Contents
from streamshard.shard.manifest import Manifest
from streamshard.snapshot_contents import decode_contents
from streamshard.sources import Mixture, Source
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
from streamshard.steps.counts import Counts, SourceProgress
from streamshard.steps.pipeline import (
    batch_fingerprint,
    check_steps,
    counted,
    items_left,
    reached,
    start_cursor,
    steps_fingerprint,
    uncounted,
    wants_refs,
    window,
)
from streamshard.steps.saved import held_in
from streamshard.steps.step import Step, StepContext
from streamshard.storage.open import CACHE_BYTES, open_store
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.store import Store
from streamshard.whereabouts import Whereabouts

_logger = logging.getLogger("streamshard")

# Places of the tensor that a dataset shares with its copies in DataLoader workers.
_EPOCH = 0  # what the next iteration reads; workers read it, and write it only with a state that they were given
_WORKERS_READ = 1  # whether workers have begun to read: from then on only they know where they are
_CONSUMED_BY = 2  # the pass of the DataLoader whose workers have used the loaded state; 0: none yet


class StreamDataset(IterableDataset[Any]):
    """Streams the samples of a dataset in a seeded, shuffled order that does not depend on who reads which part.

    source: URL or directory of a dataset written by `DatasetWriter`, or a `Mixture` of several.
    steps: `Map`, `Filter`, `FlatMap`, `Batch`, applied in order inside each partition.
    seed: another seed is another order.
    shuffle: False reads in file order (with one partition per reader, no interleaving and no buffer).
    shuffle_buffer: samples in each partition's local shuffle buffer. A checkpoint with ``snapshot="cursor"`` stores none of
        them and reads them again on resume.
    interleave: how many places of a partition are read in rotation, 16 rows at a time; more mix better and need as many
        blocks at once.
    partitions: P, into how many independent logs an epoch is cut. It bounds ranks x workers, which must divide it, now and
        after every resume. Default lcm(16, ranks x workers) at the first start, and what the state says afterwards.
    repeat: True streams epoch after epoch without end.
    topology: this process's data-parallel rank; default the process group's or torchrun's.
    snapshot: ``"cursor"`` states are tiny; ``"contents"`` states carry the buffered samples, so that a resume reads nothing
        again.
    verify_ranks: compare settings over the ranks of a process group when an iteration begins, and the first batch of a loader
        over the peers of a data-parallel rank. Costs a message to the job's store each; waits for nobody.
    provenance: adds a `Ref` (source, shard, row) to each sample under ``__ref__``.
    prefetch_bytes: budget of compressed bytes fetched ahead by this process; default 256 MiB, from a local directory, which
        answers at once, 64 MiB.
    storage_options: credentials, endpoint and the like, in the words of s3fs and gcsfs; docs/storage.md.
    transport: ``"obstore"`` or ``"fsspec"``; default obstore where it is installed and knows all options.
    storage_policy: retries, limits, time-outs, hedging; a `StoragePolicy`.
    cache_dir, cache_bytes: keep what is read of remote shards in this local directory, at most so many bytes of it; shared by
        the processes of a machine. docs/storage.md says when it pays.
    on_event: called with frozen records of `streamshard.observe.events`: throttling as it begins and ends, and counters
        every ten seconds and at the end of an iteration. It runs on the thread where things happen: keep it short. With
        DataLoader workers each process calls its own copy.

    The constructor sends no request. Not thread-safe; each process (DataLoader worker) works on its own copy.
    """

    def __init__(
        self,
        source: str | Mixture,
        *steps: Step,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_buffer: int = 512,
        interleave: int = 2,
        partitions: int | None = None,
        repeat: bool = False,
        topology: Topology | None = None,
        snapshot: str = "cursor",
        verify_ranks: bool = True,
        provenance: bool = False,
        prefetch_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        transport: str | None = None,
        storage_policy: StoragePolicy | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        on_event: Hook | None = None,
    ) -> None:
        super().__init__()
        check_steps(steps)
        _check_counts(shuffle_buffer=shuffle_buffer, interleave=interleave)
        _check_counts(optional=True, prefetch_bytes=prefetch_bytes, partitions=partitions)
        if snapshot not in ("cursor", "contents"):
            raise UsageError(f"snapshot={snapshot!r}: choose 'cursor' or 'contents'")
        if not isinstance(seed, int):
            raise UsageError(f"seed={seed!r} of type {type(seed).__name__} must be an int")
        self.steps = steps
        self.topology = topology
        _check_source(source, steps, repeat=repeat)
        opened = partial(
            open_store, transport=transport, policy=storage_policy, hook=on_event, cache_dir=cache_dir,
            cache_bytes=cache_bytes,
        )  # fmt: skip
        self._mixing, self._stores = _open_source(source, opened, storage_options)
        self._on_event = on_event
        self._order = OrderSpec(
            partitions=0,  # filled in when an iteration begins
            seed=seed,
            shuffle=shuffle,
            buffer=shuffle_buffer if shuffle else 1,
            interleave=interleave if shuffle else 1,
            repeat=repeat,
        )
        self._asked_partitions = partitions
        self._partitions = partitions  # resolved at the first start, or by a state
        self._repeat = repeat
        self._snapshot = snapshot
        self._provenance = provenance
        self._verify_ranks = verify_ranks
        self._first_step: FirstStep | None = None  # once made, it was passed
        self._budget = prefetch_bytes
        self._begin_nowhere()

    def _begin_nowhere(self) -> None:
        """Before anything was read or loaded."""
        self._manifest: Manifest | None = None
        self._history: list[tuple[int, str]] = []  # earlier dataset versions: (first epoch, version)
        self._pending: Snapshot | None = None
        self._pending_pid = 0  # the process that loaded it
        self._rest_first = False  # a pending state of an epoch's end gives the empty rest of it before the next epoch
        self._iteration: Iteration | None = None
        self._reader = Reader()
        self._counted: weakref.ref[Iteration] | None = None  # the newest, whoever reads it
        self._iteration_epoch = 0
        self._iteration_pid = os.getpid()
        self._told_epoch = False
        self._accelerate_count: int | None = None
        self._set_elsewhere = False  # `set_epoch` chose another epoch than the one that would come by itself
        self._lent = False  # a loader reads, and it has the state
        self._asked = False  # an iterator was asked for that has not begun
        self.owned = False  # a loader reads through torch's DataLoader, and says itself when a pass was left
        # Shared with DataLoader workers, however they are started: see the names of the places below.
        self._shared = torch.zeros(3, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]  # torch

    def __getstate__(self) -> dict[str, Any]:
        # A started worker process has no process group to ask, and no use for an iteration of its parent.
        return {
            **self.__dict__,
            "_iteration": None,
            "_counted": None,
            "_first_step": None,
            "topology": resolve(self.topology),
        }

    def __repr__(self) -> str:
        steps = "".join(f", {step.label}" for step in self.steps)
        return f"StreamDataset({self._name}{steps}, seed={self._order.seed}, partitions={self._partitions})"

    @property
    def manifest(self) -> Manifest:
        """The manifest that is read, opened on first use and then kept: a commit meanwhile changes nothing.

        A `Mixture` has one for each of its datasets: `manifests`.
        """
        if self._mixing is not None:
            raise UsageError(f"a Mixture has several manifests; see dataset.manifests, by source: {[*self.manifests]}")
        if self._manifest is None:
            self._manifest = load_manifest(self._store)
        return self._manifest

    @property
    def manifests(self) -> dict[str, Manifest]:
        """The manifests that are read, by source; a plain dataset is called ""."""
        return {"": self.manifest} if self._mixing is None else self._mixing.manifests

    @property
    def _store(self) -> Store:
        """The first dataset's, which stands for all where any will do."""
        return self._stores[0]

    @property
    def _name(self) -> str:
        return repr(self._store.url if self._mixing is None else self._mixing.mixture)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration without a loaded state reads (``repeat=True``: begins with)."""
        return int(self._shared[_EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; reaches DataLoader workers, persistent ones too.

        After `load_state_dict` only the state's own epoch may be set. With ``repeat=True`` it chooses the first epoch, before
        the first item.
        """
        check_epoch_number(epoch)
        workers_read = bool(self._shared[_WORKERS_READ])
        if shards_again(self.ranks):
            epoch = self._epoch_of_accelerate(epoch)
        if self._pending is not None and workers_read:
            self._pending = None  # this process's copy: the workers have consumed theirs
        if self._repeat and (
            self._lent or self._current_iteration() is not None or self._pending is not None or workers_read
        ):
            if not self._told_epoch:
                _logger.info("set_epoch(%d) has no effect: with repeat=True epochs follow one another", epoch)
            self._told_epoch = True
            return
        pending = self._pending
        check_epoch(pending, epoch)
        self._rest_first = pending is not None and epoch == pending.epoch
        self._shared[_EPOCH] = epoch
        self._set_elsewhere = epoch != self._iteration_epoch + 1

    def _epoch_of_accelerate(self, number: int) -> int:
        """Accelerate counts epochs from 0 in every process, a resumed one too: a step of its count is a step of ours."""
        last, self._accelerate_count = self._accelerate_count, number
        if last is None and trainer_trains():
            _logger.warning(
                "Hugging Face's Trainer resumes a StreamDataset by reading it again, and repeats samples when it resumes after "
                "the first epoch, whose length it does not know. Use StreamTrainer(train_loader=StreamLoader(dataset, ...)), "
                "from streamshard.frameworks.transformers"
            )
        if last is None:
            return number or self.epoch
        if number == last:
            return self.epoch
        return (self.epoch if self._shared[_WORKERS_READ] else self._iteration_epoch) + number - last

    def counters(self) -> dict[str, int]:
        """What steps have dropped so far in this process's partitions, by step."""
        iteration = self._current_iteration()
        return iteration.counters() if iteration is not None else {}

    def counts(self, *, over_ranks: bool = False) -> Counts:
        """Tokens, documents and rows that this rank has been given, by source; see `Counts`. They are part of the state, and go
        on after a resume on any number of ranks.

        over_ranks: of all ranks together. A collective of the process group: every process has to call it.

        Raises `UsageError` without a step that counts, such as `Pack`.
        """
        self._refuse_if_elsewhere("counts")
        return self.count(self.standing().values(), over_ranks=over_ranks)

    def standing(self) -> dict[int, PartitionState]:
        """For loaders: where this rank's partitions stand: as loaded, or as read in this process."""
        pending, iteration = self._pending, self._current_iteration()
        if pending is not None:
            turns = {p: part.turn for p, part in pending.partitions.items()}
            done = {p for p, part in pending.partitions.items() if part.done}
            reader = replace(self._current_reader(), worker=0, workers=1)
            live, carried = self._divide(pending.scope, turns, done, reader)
            return {p: pending.partitions[p] for p in [*live, *carried]}
        if iteration is None or self._between_epochs(iteration):
            return {}
        return iteration.partitions()

    def _between_epochs(self, iteration: Iteration) -> bool:
        """Whether an epoch has ended and `set_epoch` has chosen another than the next."""
        return not self._repeat and iteration.exhausted and self._set_elsewhere

    def _refuse_if_elsewhere(self, name: str) -> None:
        if get_worker_info() is None and int(self._shared[_WORKERS_READ]):
            raise UsageError(
                f"dataset.{name}() in the main process cannot know how far the DataLoader's worker processes are; use "
                f"StreamLoader, or track(DataLoader(...)), and ask the loader"
            )
        if self._lent and self._pending is None:
            raise UsageError(
                f"dataset.{name}() would describe what a StreamLoader has read ahead, not what it has handed out; ask "
                f"the loader"
            )

    def count(self, partitions: Iterable[PartitionState], *, over_ranks: bool) -> Counts:
        """For loaders: what had left this rank when `partitions` stood so."""
        if counted(self.steps, start_cursor(self.steps, (0, 0))) is None:
            raise UsageError(f"{self!r} has no step that counts tokens; add one, such as Pack")
        found = [counted(self.steps, part.cursor) for part in partitions]
        counts = sum((one for one in found if one is not None), Counts())
        if over_ranks:
            counts = sum(gather_by_rank(resolve(self.topology).rank, counts), Counts())
        return counts

    def sources(self, *, over_ranks: bool = False) -> dict[str, SourceProgress]:
        """What the partitions of this rank have had of each source of a `Mixture`; see `SourceProgress`. Part of the state
        and with `over_ranks`, like `counts`. Opens the manifests. Raises `UsageError` for a plain dataset.
        """
        self._refuse_if_elsewhere("sources")
        epoch = self._pending.epoch if self._pending is not None else self._iteration_epoch
        return self.progress(self.standing(), epoch, over_ranks=over_ranks)

    def progress(
        self, partitions: Mapping[int, PartitionState], epoch: int, *, over_ranks: bool
    ) -> dict[str, SourceProgress]:
        """For loaders: `sources` when `partitions` stood so."""
        if self._mixing is None:
            raise UsageError("sources() is about a Mixture, and this dataset reads one dataset; see counts()")
        origin = self._mixed(self._mixing, self._partitions or 1, epoch)
        found = [origin.drawn(p, innermost(part.cursor)) for p, part in partitions.items()]
        if over_ranks:
            found = [one for of in gather_by_rank(resolve(self.topology).rank, found) for one in of]
        return {
            path: SourceProgress(*(sum(of[path][place] for of in found if path in of) for place in range(3)), size)  # type: ignore[call-arg]  # three sums
            for path, size in self._mixing.sizes.items()
        }

    def storage_counters(self) -> StorageCounters:
        """What this process has asked of the store for this dataset, and what the current iteration has waited for."""
        iteration = self._counted() if self._counted is not None and self._iteration_pid == os.getpid() else None
        counters = self._store_counters()
        return iteration.storage_counters(counters) if iteration is not None else counters

    def _store_counters(self) -> StorageCounters:
        return reduce(add_counters, (store.counters() for store in self._stores))

    def _current_iteration(self) -> Iteration | None:
        """The newest iteration of this process; a forked worker also holds its parent's, which is none of its business."""
        return self._iteration if self._iteration_pid == os.getpid() else None

    # ------------------------------------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        # A generator, which does nothing before the first item, and has no state_dict: loaders that find a second state on
        # the iterator save it twice and load it after the order has been fixed.
        self._asked = True
        return self._items()

    def _items(self) -> Iterator[Any]:
        try:
            iteration = self._begin()
        finally:
            self._asked = False
        try:
            items = iter(iteration.open())
            for item in items:
                yield item
                break
            iteration.begin_speculation()
            yield from items
            iteration.exhausted = True
        finally:
            iteration.close()
            if iteration is self._iteration and iteration.exhausted and get_worker_info() is None:
                self._shared[_EPOCH] = self._iteration_epoch + 1  # workers only read it: one may end before the others

    def _begin(self) -> Iteration:
        """A new iteration. Nothing is changed before it stands, so that a start that fails can be tried again."""
        worker = get_worker_info()
        reader = self._current_reader()
        if worker is None:
            shards_again(self.ranks)
        pending = self._pending_of(worker)
        if pending is None and not self.owned:
            self._warn_if_left_in_the_middle()
        share = self._shares(pending, reader, [reader])[0]
        if worker is None:
            self.compare_settings(share)
        iteration = self.open_share(share)
        self._started(share, worker)
        if worker is not None and pending is not None:
            self._shared[_CONSUMED_BY] = _loader_round(worker)
        self._iteration = iteration
        return iteration

    def shares(self, workers: int, *, fresh: bool = False) -> list[Share]:
        """For loaders: what this process, or each of its `workers` if there are any, has in the next iteration.

        fresh: in one without a loaded state. Changes nothing; say `lend` when the iteration stands.
        """
        # Read now: workers, and the state, must be about the same version, whatever is committed meanwhile.
        _ = self.manifests
        whole = self._current_reader()
        readers = [replace(whole, worker=w, workers=max(1, workers)) for w in range(max(1, workers))]
        return self._shares(None if fresh else self._pending, whole, readers)

    def for_workers(self) -> StreamDataset:
        """For loaders: a copy to send to worker processes, which get what they read as shares."""
        sent = copy.copy(self)
        sent._pending = sent._iteration = sent._counted = None  # noqa: SLF001  (our own)
        return sent

    @property
    def has_pending_state(self) -> bool:
        """For loaders: whether a state was loaded that no iteration has begun from."""
        return self._pending is not None

    def lend(self, share: Share) -> None:
        """For loaders: an iteration over `share` has begun, and its state is the loader's from now on."""
        self._started(share, None)
        self._iteration, self._lent = None, True

    @property
    def keeps_contents(self) -> bool:
        """For loaders: whether states carry samples."""
        return self._snapshot == "contents"

    def ragged_field(self) -> str | None:
        """For loaders: a field of stored arrays whose lengths surely differ; None if none is known to. Opens the manifest.

        Only the field given as ``length_field`` to the writer is known, and only without steps, which may change it.
        """
        if self.steps or self._mixing is not None:
            return None
        manifest = self.manifest
        field = manifest.length_field
        if field is None or not manifest.schema.get(field, "").startswith("array"):
            return None
        total, samples = manifest.total_length, manifest.total_samples
        same = (manifest.lengths * samples == manifest.samples.astype(np.int64) * total).all() and total % samples == 0
        return None if same else field

    def resolve_partitions(self, workers: int) -> None:
        """For loaders: settle P for this process with so many workers, or refuse workers that do not divide it."""
        reader = replace(self._current_reader(), workers=max(1, workers))
        if self._partitions is None:
            self._partitions = resolve_partitions(self._asked_partitions, reader, shuffle=self._order.shuffle)
        check_divides(self._partitions, reader)

    @property
    def endless(self) -> bool:
        """For loaders: whether epochs follow one another without an end."""
        return self._repeat

    def agreement(self) -> StepAgreement:
        """For loaders: the ranks' agreement about the steps of the iteration that begins."""
        return StepAgreement(self._store.url, resolve(self.topology))

    def first_batch(self, batch: Any) -> None:
        """For loaders: `batch` is the first that is handed out of an iteration; peers must have the same."""
        if self._first_step is not None:
            self._first_step.first_batch(batch)

    def finish(self, epoch: int) -> None:
        """For loaders: `epoch` has been handed out to its end; the next iteration reads the one after."""
        self._shared[_EPOCH] = epoch + 1

    def compare_settings(self, share: Share) -> None:
        """For loaders, in the main process, before anything begins: the first time, see that the ranks of a job agree."""
        if self._verify_ranks and self._first_step is None:
            first = FirstStep(self._store.url, resolve(self.topology))
            first.begins(self._fingerprint(), None if self._pending is not None else share.epoch)
            self._first_step = first

    def _started(self, share: Share, worker: Any) -> None:
        self._shared[_WORKERS_READ] = int(worker is not None)
        if worker is None and not self._repeat:
            self._shared[_EPOCH] = share.epoch
        self._reader, self._iteration_epoch = share.reader, share.epoch
        self._pending, self._lent, self._rest_first, self._set_elsewhere = None, False, False, False

    def _shares(self, pending: Snapshot | None, whole: Reader, readers: Sequence[Reader]) -> list[Share]:
        """The parts of `readers`, which divide what `whole` has in the next iteration."""
        epoch = self.epoch
        if pending is not None:
            check_scope(pending.scope, whole)
            if not _keeps_workers(pending, readers[0]):
                self._report_ragged(pending)
            epoch = pending.epoch
            if self._begins_next(pending):
                pending, epoch = None, epoch + 1
        begun = pending is not None and pending.partitions
        snapshot = pending if pending is not None and begun else self._start_snapshot(readers[0], epoch)
        return [self._cut(snapshot, reader) for reader in readers]

    def _begins_next(self, pending: Snapshot) -> bool:
        """Whether going on from `pending` means the next epoch, as it does in the process that went on without stopping.

        Not in a worker that was given the state itself: its loader asks it for the rest of the epoch first, whatever the state.
        Nor after ``set_epoch`` with the state's own epoch.
        """
        given_to_worker = get_worker_info() is not None and self._pending_pid == os.getpid()
        return pending.at_end and not given_to_worker and not self._rest_first

    def _pending_of(self, worker: Any) -> Snapshot | None:
        """The loaded state, if it still waits. Workers that are started for every epoch get a copy of their parent's each
        time; only those of the first round may use it. A state that a worker loaded itself is its own.
        """
        inherited = self._pending_pid != os.getpid()
        if worker is not None and inherited and int(self._shared[_CONSUMED_BY]) not in (0, _loader_round(worker)):
            return None
        return self._pending

    def _warn_if_left_in_the_middle(self) -> None:
        last = self._current_iteration()
        if last is not None and not last.exhausted and any(run.turn for run in last.runs):
            _logger.warning(left_in_the_middle(self.epoch))

    def _report_ragged(self, pending: Snapshot) -> None:
        turns = {p: state.turn for p, state in pending.partitions.items()}
        done = {p for p, state in pending.partitions.items() if state.done}
        ahead = raggedness(turns, done, self._partitions or 1) if pending.scope == "full" else 0
        if ahead:
            _logger.warning(
                "the state is ragged: some partitions are ahead of the others, by %d items in all (ranks were saved at "
                "different steps). Nothing is lost or repeated; until the others have caught up the order differs from that "
                "of an uninterrupted run",
                ahead,
            )

    def ranks(self) -> int:
        """For loaders: the number of data-parallel ranks."""
        return self._current_reader().ranks

    def _current_reader(self) -> Reader:
        worker = get_worker_info()
        topology = resolve(self.topology)
        if worker is None:
            return Reader(topology.rank, topology.size)
        return Reader(topology.rank, topology.size, worker.id, worker.num_workers)

    def _start_snapshot(self, reader: Reader, epoch: int) -> Snapshot:
        """The state at the beginning of `epoch`."""
        if self._partitions is None:
            self._partitions = resolve_partitions(self._asked_partitions, reader, shuffle=self._order.shuffle)
        parts = self._partitions
        sources = [(epoch, 0)] * parts if self._mixing is None else self._mixed(self._mixing, parts, epoch).starts()
        fresh = {p: PartitionState(0, done=False, cursor=start_cursor(self.steps, at)) for p, at in enumerate(sources)}
        return Snapshot("full", {}, epoch, fresh)

    def _cut(self, snapshot: Snapshot, reader: Reader) -> Share:
        assert self._partitions is not None  # resolved by _start_snapshot or by the state
        check_divides(self._partitions, reader)
        states = snapshot.partitions
        done = {p for p, state in states.items() if state.done}
        live, carried = self._divide(snapshot.scope, {p: state.turn for p, state in states.items()}, done, reader)
        if _keeps_workers(snapshot, reader):
            first = reader.rank * reader.workers if snapshot.scope == "full" else 0
            live = [p for p in snapshot.workers[first + reader.worker] if p not in done]
        blobs = {key: blob for key, blob in snapshot.contents.items() if set(live) & set(map(int, key.split(",")))}
        return Share(
            reader,
            self._partitions,
            tuple(self._history),
            snapshot.epoch,
            {p: states[p] for p in live},
            {p: states[p] for p in carried},
            blobs,
            [] if self._mixing is None else self._mixing.versions,
            snapshot.batches or 0,
        )

    def items_left(self, shares: Sequence[Share]) -> list[int] | None:
        """For loaders: the items that are to come in each share; None where only reading tells, see `why_uncounted`."""
        if self._repeat or uncounted(self.steps) or self._mixing is not None:
            return None
        first = shares[0]  # all are about the same epoch
        book = Book(replace(self._order, partitions=first.parts), self._timeline(first.history))
        order = book.epoch(first.epoch)[0]
        found = []
        for share in shares:
            left = [
                items_left(self.steps, part.cursor, order.partition_size(p) - innermost(part.cursor)[1])
                for p, part in share.live.items()
            ]
            found.append(sum(number for number in left if number is not None))
        return found

    def items_left_of_ranks(self, workers: int, *, fresh: bool = False) -> list[list[int]] | None:
        """For loaders: `items_left` of each rank's workers in the next iteration; None too where a state does not say."""
        pending = None if fresh else self._pending
        if pending is not None and pending.partitions and pending.scope != "full":
            return None
        whole, each = self._current_reader(), max(1, workers)
        readers = [Reader(rank, whole.ranks, w, each) for rank in range(whole.ranks) for w in range(each)]
        left = self.items_left(self._shares(pending, whole, readers))
        return None if left is None else [left[first : first + each] for first in range(0, len(left), each)]

    def _nothing_left(self, snapshot: Snapshot) -> bool:
        """Whether the partitions of a state are known to have no item left."""
        live = {p: part for p, part in snapshot.partitions.items() if not part.done}
        share = Share(Reader(), self._partitions or 1, tuple(self._history), snapshot.epoch, live, {}, {})
        return bool(snapshot.partitions) and self.items_left([share]) == [0]

    def why_uncounted(self) -> str:
        """For loaders: why `items_left` knows nothing."""
        if self._repeat:
            return "repeat=True has no end"
        if self._mixing is not None:
            return "how many samples a Mixture gives is known only after reading"
        if uncounted(self.steps):
            return f"what leaves {uncounted(self.steps)} is known only after reading"
        return "it depends on other ranks, of which the loaded state of this rank knows nothing"

    def marks(self) -> dict[int, Mark]:
        """For loaders: where the partitions that this process reads stand after the last item yielded."""
        iteration = self._current_iteration()
        return {} if iteration is None else {run.p: run.mark() for run in iteration.runs}

    def contents(self) -> dict[str, bytes]:
        """For loaders: the samples of a contents snapshot of the iteration in this process."""
        iteration = self._current_iteration()
        return {} if iteration is None else iteration.contents()

    def open_share(self, share: Share, *, lent: bool = False) -> Iteration:
        """For loaders, with `lent`: the iteration over a share of `shares`, in this process or in a worker's."""
        if self._mixing is not None:
            self._mixing.versions = share.mixture  # a worker process may have others
        origin = self._origin(share)
        iteration = Iteration(
            origin,
            self.steps,
            self._context(share.parts),
            share.live,
            share.carried,
            budget=self._budget or self._store.look_ahead(len(share.live) * origin.stripes),
            keep=self._snapshot == "contents",
            contents=_contents(share),
            lent=lent,
            report=self._report_counters if self._on_event is not None else None,
        )
        self._counted, self._iteration_pid = weakref.ref(iteration), os.getpid()
        return iteration

    def _origin(self, share: Share) -> Plain | MixedOrigin:
        if self._mixing is not None:
            return self._mixed(self._mixing, share.parts, share.epoch)
        spec = replace(self._order, partitions=share.parts)
        return Plain(Book(spec, self._timeline(share.history)), spec.interleave)

    def _mixed(self, mixing: Mixing, parts: int, epoch: int) -> MixedOrigin:
        mixing.settle(self._order.buffer)
        return MixedOrigin(mixing, replace(self._order, partitions=parts), epoch)

    def _context(self, parts: int) -> StepContext:
        refs = wants_refs(self.steps) or self._provenance
        sources = 1 if self._mixing is None else self._mixing.mixture.weighted
        return StepContext(
            self._order.seed, parts, refs=refs, provenance=self._provenance, sources=sources, window=window(self.steps)
        )

    def dropped(self, partitions: Mapping[int, PartitionState]) -> dict[str, int]:
        """For loaders: what the steps had dropped when `partitions` stood so."""
        parts = self._partitions or 1
        finished = Finished if self._mixing is None else self._mixed(self._mixing, parts, 0).finished
        return dropped(finished, self.steps, self._context(parts), partitions.values())

    def _report_counters(self, iteration: Iteration) -> None:
        try:
            self._on_event(iteration.storage_counters(self._store_counters()))  # type: ignore[misc]  # only if there is one
        except Exception:  # a hook's fault must not fail a read
            _logger.exception("on_event=%r failed", self._on_event)

    def _divide(
        self, scope: str, turns: dict[int, int], done: Collection[int], reader: Reader
    ) -> tuple[list[int], list[int]]:
        """(live, finished) partitions of this reader, out of a state of `scope`."""
        assert self._partitions is not None  # see _cut
        if scope == "full":
            return owned(turns, done, self._partitions, reader)
        if scope.startswith("rank"):
            within = Reader(worker=reader.worker, workers=reader.workers)
            live, _ = owned(turns, done, self._partitions, within)
            return live, [p for p in sorted(done) if (p // reader.ranks) % reader.workers == reader.worker]
        return sorted(set(turns) - set(done)), sorted(done)

    def _timeline(self, history: Sequence[tuple[int, str]]) -> list[tuple[int, ShardAccess]]:
        current = self.manifest
        entries = history or [(0, current.version)]
        manifests = [
            (first, current if v == current.version else load_manifest(self._store, v)) for first, v in entries
        ]
        return [(first, ShardAccess(self._store, manifest)) for first, manifest in manifests]

    # ---------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """Where the iteration stands after the last item yielded; see docs/state.md for the format.

        Takes microseconds and shares nothing with live objects. Raises `UsageError` in the main process once DataLoader
        workers read: only they know where they are.
        """
        if get_worker_info() is None and int(self._shared[_WORKERS_READ]):
            raise UsageError(
                "dataset.state_dict() in the main process cannot know how far the DataLoader's worker processes are; use "
                "StreamLoader or torchdata's StatefulDataLoader and save the loader's state_dict(), or num_workers=0"
            )
        refuse_bare_dcp("StreamDataset")
        refuse_one_file_for_all(self.ranks)
        if self._pending is not None:
            return self._pending.encode()
        if self._lent:
            raise UsageError(
                "dataset.state_dict() would describe what a StreamLoader has read ahead, not what it has handed out; save "
                "the loader's state_dict()"
            )
        iteration = self._current_iteration()
        if iteration is None or self._asked or self._between_epochs(iteration):
            return Snapshot("full", self._fingerprint(), self.epoch).encode()
        return Snapshot(
            scope_name(self._reader),
            self._fingerprint(),
            self._iteration_epoch,
            iteration.partitions(),
            iteration.contents(),
        ).encode()

    def skip(self, steps: int, *, batch_size: int = 1) -> None:
        """Go on so many steps later, as if they had been taken: past a loss spike, say. Nothing of them is read.

        A step is `batch_size` items of each rank: pass it where neither a loader of ours nor a `Batch` step forms the batches.
        All ranks have to call it, at the same step. Needs steps that give an item for a sample, or for a `Batch` of them;
        raises `UsageError` for others and beyond the end of a finite epoch, `StateError` for a ragged state.
        """
        self.load_state_dict(self.after(self.state_dict(), steps, batch_size))

    def seek(self, tokens: int, *, batch_size: int = 1) -> None:
        """Go on at the first step before which all ranks together have consumed at least `tokens`: with ``repeat=True`` since
        the run began, else in this epoch. Reads indexes, no samples. Needs a dataset with a ``length_field``; else as `skip`.
        """
        self.load_state_dict(self.at_tokens(self.state_dict(), tokens, batch_size))

    def after(self, state: State, steps: int, items: int) -> State:
        """For loaders: the full state so many steps of `items` items a rank after `state`."""
        _check_counts(least=0, steps=steps)
        if decode_state(state).at_end:  # what comes next is the next epoch
            state = {**start_of(state), "epoch": int(state["epoch"]) + 1}
        return state_after(state, steps, self.whereabouts(items, int(state["epoch"])), self.steps)

    def at_tokens(self, state: State, tokens: int, items: int) -> State:
        """For loaders: the full state at `tokens` of the run, or epoch, of `state`."""
        _check_counts(least=0, tokens=tokens)
        start = start_of(state)
        return self.after(start, self.whereabouts(items, int(start["epoch"])).step_at(tokens), items)

    def whereabouts(self, items: int, epoch: int) -> Whereabouts:
        """For loaders: what is in which step of `items` items a rank, from the beginning of `epoch`."""
        if self._mixing is not None:
            raise UsageError(
                "what is in a step of a Mixture depends on the data: who gives the next sample follows from the tokens before "
                "it. Iterate with provenance=True and look at each sample's '__ref__'"
            )
        self.resolve_partitions(0)
        book = Book(replace(self._order, partitions=self._partitions or 1), self._timeline(self._history))
        return Whereabouts(book, self._fingerprint(), ranks=self.ranks(), items=items, epoch=epoch)

    def encode_state(
        self,
        epoch: int,
        partitions: dict[int, PartitionState],
        contents: dict[str, bytes],
        batches: int,
        *,
        ended: bool,
        workers: Sequence[Sequence[int]] = (),
    ) -> State:
        """For loaders: the state of this rank with its `partitions` so, after `batches` of the epoch."""
        scope = scope_name(replace(self._reader, worker=0, workers=1))
        turns = tuple(map(tuple, workers))
        return Snapshot(scope, self._fingerprint(), epoch, partitions, contents, batches, ended, turns).encode()

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Go on from `state` with the next iteration, which consumes it.

        allow: accept a change knowingly: ``"batch"`` (other `Batch` sizes), ``"steps"`` (other steps: each partition goes on
            after the last source sample that was used up whole; with `Pack`, where the window began that it was in, and the
            log says what that repeats and leaves out), ``"mixture"`` (other weights or rules, or more sources), ``"dataset"``
            (another version, used from the epoch after the highest that the state has begun; full states only).

        Raises `StateError` naming the first thing that does not fit, both values, and the cure.
        """
        allow = {allow} if isinstance(allow, str) else set(allow)
        snapshot = decode_state(state)
        saved = dict(snapshot.fingerprint)
        history = [(int(first), str(version)) for first, version in saved.pop("history", [])]
        versions = self._mixture_of(saved, allowed="mixture" in allow)
        current = self._fingerprint()
        current.pop("history", None)
        if self._mixing is not None:
            saved["mixture"], current["mixture"], saved["dataset"] = versions, versions, current["dataset"]
        current["partitions"] = self._asked_partitions
        check_fingerprint(saved, current, allow)
        partitions = snapshot.partitions
        if "steps" in allow and saved["steps"] != current["steps"]:
            _tell_what_is_lost(saved["steps"], partitions)
            partitions = {p: self._restart_steps(saved["steps"], part) for p, part in partitions.items()}
        if partitions and saved["dataset"] != current["dataset"]:
            history = self._grow(snapshot, history or [(0, saved["dataset"])])
        if self._mixing is not None:
            self._mixing.versions = versions
        self._history = history
        self._partitions = self._asked_partitions or saved["partitions"]
        self._iteration, self._lent = None, False
        if get_worker_info() is None:
            self._shared[_WORKERS_READ] = self._shared[_CONSUMED_BY] = 0
        if not self._repeat:
            self._load_epoch(snapshot)
        self._pending_pid, self._rest_first = os.getpid(), False
        self._pending = replace(snapshot, fingerprint=self._fingerprint(), partitions=partitions)

    def _mixture_of(self, saved: dict[str, Any], *, allowed: bool) -> list[Any]:
        """The versions of the mixture's parameters after a load, if there is a mixture."""
        if self._mixing is None and "mixture" not in saved:
            return []
        if self._mixing is None or "mixture" not in saved:
            one, other = ("a Mixture", "one dataset") if self._mixing is None else ("one dataset", "a Mixture")
            raise StateError(f"the state was saved with {one}, and this dataset reads {other}: pass the same source")
        return self._mixing.loaded(saved["mixture"], saved["dataset"], self._order.buffer, allowed=allowed)

    def _load_epoch(self, snapshot: Snapshot) -> None:
        """The epoch that comes after the loaded state. All workers load states of the same epoch, some perhaps of its end:
        whoever comes last must not take back the step to the next that those make.
        """
        if snapshot.at_end or (get_worker_info() is not None and self._nothing_left(snapshot)):
            self._shared[_EPOCH] = snapshot.epoch + 1
        elif get_worker_info() is None or int(self._shared[_EPOCH]) != snapshot.epoch + 1:
            self._shared[_EPOCH] = snapshot.epoch

    def _restart_steps(self, saved: list[dict[str, Any]], part: PartitionState) -> PartitionState:
        held = held_in(saved, part.cursor)
        counts = None if held is None else held.counted
        return PartitionState(part.turn, part.done, start_cursor(self.steps, innermost(part.cursor), counts))

    def _grow(self, snapshot: Snapshot, history: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """The versions by first epoch when the current one joins after everything that `snapshot` has begun."""
        if snapshot.scope != "full":
            raise StateError(
                f"the dataset changed and the state is that of {snapshot.scope}: where the new version begins depends on "
                f"all partitions; pass merge_states(states)"
            )
        begun = max(reached(self.steps, part.cursor) for part in snapshot.partitions.values())
        return [*history, (begun + 1, self.manifest.version)]

    def _fingerprint(self) -> dict[str, Any]:
        """Everything that shapes the order, by the names that `load_state_dict` uses in its messages."""
        spec = self._order
        found: dict[str, Any] = {
            "algorithm": ALGORITHM,
            "dataset": self.manifest.version if self._mixing is None else self._mixing.datasets,
            "seed": spec.seed,
            "shuffle": spec.shuffle,
            "shuffle_buffer": spec.buffer,
            "initial": spec.initial,
            "interleave": spec.interleave,
            "run": spec.run,
            "repeat": spec.repeat,
            "partitions": self._partitions,
            "steps": steps_fingerprint(self.steps),
            "batch": batch_fingerprint(self.steps),
        }
        if self._mixing is not None:
            found["mixture"] = self._mixing.settle(spec.buffer)
        if self._history:
            found["history"] = [list(entry) for entry in self._history]
        return found


def left_in_the_middle(epoch: int) -> str:
    """What to tell who starts over without having finished."""
    return (
        f"a new iteration begins while the last one was left in the middle: it starts at the beginning of epoch {epoch} again, "
        f"and samples already delivered come a second time. To go on, load a state first"
    )


def _open_source(
    source: str | Mixture, opened: Callable[[str, Mapping[str, Any] | None], Store], options: Mapping[str, Any] | None
) -> tuple[Mixing | None, list[Store]]:
    """What a dataset reads, and the stores that it is in."""
    if isinstance(source, Mixture):
        mixing = Mixing(source, lambda one: opened(one.url, one.storage_options or options))
        return mixing, [*mixing.stores.values()]
    return None, [opened(source, options)]


def _check_source(source: object, steps: Sequence[Step], *, repeat: bool) -> None:
    for _, one in source.leaves() if isinstance(source, Mixture) else ():
        check_steps([*one.steps, *steps])
    if isinstance(source, Mixture) and source.never_ends and not repeat:
        raise UsageError(
            f"{source!r} never ends, since a source of it is repeated for ever: pass repeat=True, or give it max_epochs=, or "
            f"exhausted='drop' or 'stop'"
        )
    if not isinstance(source, str | os.PathLike | Mixture | Source):
        raise UsageError(
            f"a StreamDataset reads a URL or a Mixture, not a {type(source).__name__}; for several datasets pass "
            f"Mixture({{name: url, ...}}, weights=...)"
        )
    if isinstance(source, Source):
        raise UsageError(f"a Source belongs into a Mixture; pass StreamDataset({source.url!r}, step, ...)")


def _tell_what_is_lost(steps: list[dict[str, Any]], partitions: Mapping[int, PartitionState]) -> None:
    """Other steps cannot go on in the middle of a window that a step has planned."""
    held = [found for part in partitions.values() if (found := held_in(steps, part.cursor)) is not None]
    rows, waiting = sum(found.rows for found in held), sum(found.waiting for found in held)
    if rows or waiting:
        _logger.warning(
            "with other steps, each partition goes on where the window begins that its %s was in: the documents of %d rows "
            "that had left come again, and %d documents that waited for a later window never come",
            held[0].step, rows, waiting,
        )  # fmt: skip


def _keeps_workers(snapshot: Snapshot, reader: Reader) -> bool:
    """Whether as many readers go on as there were, each with the partitions that one of them had."""
    readers = reader.readers if snapshot.scope == "full" else reader.workers
    return len(snapshot.workers) == readers > 1


def _contents(share: Share) -> dict[int, Contents]:
    found: dict[int, Contents] = {}
    for blob in share.contents.values():
        found.update({p: samples for p, samples in decode_contents(blob).items() if p in share.live})
    return found


def _loader_round(worker: Any) -> int:
    """A number that the workers of one pass of a DataLoader share: torch draws a base seed for each."""
    return int(worker.seed) - int(worker.id) or 1


def _check_counts(*, optional: bool = False, least: int = 1, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name}={value!r} must be an int >= {least}")
