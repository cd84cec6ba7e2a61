"""`StreamLoader`: batches of a `StreamDataset`, formed ahead of time, with the state of what was handed out.

A thread (or worker processes) reads ahead and forms batches; each travels with the positions that its partitions had after
it. Those of the last batch handed out are the state, so nothing that waits is in it. docs/loader.md is the user's page.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from streamshard.dataset import StreamDataset
from streamshard.distributed.channel import Channel
from streamshard.errors import UsageError, WorkerError
from streamshard.iteration import Mark, Share
from streamshard.loading.broadcast import ReceivedSource, SentSource
from streamshard.loading.equal import EqualSource, Left
from streamshard.loading.formed import Source
from streamshard.loading.local import LocalSource, NextBuffers
from streamshard.loading.positioned import PositionedLoader
from streamshard.loading.processes import ProcessSource, WorkerGroup
from streamshard.loading.run import BufferPool, Run, Staging, no_buffers, pinned
from streamshard.loading.worker import Job
from streamshard.observe.events import LoaderCounters, StorageCounters
from streamshard.staging.buffers import Buffers
from streamshard.staging.device import check_device, open_device
from streamshard.staging.stager import Slot
from streamshard.steps.pipeline import BATCHING
from streamshard.steps.tensors import Empty, fresh
from streamshard.steps.tensors import collate as default_collate

_logger = logging.getLogger("streamshard")


class StreamLoader(PositionedLoader):
    """Batches of a dataset, read ahead while the training loop computes.

    dataset: what to read. The loader has its state from the first batch on.
    batch_size: items of a batch, taken over all partitions of this rank in rotation. None hands out the pipeline's own items,
        such as the micro-batches of a `Batch` step.
    collate: makes a batch out of a list of items; default `streamshard.collate`.
    workers: 0 runs the pipeline in a thread of this process, which is the fast way unless functions in `Map` hold the GIL for
        long. n runs it in n processes; batches come through shared memory, and their order does not depend on n, except with
        a `collate` of your own, which gets the items of one worker's partitions.
    start_method: how worker processes are started; ``"forkserver"``, ``"spawn"`` or ``"fork"``. The first two need
        functions that can be imported, and ``if __name__ == "__main__":`` in scripts.
    prefetch: batches that wait ready. Two cover a producer that is a little uneven; more cost memory and a later stop. 0 forms
        each batch when it is asked for, in the thread that asks: the fast way (by a fifth) where the loop has nothing to do
        meanwhile, as when data is counted or copied. It is for ``workers=0`` without a `device`.
    device: stages batches there before they are needed: ``"cuda"``, ``"cuda:1"``, or ``"cpu"``, which runs the same program
        without an accelerator. None hands out host memory.
    slots: batches on the device at a time, the one in use included.
    pin_memory: whether batches are copied from pinned host memory; default whether the device is CUDA. With ``device=None``,
        True hands out pinned tensors.
    static_buffers: hand out the same `slots` device addresses in rotation, for CUDA graphs. A batch is then overwritten
        when the `slots`-th one after it is asked for; otherwise every batch has memory of its own.
    dtypes: field -> torch dtype to convert to on the device, after the (smaller) copy; ``"images.pixels"`` for a nested one.
    accumulation: batches of one optimizer step. The state is then always that of the last complete step.
    remainder: what happens at the end of an epoch where ranks have different numbers of batches, or short ones. ``"keep"``
        hands out what there is. ``"drop"`` ends when any rank has no whole batch; ``"pad"`` goes on until none has anything,
        filling up with rows that have ``loss_mask`` 0, ``labels`` -100 and ``padding`` True, a field of all batches then.
        With both every rank makes the same number of steps, agreed ahead of the training loop. What was dropped and padded is
        logged at the end and in `counters`. Needs a process group where there are several ranks.

    The constructor opens the manifest only where a wish can be refused by it: a `batch_size` without steps and `collate`.

    One iteration at a time: a new one ends the one before. Not thread-safe. Raises `UsageError` at construction for arguments
    that cannot work together.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        start_method: str = "forkserver",
        prefetch: int = 2,
        device: str | torch.device | None = None,
        slots: int = 2,
        pin_memory: bool | None = None,
        static_buffers: bool = False,
        dtypes: Mapping[str, torch.dtype] | None = None,
        accumulation: int = 1,
        remainder: str = "keep",
    ) -> None:
        _check_dataset(dataset, batch_size, collate)
        _check_counts(batch_size=batch_size, accumulation=accumulation, slots=slots)
        _check_workers(workers, start_method)
        self._device = check_device(device, pin_memory=pin_memory)
        _check_prefetch(prefetch, workers, self._device)
        _check_staging(self._device, static_buffers, dtypes)
        _check_remainder(remainder, dataset)
        super().__init__(dataset)
        self._remainder = remainder
        self._equal: EqualSource | None = None  # of the newest iteration
        self._batch_size = batch_size
        self._collate = collate
        self._workers = workers
        self._start_method = start_method
        self._group: WorkerGroup | None = None
        self._prefetch = prefetch
        self._slots = slots
        self._pin_memory = pin_memory
        self._static_buffers = static_buffers
        self._dtypes = dict(dtypes or {})
        self._places: list[Slot] = []
        self._accumulation = accumulation
        self._run: Run | None = None
        self._last: Run | None = None  # one that was closed, which still knows its contents
        self._kept: dict[str, bytes] = {}  # contents of a closed run with workers
        self._channel: Channel | None = None
        dataset.resolve_partitions(workers)
        ragged = dataset.ragged_field() if batch_size is not None and batch_size > 1 and collate is None else None
        if ragged is not None:
            raise UsageError(
                f"StreamLoader(batch_size={batch_size}): the arrays of field {ragged!r} have different lengths and cannot be "
                f"stacked; pass collate=functools.partial(streamshard.collate, ragged='pad') (or 'list'), or make them equal "
                f"with a step"
            )

    def __repr__(self) -> str:
        return f"StreamLoader({self.dataset!r}, batch_size={self._batch_size})"

    # ------------------------------------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        run = self._begin()
        position, end = run.position, None
        try:
            while not position.complete and (formed := run.take()) is not None:
                if formed.last:
                    self._ended(position, formed.marks)
                    break
                if position.handed_out == 0:
                    self.dataset.first_batch(formed.batch)
                if position.handed_out + 1 == position.expected:  # whoever counts may not come again to hear of the end
                    end = run.take()
                self._handed_out(position, formed.marks)
                if end is not None:
                    self._ended(position, end.marks)
                yield formed.batch
            if position.complete:
                self._tell_left()
                self._confirm_end_unless_by_call()
            elif run is not self._run:
                raise UsageError(
                    "this iterator was ended by a newer one, or by close(), of the same StreamLoader; use one at a time"
                )
        finally:
            run.close()

    def _tell_left(self) -> None:
        left = self._equal.left if self._equal is not None else Left()
        if any(left):
            _logger.info(
                "remainder=%r at the end of epoch %d: this rank left out %d rows and added %d of padding",
                self._remainder, self._position.epoch if self._position else 0, left.dropped, left.padded,
            )  # fmt: skip

    def _begin(self) -> Run:
        """A new run. Nothing is changed before it stands, so that a start that fails can be tried again."""
        self._end_run()
        self._refuse_bare_trainer()
        self._check_confirmed()
        self._warn_if_left_in_the_middle()
        shares = self.dataset.shares(self._workers)
        self.dataset.compare_settings(shares[0])
        position = self._new_position(shares, self._accumulation)
        staging = self._staging()
        pool = staging.pool if staging is not None else None
        source = self._source(shares, pool)
        self.dataset.lend(shares[0])
        self._position = position
        pins = staging is None and bool(self._pin_memory)
        self._run = run = Run(source, position, self._prefetch, staging, pin=pins)
        run.start()
        return run

    def _staging(self) -> Staging | None:
        if self._device is None:
            return None
        device = open_device(self._device, pin_memory=self._pin_memory is not False)
        if not self._places:  # kept over iterations: a CUDA graph holds on to the addresses
            self._places = [Slot(device, static=self._static_buffers) for _ in range(self._slots)]
        pool = BufferPool(device, self._prefetch + 2) if self._collates else None
        return Staging(device, self._places, self._dtypes, pool)

    @property
    def _collates(self) -> bool:
        """Whether batches are put together here, and so into memory of our choice."""
        return self._workers > 0 or (self._batch_size is not None and self._collate is None)

    @property
    def _empty(self) -> Empty:
        return pinned if self._pin_memory else fresh

    def share(self, group: Any) -> None:
        """See `broadcast_batches`."""
        if not self._prefetch:
            raise UsageError(
                "broadcast_batches needs a loader that is ahead of the training loop: pass prefetch=1 or more to StreamLoader"
            )
        self._end_run()
        self._channel = Channel(group)

    def _source(self, shares: list[Share], pool: BufferPool | None) -> Source:
        buffers = pool.next if pool is not None else no_buffers
        agreement = None if self._remainder == "keep" else self.dataset.agreement()  # of all, also of those who receive
        if self._channel is not None and not self._channel.sends:
            return ReceivedSource(self._channel, buffers, self._empty, _place(shares))
        source = self._read_source(shares, buffers)
        if agreement is not None:
            source = self._equal = EqualSource(
                source, agreement, self._batch_size, pad=self._remainder == "pad",
                give_back=None if pool is None else pool.give_back,
            )  # fmt: skip
        return source if self._channel is None else SentSource(source, self._channel, _place(shares))

    def _read_source(self, shares: list[Share], buffers: NextBuffers) -> Source:
        if not self._workers:
            return LocalSource(self.dataset.open_share(shares[0], lent=True), self._batch_size, self._form, buffers)
        if self._group is None or not self._group.alive:
            self._end_group()
            job = Job(self.dataset.for_workers(), self._batch_size, self._collate, self._workers, self._prefetch)
            self._group = WorkerGroup(job, self._start_method)
        return ProcessSource(self._group, shares, buffers, self._empty, keep=self.dataset.keeps_contents)

    def _form(self, items: list[Any], buffers: Buffers | None) -> Any:
        if self._collate is not None:
            return self._collate(items)
        return default_collate(items, empty=self._empty if buffers is None else buffers.empty)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def skip(self, steps: int) -> None:
        """As `StreamDataset.skip`, in batches."""
        self.load_state_dict(self.dataset.after(self.state_dict(), steps, self._batch_size or 1))

    def seek(self, tokens: int) -> None:
        """As `StreamDataset.seek`, to the beginning of a batch."""
        self.load_state_dict(self.dataset.at_tokens(self.state_dict(), tokens, self._batch_size or 1))

    def close(self) -> None:
        """Stop reading ahead and let go of threads, processes and memory. The state stays; iterating again begins anew."""
        if self._run is not None:
            self._last = self._run
        if self._workers and self._run is not None:
            try:
                self._kept = self._run.contents()
            except WorkerError:  # contents are a cache: a state without them resumes as exactly, by reading again
                self._kept = {}
            self._last = None
        self._end_run()
        self._end_group()
        self._places = []

    def _end_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def __enter__(self) -> StreamLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------- what the base class asks for

    def _reading(self) -> int:
        return self._workers

    def _count(self, items: Sequence[int]) -> int:
        size = self._batch_size or 1
        apart = self._collate is not None and self._workers > 0  # each worker's items are batched by themselves
        short = 0 if self._remainder == "drop" else size - 1
        return sum((n + short) // size for n in (items if apart else [sum(items)]))

    def _expect(self, shares: list[Share], *, fresh: bool = False) -> int | None:
        if self._remainder == "keep":
            return super()._expect(shares, fresh=fresh)
        ranks = self.dataset.items_left_of_ranks(self._workers, fresh=fresh)
        if ranks is None:
            return None
        return (min if self._remainder == "drop" else max)(self._count(items) for items in ranks)

    def _contents(self) -> dict[str, bytes]:
        run = self._run or self._last
        return run.contents() if run is not None else self._kept

    def _acknowledge(self, marks: Mapping[int, Mark]) -> None:
        if self._run is not None:
            self._run.acknowledge(marks)

    def _reset(self) -> None:
        self._end_run()
        self._last, self._kept = None, {}

    # ----------------------------------------------------------------------------------------------------- counters

    def counters(self) -> LoaderCounters:
        """What was handed out so far in this iteration, how long it was waited for, and what steps have dropped."""
        position, run = self._position, self._run
        if position is None or run is None:
            return LoaderCounters()
        waits, seconds = run.waited()
        left = self._equal.left if self._equal is not None else Left()
        dropped = self.dataset.dropped(position.partitions())
        return LoaderCounters(position.handed_out, waits, seconds, dropped, left.dropped, left.padded)

    def storage_counters(self) -> StorageCounters:
        """As `StreamDataset.storage_counters`: of this process. Workers have their own store, and count with `on_event`."""
        return self.dataset.storage_counters()


def broadcast_batches(loader: StreamLoader, group: Any) -> StreamLoader:
    """`loader`, which from its next iteration on reads only in the first process of `group` and gives the others its batches.

    group: the process group of tensor-, pipeline- or context-parallel peers, such as ``mesh.get_group("tp")``. All its
        processes must have built the same loader, with the same topology, and call this together; batches then travel ahead of
        the training loop, over connections of their own on the host (gloo). The state is that of what was handed out, on all.

    The store is read once per data-parallel rank, but for the manifest. Worth it where the store or the cores are the limit:
    a batch is copied twice more. Iterations must begin and end together on all peers. With ``snapshot="contents"`` only the
    reader's state has the samples.

    Raises `UsageError` without a process group, on a process outside of `group`, and for ``prefetch=0``. In an iteration
    `WorkerError` on all peers when the reader fails or is gone, and on the reader when a peer is gone.
    """
    loader.share(group)
    return loader


def _place(shares: Sequence[Share]) -> str:
    """Where an iteration begins, for people; equal if all of it is."""
    first = shares[0]
    states = [(p, part.encode()) for share in shares for p, part in sorted(share.live.items())]
    digest = hashlib.blake2b(repr(states).encode(), digest_size=4).hexdigest()
    return (
        f"data-parallel rank {first.reader.rank} of {first.reader.ranks}, epoch {first.epoch}, after {first.batches} batches, "
        f"partitions {digest}"
    )


def _check_dataset(dataset: object, batch_size: int | None, collate: object) -> None:
    if not isinstance(dataset, StreamDataset):
        raise UsageError(
            f"StreamLoader reads a StreamDataset, not a {type(dataset).__name__}; use torch's DataLoader for others"
        )
    batches = [step.label for step in dataset.steps if step.fingerprint()["step"] in BATCHING]
    if batch_size is not None and batches:
        raise UsageError(
            f"StreamLoader(batch_size={batch_size!r}) would batch the batches of {batches[0]}; leave batch_size out, or take "
            f"{batches[0]} out of the dataset"
        )
    if collate is not None and batch_size is None:
        raise UsageError(
            "StreamLoader(collate=...) is called for batches of the loader's: pass batch_size= too, or Batch(n, "
            "collate_fn=...) as a step"
        )
    if collate is not None and not callable(collate):
        raise UsageError(f"StreamLoader(collate={collate!r}): pass a function of a list of items")


def _check_workers(workers: object, start_method: str) -> None:
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
        raise UsageError(f"StreamLoader(workers={workers!r}): pass 0 for threads, or a number of processes")
    if start_method not in multiprocessing.get_all_start_methods():
        known = ", ".join(map(repr, multiprocessing.get_all_start_methods()))
        raise UsageError(f"StreamLoader(start_method={start_method!r}): this system has {known}")


def _check_prefetch(prefetch: int, workers: int, device: torch.device | None) -> None:
    _check_counts(least=0, prefetch=prefetch)
    if prefetch == 0 and (workers or device is not None):
        name = f"workers={workers}" if workers else f"device={str(device)!r}"
        raise UsageError(
            f"StreamLoader(prefetch=0) forms batches only when asked, but {name} is there to be ahead: pass 1 or 2"
        )


def _check_staging(device: torch.device | None, static_buffers: bool, dtypes: Mapping[str, torch.dtype] | None) -> None:
    if device is None and (static_buffers or dtypes):
        name = "static_buffers=True" if static_buffers else f"dtypes={dtypes!r}"
        raise UsageError(f"StreamLoader({name}) is about batches on a device: pass device= too")
    for field, dtype in (dtypes or {}).items():
        if not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"StreamLoader(dtypes=...): field {field!r} has {dtype!r}; pass a torch dtype such as torch.int64"
            )


def _check_remainder(remainder: str, dataset: StreamDataset) -> None:
    if remainder not in ("keep", "drop", "pad"):
        raise UsageError(f"StreamLoader(remainder={remainder!r}): choose 'keep', 'drop' or 'pad'")
    if remainder != "keep" and dataset.endless:
        raise UsageError(
            f"StreamLoader(remainder={remainder!r}) is about the end of an epoch, and repeat=True has none: leave it out, all "
            f"ranks make as many steps as you ask for"
        )


def _check_counts(least: int = 1, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is None and name == "batch_size":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"StreamLoader({name}={value!r}): it must be an int >= {least}")
