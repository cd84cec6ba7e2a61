"""The same number of steps on every rank: what is left over at the end of a finite epoch is dropped, or filled up.

"drop": a step counts if every rank has a whole batch for it. "pad": if any rank has anything; batches are filled up to their
size, and ranks that have nothing left get whole batches of padding, made of copies of a row (or, without ``batch_size``, of
an item) of their own; one that never had any gets another rank's.

Padding has to be harmless where it is not noticed and easy to notice: the field ``loss_mask`` is zero and ``labels`` are -100
in padded rows, and every batch has a field ``padding``, true for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from streamshard.errors import DataError
from streamshard.iteration import Mark
from streamshard.loading.formed import Formed, Source
from streamshard.loading.wire import pack, unpack
from streamshard.staging.buffers import Buffers
from streamshard.staging.tree import map_leaves

PADDING, LOSS_MASK, LABELS = "padding", "loss_mask", "labels"
_NOTHING = {LOSS_MASK: 0, LABELS: -100}  # -100 is what torch's cross_entropy leaves out


class Verdict(Protocol):
    """Of a step: whether all ranks have a batch, whether any has; a template, if this rank lacked one."""

    @property
    def everyone(self) -> bool: ...
    @property
    def someone(self) -> bool: ...
    @property
    def template(self) -> bytes | None: ...


class Agreement(Protocol):
    """The ranks of the job."""

    def ask(self, *, has: bool, give: Callable[[], bytes] | None) -> Verdict: ...
    def close(self) -> None: ...


class Left(NamedTuple):
    """Rows (items without ``batch_size``) of this rank that were dropped at the end of an epoch, and those added."""

    dropped: int = 0
    padded: int = 0


class EqualSource:
    """The batches of `source`, as many as all ranks have.

    size: rows of a whole batch; None: items are handed out. give_back: gets the reused memory of batches that are dropped.
    """

    def __init__(
        self,
        source: Source,
        agreement: Agreement,
        size: int | None,
        *,
        pad: bool,
        give_back: Callable[[Buffers], None] | None = None,
    ) -> None:
        self._give_back = give_back
        self._source = source
        self._agreement = agreement
        self._size = size
        self._pad = pad
        self._template: Any = None  # a row, or an item, to pad with
        self._has_template = False
        self.left = Left()

    def batches(self) -> Iterator[Formed]:
        batches = self._source.batches()
        return self._padded(batches) if self._pad else self._whole(batches)

    def _whole(self, batches: Iterator[Formed]) -> Iterator[Formed]:
        formed = self._next_whole(batches, {})
        while self._agreement.ask(has=not formed.last, give=bytes).everyone:
            yield formed
            formed = self._next_whole(batches, {})
        marks = dict(formed.marks)
        while not formed.last:  # read what is left, so that it is counted and the state is that of the epoch's end
            self._drop(formed)
            formed = self._next_whole(batches, marks)
        yield Formed(None, marks | formed.marks, last=True)

    def _next_whole(self, batches: Iterator[Formed], marks: dict[int, Mark]) -> Formed:
        """The next batch that is not short, or the end, with the marks of those that were (a worker's last may be)."""
        for formed in batches:
            formed.marks = marks | formed.marks
            if formed.last or self._size in (None, formed.rows):
                break
            self._drop(formed)
            marks = formed.marks
        return formed

    def _drop(self, formed: Formed) -> None:
        self.left = Left(dropped=self.left.dropped + formed.rows)
        if formed.buffers is not None and self._give_back is not None:
            self._give_back(formed.buffers)  # nobody else will: there are few, and forming the next batch waits for one

    def _padded(self, batches: Iterator[Formed]) -> Iterator[Formed]:
        formed = next(batches)
        while True:
            if not formed.last:
                self._keep_template(formed)
            verdict = self._agreement.ask(has=not formed.last, give=self._give if self._has_template else None)
            if not verdict.someone:
                break
            if verdict.template is not None:
                self._template, self._has_template = unpack(verdict.template), True
            if formed.last:
                yield self._all_padding()
                continue
            yield self._filled(formed)
            formed = next(batches)
        yield formed

    def _keep_template(self, formed: Formed) -> None:
        self._template = _row(formed.batch, formed.rows) if self._size is not None else _copy(formed.batch)
        self._has_template = True

    def _give(self) -> bytes:
        return pack(self._template)

    def _filled(self, formed: Formed) -> Formed:
        if self._size is None:
            formed.batch = _flagged_item(formed.batch, padding=False)
            return formed
        missing = self._size - formed.rows
        if missing:
            self.left = Left(padded=self.left.padded + missing)
            formed.batch = _joined(formed.batch, formed.rows, self._template, missing)
        formed.batch = _flagged(formed.batch, formed.rows, self._size)
        return formed

    def _all_padding(self) -> Formed:
        rows = self._size or 1
        self.left = Left(padded=self.left.padded + rows)
        if self._size is None:
            return Formed(_flagged_item(_copy(self._template), padding=True), {})
        return Formed(_flagged(_repeated(self._template, rows), 0, rows), {}, rows=rows)

    def interrupt(self) -> None:
        self._agreement.close()
        self._source.interrupt()

    def close(self) -> None:
        self._agreement.close()
        self._source.close()

    def acknowledge(self, marks: Mapping[int, Mark]) -> None:
        self._source.acknowledge(marks)

    def contents(self) -> dict[str, bytes]:
        return self._source.contents()


# A batch is a map of columns (tensors and lists of so many rows, at any depth) or a list of samples. An item is a map.


def _is_column(value: Any, rows: int) -> bool:
    """Whether a leaf has a value for each of so many rows."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim > 0 and len(value) == rows
    return isinstance(value, list) and len(value) == rows


def _columns(batch: Any, rows: int, function: Callable[[Any], Any]) -> Any:
    """`batch` with `function` of each column; what has not so many rows stays as it is."""
    if isinstance(batch, dict):
        return {name: _columns(value, rows, function) for name, value in batch.items()}
    return function(batch) if _is_column(batch, rows) else batch


def _row(batch: Any, rows: int) -> Any:
    """The last row, as a batch of one, in memory of its own."""
    return _columns(batch, rows, lambda column: _copy(column[-1:]))


def _repeated(row: Any, times: int) -> Any:
    """A batch of copies of a batch of one."""
    return _columns(row, 1, lambda column: _times(column, times))


def _times(column: Any, times: int) -> Any:
    if isinstance(column, torch.Tensor):
        return column.repeat_interleave(times, 0)
    return np.repeat(column, times, 0) if isinstance(column, np.ndarray) else column * times


def _joined(batch: Any, rows: int, row: Any, missing: int) -> Any:
    """`batch` and so many copies of its own last row behind it."""
    if isinstance(batch, dict):
        return {name: _joined(value, rows, row[name], missing) for name, value in batch.items()}
    if not _is_column(batch, rows):
        return batch
    if isinstance(batch, torch.Tensor):
        return torch.cat([batch, row.expand(missing, *row.shape[1:])])
    more = _times(row, missing)
    return np.concatenate([batch, more]) if isinstance(batch, np.ndarray) else batch + more


def _flagged(batch: Any, real: int, rows: int) -> Any:
    """`batch` with padding behind its first `real` rows made harmless, and told in a field of its own."""
    if isinstance(batch, list):
        return [_flagged_item(sample, padding=place >= real) for place, sample in enumerate(batch)]
    _check_map(batch)
    harmless = _harmless(batch, real, rows) if real < rows else batch
    return {**harmless, PADDING: torch.arange(rows) >= real}


def _harmless(batch: dict[Any, Any], real: int, rows: int) -> dict[Any, Any]:
    """The rows from `real` on without a part in the loss, at any depth."""
    found: dict[Any, Any] = {}
    for name, value in batch.items():
        if isinstance(value, dict):
            found[name] = _harmless(value, real, rows)
        elif name in _NOTHING and _is_column(value, rows):
            rest = _nothing(value[real:], _NOTHING[name])
            if isinstance(value, torch.Tensor):
                found[name] = torch.cat([value[:real], rest])
            else:
                found[name] = (
                    np.concatenate([value[:real], rest]) if isinstance(value, np.ndarray) else value[:real] + rest
                )
        else:
            found[name] = value
    return found


def _nothing(value: Any, number: int) -> Any:
    """Something of the same form that is `number` all over."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, number)
    if isinstance(value, np.ndarray):
        return np.full_like(value, number)
    if isinstance(value, list):
        return [_nothing(inner, number) for inner in value]
    return type(value)(number) if isinstance(value, bool | int | float) else value


def _flagged_item(item: Any, *, padding: bool) -> Any:
    """A copy of an item with its flag, and harmless if it is padding."""
    _check_map(item)
    return {**(_without_loss(item) if padding else item), PADDING: padding}


def _without_loss(item: dict[Any, Any]) -> dict[Any, Any]:
    found = dict(item)
    for name, value in item.items():
        if isinstance(value, dict):
            found[name] = _without_loss(value)
        elif name in _NOTHING:
            found[name] = _nothing(value, _NOTHING[name])
    return found


def _check_map(thing: Any) -> None:
    if not isinstance(thing, dict):
        raise DataError(
            f"remainder='pad' tells padding in a field {PADDING!r}, and this is a {type(thing).__name__}: make batches maps of "
            f"tensors, lists of samples, or maps of them; or use remainder='drop'"
        )
    if PADDING in thing:
        raise DataError(
            f"remainder='pad' would overwrite the field {PADDING!r}; rename it in a Map, or use remainder='drop'"
        )


def _copy(item: Any) -> Any:
    """An item in memory of its own: whoever gets it may change it."""
    return map_leaves(item, lambda _, leaf: _copied(leaf))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
