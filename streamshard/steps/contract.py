"""The batch contract: what a row of one or more documents looks like, made once, from explicit lengths.

Where a document ends is known from the lengths of what was put into the row, never guessed from end-of-sequence tokens (chat
turns contain them) or from position numbers that start again. docs/batch.md has the table and a drawn example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import DataError, UsageError
from streamshard.order.cursor import Ref

IGNORED = -100  # the label that torch's cross_entropy, and so every Hugging Face model, leaves out of the loss
SEGMENTS_FIELD = "__segments__"  # where provenance=True puts a row's Segments
_GIVEN = ("input_ids", "labels", "loss_mask")  # what samples may bring; the rest follows from lengths
CONTRACT = ("input_ids", "labels", "loss_mask", "position_ids", "segment_ids", "cu_seqlens", "max_seqlen")

_EXTRA_DTYPES = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}

Array = NDArray[Any]


class Segment(NamedTuple):
    """Where a segment of a row comes from: tokens [offset, offset + length) of a document of the stored sample `ref`."""

    ref: Ref
    offset: int
    length: int


class Document(NamedTuple):
    """The columns of one document, each with a value per token. `labels` is `input_ids` itself where all are in the loss."""

    input_ids: Array
    labels: Array
    extras: tuple[Array, ...]
    ref: Ref | None

    def cut(self, start: int, stop: int) -> Document:
        """Tokens [start, stop) of it; no copy."""
        ids = self.input_ids[start:stop]
        labels = ids if self.labels is self.input_ids else self.labels[start:stop]
        return Document(ids, labels, tuple(extra[start:stop] for extra in self.extras), self.ref)


def check_pad_id(step: str, pad_id: object) -> None:
    """Refuse at construction what is no token id."""
    if type(pad_id) is not int or not 0 <= pad_id < 1 << 63:
        raise UsageError(f"{step}(pad_id={pad_id!r}): a token id is an int from 0 on, of 63 bits")


class Fields:
    """Which fields of a sample are the columns of a document. Immutable.

    names: ``{"input_ids": "text_tokens", "loss_mask": ..., "labels": ..., <any other>: ...}``. What is not given is looked for
        under its own name, the tokens under ``"tokens"`` too. Other names are columns of the user's, with a value per token,
        that become fields of the row under that name, as bool, int64 or float32, 0 in padding.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        if not isinstance(names, Mapping) or not all(
            isinstance(name, str) and isinstance(field, str) for name, field in names.items()
        ):
            raise UsageError(f"fields={names!r}: pass a mapping such as {{'input_ids': 'tokens'}}")
        made = sorted(set(names) & (set(CONTRACT) - set(_GIVEN)))
        if made:
            raise UsageError(f"fields={dict(names)!r}: {made} are made from the lengths; leave them out")
        self.extras = tuple(sorted(set(names) - set(_GIVEN)))  # names of the user's own columns
        self._extra_fields = [names[extra] for extra in self.extras]
        self._tokens = (names["input_ids"],) if "input_ids" in names else ("input_ids", "tokens")
        self._named = [names.get(name) for name in ("labels", "loss_mask")]

    def read(self, sample: Any, ref: Ref | None = None) -> Document:
        """The document in `sample`, which is stored at `ref`. Raises `DataError` naming the field, what it is and the cure."""
        if type(sample) is not dict and not isinstance(sample, Mapping):
            raise DataError(
                f"a document is a mapping of fields, and this is a {type(sample).__name__}; add a Map before it"
            )
        name = self._tokens_field(sample)
        ids = _column(name, sample[name], "tokenize it in a Map")
        if not len(ids):
            raise DataError(f"field {name!r} has no tokens; leave empty documents out with a Filter")
        kind = ids.dtype.kind
        if kind not in "iu":
            raise DataError(f"field {name!r} holds {ids.dtype} where token ids are integers; tokenize it in a Map")
        if kind == "i" and ids.min() < 0:
            raise DataError(f"field {name!r} holds {ids.min()}; token ids are at least 0. Mask tokens with a loss_mask")
        extras = tuple(self._extra(sample, field, name, ids) for field in self._extra_fields)
        return Document(ids, self._labels(sample, name, ids), extras, ref)

    def _tokens_field(self, sample: Mapping[str, Any]) -> str:
        for name in self._tokens:
            if sample.get(name) is not None:
                return name
        raise DataError(
            f"the sample has no tokens in {' or '.join(map(repr, self._tokens))}, it has the fields {sorted(sample)}; name the "
            f"field with fields={{'input_ids': ...}}, or make it in a Map"
        )

    def _labels(self, sample: Mapping[str, Any], name: str, ids: Array) -> Array:
        """A label for each token, not shifted: its own id where it is in the loss, or what the sample says."""
        labels_field, mask_field = self._named
        if labels_field is None and sample.get("labels") is not None:
            labels_field = "labels"
        if mask_field is None and sample.get("loss_mask") is not None:
            mask_field = "loss_mask"
        if labels_field is None and mask_field is None:
            return ids
        found = ids if labels_field is None else self._aligned(sample, labels_field, name, ids)
        if found.dtype.kind not in "iu":
            raise DataError(
                f"field {labels_field!r} holds {found.dtype} where labels are integers; convert it in a Map"
            )
        found = found.astype(np.int64)
        if mask_field is not None:
            mask = self._aligned(sample, mask_field, name, ids)
            if mask.dtype.kind not in "biu" and not (mask.dtype.kind == "f" and ((mask == 0) | (mask == 1)).all()):
                raise DataError(
                    f"field {mask_field!r} holds {mask.dtype} values that are not 0 or 1, where a mask says what is in the "
                    f"loss; take weights along as a column of your own, with fields={{'weights': {mask_field!r}}}"
                )
            found[mask == 0] = IGNORED
        return found

    def _extra(self, sample: Mapping[str, Any], field: str, tokens: str, ids: Array) -> Array:
        """A column of the user's, in one dtype for all documents: bool, int64 or float32."""
        values = self._aligned(sample, field, tokens, ids)
        wanted = _EXTRA_DTYPES.get(values.dtype.kind)
        if wanted is None:
            raise DataError(f"field {field!r} holds {values.dtype}; columns of rows are numbers or bools")
        return values.astype(wanted, copy=False)

    def _aligned(self, sample: Mapping[str, Any], field: str, tokens: str, ids: Array) -> Array:
        if sample.get(field) is None:
            raise DataError(f"the sample has no field {field!r}, which fields= names; it has {sorted(sample)}")
        values = _column(field, sample[field], "make it a list of numbers in a Map")
        if len(values) != len(ids):
            raise DataError(
                f"field {field!r} has {len(values)} values for the {len(ids)} tokens in {tokens!r}; it needs one for each"
            )
        return values


class Length:
    """How many tokens an item has: an int in its field, or a value for each token."""

    def __init__(self, field: str | None, *, needed: bool) -> None:
        self._needed = needed
        self._fields = ("input_ids", "tokens") if field is None else (field,)

    def __call__(self, item: Any) -> int:
        """Raises `DataError` naming the field, what is there, and the cure."""
        known = item if type(item) is dict or isinstance(item, Mapping) else {}
        if "segment_ids" in known:  # a packed row has padding
            return int(np.count_nonzero(known["segment_ids"] >= 0))
        for name in self._fields:
            value: Any = known.get(name)
            if value is None:
                continue
            if isinstance(value, Integral):
                return int(value)
            if isinstance(value, Sized) and getattr(value, "ndim", True):
                return len(value)
            raise DataError(
                f"field {name!r} is a {type(value).__name__}; the length of a sample is an int, or a value per token"
            )
        if not self._needed:
            return 0
        found = sorted(item) if isinstance(item, Mapping) else f"a {type(item).__name__}"
        raise DataError(
            f"tokens are counted, and a sample has none in {' or '.join(map(repr, self._fields))}; it has {found}. Name "
            f"the field with length=..., make it in a Map before, or, in a Mixture, mix with unit='samples'"
        )


def _column(field: str, value: Any, cure: str) -> Array:
    if isinstance(value, np.ndarray):
        array: Array = value
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise DataError(
                f"field {field!r} holds lists of different lengths; take it apart with a FlatMap"
            ) from error
    if array.ndim == 0:
        raise DataError(f"field {field!r} is a {type(value).__name__}, not a value for each token; {cure}")
    if array.ndim != 1:
        raise DataError(
            f"field {field!r} has shape {array.shape}; documents have one dimension, flatten it in a Map or take it apart with "
            f"a FlatMap"
        )
    return array


@dataclass(frozen=True)
class Layout:
    """How a row looks: `size` tokens, padded with `pad_id`.

    shifted: labels one place earlier, for models that do not shift themselves. segments: with it `cu_seqlens` has always
    ``segments + 2`` entries (the padding is a last segment, and the last entry repeats) and `max_seqlen` is always `size`, so
    that compiled models see fixed shapes.
    """

    size: int
    pad_id: int = 0
    shifted: bool = False
    segments: int | None = None
    extras: tuple[str, ...] = ()
    provenance: bool = False

    def row(self, pieces: Sequence[Document], offsets: Sequence[int]) -> dict[str, Any]:
        """One row out of documents, or cuts of documents that begin at `offsets`; new arrays."""
        lengths = np.array([len(piece.input_ids) for piece in pieces], dtype=np.int64)
        ends = np.cumsum(lengths)
        starts, real, size = ends - lengths, int(ends[-1]), self.size
        row: dict[str, Any] = {
            "input_ids": _filled([piece.input_ids for piece in pieces], size, self.pad_id, np.int64),
            "labels": self._labels(pieces, starts),
        }
        row["loss_mask"] = row["labels"] != IGNORED
        row["position_ids"] = positions = np.arange(size)
        positions[:real] -= np.repeat(starts, lengths)
        positions[real:] -= real
        row["segment_ids"] = segment_ids = np.full(size, -1, np.int32)
        segment_ids[:real] = np.repeat(np.arange(len(pieces), dtype=np.int32), lengths)
        row["cu_seqlens"] = self._cu_seqlens(ends)
        row["max_seqlen"] = int(lengths.max()) if self.segments is None else size
        for place, name in enumerate(self.extras):
            columns = [piece.extras[place] for piece in pieces]
            row[name] = _filled(columns, size, 0, columns[0].dtype)
        if self.provenance:
            found = zip(pieces, offsets, lengths.tolist(), strict=True)
            row[SEGMENTS_FIELD] = [Segment(piece.ref, offset, length) for piece, offset, length in found if piece.ref]
        return row

    def _labels(self, pieces: Sequence[Document], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """A segment's first token is predicted from nothing in its own document, so it is in nobody's loss."""
        labels = _filled([piece.labels for piece in pieces], self.size, IGNORED, np.int64)
        labels[starts] = IGNORED
        if not self.shifted:
            return labels
        return np.append(labels[1:], IGNORED)

    def _cu_seqlens(self, ends: NDArray[np.int64]) -> NDArray[np.int32]:
        if self.segments is None:
            return np.concatenate(([0], ends)).astype(np.int32)
        fixed = np.full(self.segments + 2, self.size, np.int32)
        fixed[0] = 0
        fixed[1 : len(ends) + 1] = ends
        return fixed


def _filled(columns: Sequence[Array], size: int, fill: int, dtype: Any) -> Array:
    """`columns` end to end in a new array of `size`, the rest `fill`."""
    out = np.empty(size, dtype)
    real = sum(map(len, columns))
    np.concatenate(columns, out=out[:real], casting="same_kind")
    out[real:] = fill
    return out


def loss_tokens(piece: Document) -> int:
    """Labels of a segment that count in the loss, its first token's never doing so."""
    if piece.labels is piece.input_ids:
        return len(piece.input_ids) - 1
    return int(np.count_nonzero(piece.labels[1:] != IGNORED))
