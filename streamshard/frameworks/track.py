"""`track`: a plain torch ``DataLoader`` with the exact state of what it has yielded, whatever its workers have read ahead.

Each batch is stamped, where it is collated, with the positions that the reading dataset has at that moment; the stamp travels
with the batch and is taken off when the batch is yielded. So the state costs a few dozen small tuples a batch and no question
to a worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from streamshard.dataset import StreamDataset
from streamshard.errors import UsageError
from streamshard.iteration import Mark
from streamshard.loading.position import Position
from streamshard.loading.positioned import PositionedLoader


@dataclass(slots=True)
class _Stamped:
    """A batch and where the partitions that its process reads stood after it."""

    batch: Any
    marks: dict[int, Mark]
    worker: int

    def pin_memory(self) -> _Stamped:
        """What DataLoader's pinning thread calls for types that it does not know."""
        return _Stamped(pin_memory(self.batch), self.marks, self.worker)  # type: ignore[no-untyped-call]  # torch


class _Stamp:
    """The user's collate function, and the stamp. It is sent to a worker together with the dataset, which stays one object."""

    def __init__(self, dataset: StreamDataset, collate: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __call__(self, items: Any) -> _Stamped:
        worker = get_worker_info()
        return _Stamped(self._collate(items), self._dataset.marks(), 0 if worker is None else worker.id)


class TrackedLoader(PositionedLoader):
    """What `track` returns: iterate it instead of the DataLoader, and save its `state_dict`."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(_checked(loader))
        self._workers = loader.num_workers
        # A copy: the caller's loader, which may have been handed to others, keeps its own collate function and workers.
        self._loader = copy.copy(loader)
        self._loader._iterator = None  # noqa: SLF001  (started workers hold the old collate function)
        self._loader.collate_fn = _Stamp(self.dataset, loader.collate_fn)
        self._batches: Any = None
        self.dataset.owned = True
        self.dataset.resolve_partitions(self._workers)

    def __repr__(self) -> str:
        return f"TrackedLoader({self.dataset!r}, batch_size={self._loader.batch_size}, num_workers={self._workers})"

    def __iter__(self) -> Iterator[Any]:
        position, batches = self._begin()
        for stamped in batches:
            if position is not self._position:
                raise UsageError("this iterator was ended by a newer one of the same loader; use one at a time")
            if position.handed_out == 0:
                self.dataset.first_batch(stamped.batch)
            self._handed_out(position, stamped.marks, stamped.worker)
            if position.handed_out == position.expected:  # whoever counts may not come again to hear of the end
                self._ended(position, None)
            yield stamped.batch
        if not position.complete:
            self._ended(position, None)
        self._confirm_end_unless_by_call()

    def _begin(self) -> tuple[Position, Iterator[_Stamped]]:
        self._refuse_bare_trainer()
        self._check_confirmed()
        self._warn_if_left_in_the_middle()
        self._stop()
        shares = self.dataset.shares(self._workers)
        self.dataset.compare_settings(shares[0])
        position = self._new_position(shares)
        batches = self._batches = iter(self._loader)
        if self._workers:  # they have their copies of a loaded state, and only they know where they are
            self.dataset.lend(shares[0])
        self._position = position
        return position, batches

    def close(self) -> None:
        """End the workers. The state stays."""
        self._stop()
        iterator, self._loader._iterator = self._loader._iterator, None  # noqa: SLF001  (torch has no public way)
        if iterator is not None and self._workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001

    def _stop(self) -> None:
        # Workers of a pass that was left, perhaps still starting, would write into what is shared with the next ones.
        batches, self._batches = self._batches, None
        if batches is not None and self._workers and not self._loader.persistent_workers:
            batches._shutdown_workers()  # noqa: SLF001

    # -------------------------------------------------------------------------------- what the base class asks for

    def _reading(self) -> int:
        return self._workers

    def _count(self, items: Sequence[int]) -> int:
        size = self._loader.batch_size or 1
        return sum(n // size if self._loader.drop_last else -(-n // size) for n in items)

    def _contents(self) -> dict[str, bytes]:
        return {} if self._workers else self.dataset.contents()

    def _workers_in_turn(self, position: Position) -> Sequence[Sequence[int]]:
        # A DataLoader begins with its worker 0, which therefore takes the place of the one that was next.
        if self._workers < 2:
            return ()
        first = position.last_worker + 1
        return position.workers[first:] + position.workers[:first]

    def _reset(self) -> None:
        self.close()  # started workers would not hear of the state


def track(loader: DataLoader[Any]) -> TrackedLoader:
    """The loader with `state_dict` and `load_state_dict`: exact by what was yielded, for any number of workers.

    loader: a `torch.utils.data.DataLoader` over a `StreamDataset`; any start method, persistent workers or not, pinned memory
        or not. It is left as it is: iterate what is returned.

    The state is one of this rank, which resumes with any number of workers; `merge_states` of all ranks' resumes anywhere. The
    epoch advances by itself. ``len()`` works where the count is known, and is exact. Not thread-safe.

    Raises `UsageError` for other loaders and datasets, and for ``snapshot="contents"`` with workers, whose samples a DataLoader
    has no way to ask for.
    """
    return TrackedLoader(loader)


def _checked(loader: object) -> StreamDataset:
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"track() takes a torch DataLoader, got a {type(loader).__name__}; a StreamLoader has its own exact state"
        )
    if hasattr(loader, "state_dict"):
        raise UsageError(
            f"track(): a {type(loader).__name__} saves its own state; use it as it is, or pass a torch.utils.data.DataLoader"
        )
    dataset = loader.dataset
    if not isinstance(dataset, StreamDataset):
        raise UsageError(
            f"track() knows the position of a StreamDataset, and this DataLoader reads a {type(dataset).__name__}; put what it "
            f"does into steps of the StreamDataset (Map, Filter, FlatMap, Batch) and pass that to the DataLoader"
        )
    if dataset.keeps_contents and loader.num_workers:
        raise UsageError(
            f"track(): with snapshot='contents' and num_workers={loader.num_workers} the samples are in processes that a "
            f"DataLoader cannot ask; use snapshot='cursor', or StreamLoader(dataset, workers={loader.num_workers})"
        )
    return dataset
