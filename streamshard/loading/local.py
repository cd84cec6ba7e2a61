"""Batches formed in this process, in the thread that asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streamshard.iteration import Iteration, Mark
from streamshard.loading.formed import Formed
from streamshard.staging.buffers import Buffers

Form = Callable[[list[Any], Buffers | None], Any]  # a batch out of items, in the buffers if it can use them
NextBuffers = Callable[[], Buffers | None]  # the buffers for the next batch; None: new memory each time


class LocalSource:
    """`size` items of `iteration` at a time through `form`; with `size` None each item as it is."""

    def __init__(self, iteration: Iteration, size: int | None, form: Form, buffers: NextBuffers) -> None:
        self._iteration = iteration
        self._size = size
        self._form = form
        self._buffers = buffers

    def batches(self) -> Iterator[Formed]:
        iteration, size = self._iteration, self._size
        rotation = iteration.open()
        first = True
        while True:
            items, runs = rotation.take(size or 1)
            marks = {run.p: run.mark() for run in dict.fromkeys(runs)}
            if not items:
                yield Formed(None, {run.p: run.mark() for run in iteration.runs}, last=True)
                return
            if size is None:
                yield Formed(items[0], marks)
            else:
                buffers = self._buffers()
                yield Formed(self._form(items, buffers), marks, buffers=buffers, rows=len(items))
            if first:
                iteration.begin_speculation()
                first = False

    def interrupt(self) -> None:
        self._iteration.interrupt()

    def close(self) -> None:
        self._iteration.close()

    def acknowledge(self, marks: Mapping[int, Mark]) -> None:
        self._iteration.acknowledge(marks)

    def contents(self) -> dict[str, bytes]:
        return self._iteration.contents()
