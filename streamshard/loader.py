"""`StreamLoader`: batches of a `StreamDataset`, formed ahead of time, with the state of what was handed out.

A thread (or worker processes) reads ahead and forms batches; each travels with the positions that its partitions had after
it. Those of the last batch handed out are the state, so nothing that waits is in it. docs/loader.md is the user's page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from streamshard.dataset import StreamDataset, left_in_the_middle
from streamshard.errors import UsageError
from streamshard.loading.formed import Source
from streamshard.loading.local import LocalSource
from streamshard.loading.position import Position
from streamshard.loading.producer import Producer
from streamshard.observe.events import LoaderCounters, StorageCounters
from streamshard.staging.buffers import Buffers
from streamshard.state import State
from streamshard.steps.tensors import collate as default_collate
from streamshard.steps.tensors import fresh

_logger = logging.getLogger("streamshard")


class StreamLoader:
    """Batches of a dataset, read ahead while the training loop computes.

    dataset: what to read. The loader has its state from the first batch on.
    batch_size: items of a batch, taken over all partitions of this rank in rotation. None hands out the pipeline's own items,
        such as the micro-batches of a `Batch` step.
    collate: makes a batch out of a list of items; default `streamshard.collate`.
    prefetch: batches that wait ready. Two cover a producer that is a little uneven; more cost memory and a later stop.
    accumulation: batches of one optimizer step. The state is then always that of the last complete step.

    One iteration at a time: a new one ends the one before. Not thread-safe. Raises `UsageError` at construction for arguments
    that cannot work together.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 2,
        accumulation: int = 1,
    ) -> None:
        _check_dataset(dataset, batch_size, collate)
        _check_counts(batch_size=batch_size, prefetch=prefetch, accumulation=accumulation)
        self.dataset = dataset
        self._batch_size = batch_size
        self._collate = collate
        self._prefetch = prefetch
        self._accumulation = accumulation
        self._position: Position | None = None  # none until the first batch is asked for
        self._run: Run | None = None
        dataset.resolve_partitions(0)

    def __repr__(self) -> str:
        return f"StreamLoader({self.dataset!r}, batch_size={self._batch_size})"

    # ------------------------------------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        run = self._begin()
        try:
            while (formed := run.take()) is not None:
                if formed.last:
                    run.acknowledge(run.position.finish(formed.marks))
                    self.dataset.finish(run.position.epoch)
                    return
                added = run.position.advance(formed.marks)
                if added is not None:
                    run.acknowledge(added)
                yield formed.batch
            if run is not self._run:
                raise UsageError(
                    "this iterator was ended by a newer one, or by close(), of the same StreamLoader; use one at a time"
                )
        finally:
            run.close()

    def _begin(self) -> Run:
        """A new run. Nothing is changed before it stands, so that a start that fails can be tried again."""
        self._end_run()
        last = self._position
        if last is not None and not last.exhausted and last.batches:
            _logger.warning(left_in_the_middle(self.dataset.epoch))
        shares = self.dataset.shares(0)
        source = LocalSource(self.dataset.open_share(shares[0], lent=True), self._batch_size, self._form, lambda: None)
        self.dataset.lend(shares[0])
        self._position = Position(shares, self._accumulation)
        self._run = Run(source, self._position, self._prefetch)
        return self._run

    def _form(self, items: list[Any], buffers: Buffers | None) -> Any:
        if self._collate is not None:
            return self._collate(items)
        return default_collate(items, empty=fresh if buffers is None else buffers.empty)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def close(self) -> None:
        """Stop reading ahead and let go of threads and memory. The state stays; iterating again begins anew."""
        self._end_run()

    def __enter__(self) -> StreamLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """The state after the last batch handed out, or the last complete optimizer step; as `StreamDataset.state_dict`.

        With ``accumulation`` and off a boundary it is the boundary's, which is logged once.
        """
        if self._position is None:
            return self.dataset.state_dict()
        contents = self._run.contents() if self._run is not None else {}
        return self.dataset.encode_state(self._position.epoch, self._position.partitions(), contents)

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Go on from `state` with the next iteration; `allow` and errors as in `StreamDataset.load_state_dict`."""
        self.dataset.load_state_dict(state, allow)
        self._end_run()
        self._position = None

    def set_epoch(self, epoch: int) -> None:
        """As `StreamDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def counters(self) -> LoaderCounters:
        """What was handed out so far in this iteration, how long it was waited for, and what steps have dropped."""
        position, run = self._position, self._run
        if position is None or run is None:
            return LoaderCounters()
        waits, seconds = run.waited()
        return LoaderCounters(position.batches, waits, seconds, self.dataset.dropped(position.partitions()))

    def storage_counters(self) -> StorageCounters:
        """As `StreamDataset.storage_counters`."""
        return self.dataset.storage_counters()


class Run:
    """One iteration of a loader: a source, the thread that reads it, and the position of what was handed out."""

    def __init__(self, source: Source, position: Position, prefetch: int) -> None:
        self.position = position
        self._source = source
        self._producer = Producer(source, prefetch)
        self.take = self._producer.ready.take
        self.acknowledge = source.acknowledge
        self._kept: dict[str, bytes] = {}
        self._closed = False

    def contents(self) -> dict[str, bytes]:
        """What a resume need not read again."""
        return self._source.contents({})

    def waited(self) -> tuple[int, float]:
        """How often, and how many seconds in all, a batch was waited for."""
        return self._producer.ready.waits, self._producer.ready.waited_s

    def close(self) -> None:
        """End the thread; may be called again."""
        if not self._closed:
            self._closed = True
            self._producer.close()


def _check_dataset(dataset: object, batch_size: int | None, collate: object) -> None:
    if not isinstance(dataset, StreamDataset):
        raise UsageError(
            f"StreamLoader reads a StreamDataset, not a {type(dataset).__name__}; use torch's DataLoader for others"
        )
    batches = [step.label for step in dataset.steps if step.fingerprint()["step"] == "Batch"]
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


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is None and name == "batch_size":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"StreamLoader({name}={value!r}): it must be an int >= 1")
