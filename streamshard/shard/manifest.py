"""The manifest: which shards a dataset has, their counts and digests. Pure; catalog.py moves it to and from a store.

Per-shard numbers are fixed-width columns (little-endian, base64), so that a million shards parse in well under a
second. Keys are not stored one by one: a group of shards shares a template such as
``shards/part-{index:06d}-{digest:016x}.msgpack.zst``. The dataset's *version* is the SHA-256 of the content, that is of
the canonical JSON without the columns' data, followed by the raw columns; creation time stays outside.
"""

from __future__ import annotations

import base64
import builtins
import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import DataError
from streamshard.shard.schema import Schema

FORMAT_VERSION = 1
MANIFEST_KEY = "manifest.json"
_COLUMNS = ("samples", "bytes", "index_bytes", "index_digests", "lengths")
_SPLIT = "split"  # a column of datasets whose shards were split by a field
_WIDTHS = ("<u1", "<u2", "<u4", "<u8")
_TEMPLATE = re.compile(r"shards/[A-Za-z0-9_.-]*\{index:06d\}-\{digest:016x\}\.msgpack\.zst")

Column = NDArray[Any]  # unsigned integers of the narrowest width that fits


@dataclass(frozen=True)
class ShardGroup:
    """`count` shards named by one template, numbered from `first`."""

    template: str
    first: int
    count: int


@dataclass(frozen=True)
class Split:
    """A field that is constant within each shard: its name, its values, and which of them each shard has."""

    field: str
    values: tuple[str, ...]
    column: Column


@dataclass(frozen=True)
class Manifest:
    """An immutable list of shards. Columns have shape ``(shards,)``; `lengths` holds each shard's sum of lengths."""

    groups: tuple[ShardGroup, ...]
    samples: Column
    bytes: Column
    index_bytes: Column
    index_digests: Column
    lengths: Column
    schema: Schema
    length_field: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    split: Split | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def sample_counts(self) -> NDArray[np.int64]:
        """Samples per shard as int64, the form in which the order layer wants them."""
        return self.samples.astype(np.int64)

    @cached_property
    def total_samples(self) -> int:
        """Samples in the dataset, N."""
        return int(self.samples.sum(dtype=np.int64))

    @property
    def total_bytes(self) -> int:
        """Bytes of all shard objects."""
        return int(self.bytes.sum(dtype=np.int64))

    @property
    def total_length(self) -> int:
        """Sum of the length field over all samples; 0 without one."""
        return int(self.lengths.sum(dtype=np.int64))

    @cached_property
    def version(self) -> str:
        """SHA-256 of the content, hexadecimal: the dataset version."""
        hasher = hashlib.sha256(_canonical(self._header()))
        for column in self._columns().values():
            hasher.update(np.ascontiguousarray(column).data)
        return hasher.hexdigest()

    def _columns(self) -> dict[str, Column]:
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return columns if self.split is None else {**columns, _SPLIT: self.split.column}

    def only(self, value: str) -> Manifest:
        """The same version with the shards of one value of the split field; the others count as empty. Shard numbers stay."""
        split = self.split
        if split is None or value not in split.values:
            raise KeyError(value)
        mine = split.column == split.values.index(value)
        found = replace(self, samples=np.where(mine, self.samples, 0), lengths=np.where(mine, self.lengths, 0))
        found.__dict__["version"] = self.version
        return found

    def key(self, shard: int) -> str:
        """Object key of a shard, relative to the dataset's URL."""
        place = shard
        for group in self.groups:
            if place < group.count:
                return group.template.format(index=group.first + place, digest=int(self.index_digests[shard]))
            place -= group.count
        raise IndexError(shard)

    def _header(self) -> dict[str, Any]:
        split = {} if self.split is None else {"split": {"field": self.split.field, "values": list(self.split.values)}}
        return {
            **split,
            "format": FORMAT_VERSION,
            "schema": self.schema,
            "length_field": self.length_field,
            "metadata": self.metadata,
            "totals": {
                "shards": len(self),
                "samples": self.total_samples,
                "bytes": self.total_bytes,
                "length": self.total_length,
            },
            "groups": [[g.template, g.first, g.count] for g in self.groups],
            "columns": {name: column.dtype.str.replace("|", "<") for name, column in self._columns().items()},
        }

    def encode(self, *, created: str) -> builtins.bytes:
        """The bytes of ``manifest.json``; `created` is a timestamp for people, outside of the version."""
        columns = self._columns().items()
        data = {name: base64.b64encode(np.ascontiguousarray(values).data).decode() for name, values in columns}
        document = {**self._header(), "version": self.version, "created": created, "data": data}
        return json.dumps(document, indent=1).encode()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def column(values: list[int] | NDArray[Any]) -> Column:
    """Non-negative integers in the narrowest little-endian width that fits."""
    array = np.asarray(values, dtype=np.uint64)
    largest = int(array.max()) if len(array) else 0
    width = next(w for w in _WIDTHS if largest <= np.iinfo(np.dtype(w)).max)
    return array.astype(width)


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """A manifest out of its bytes, its version recomputed and compared. `where` names it in errors (`DataError`)."""
    try:
        document = json.loads(data.decode())
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON ({error}); restore it from {_versions_hint()}") from error
    version = document.get("format") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{where} has format version {version!r}, this package reads {FORMAT_VERSION}; upgrade it")
    try:
        manifest = _from_document(document)
        if manifest.version != document["version"]:
            raise DataError(
                f"{where} says version {document['version']} but its content hashes to {manifest.version}: it was "
                f"edited or damaged; restore it from {_versions_hint()}"
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DataError) and where in str(error):
            raise
        raise DataError(
            f"{where} lacks or garbles a part ({type(error).__name__}: {error}); restore it from {_versions_hint()}"
        ) from error
    return manifest


def _versions_hint() -> str:
    return "manifests/<version>.json beside it"


def _from_document(document: dict[str, Any]) -> Manifest:
    groups = tuple(ShardGroup(*group) for group in document["groups"])
    for group in groups:
        # A manifest may come from anywhere: its keys must stay below the dataset and be plain substitutions.
        if not _TEMPLATE.fullmatch(group.template):
            raise DataError(f"the shard key template {group.template!r} is not of the form {_TEMPLATE.pattern}")
    count = sum(group.count for group in groups)
    columns: dict[str, Any] = {}
    for name in (*_COLUMNS, _SPLIT) if _SPLIT in document else _COLUMNS:
        dtype = document["columns"][name]
        if dtype not in _WIDTHS:
            raise DataError(f"column {name!r} has dtype {dtype!r}; known are {', '.join(_WIDTHS)}")
        columns[name] = np.frombuffer(base64.b64decode(document["data"].pop(name)), dtype)
        if len(columns[name]) != count:
            raise DataError(f"column {name!r} has {len(columns[name])} entries for {count} shards")
    split = None
    if _SPLIT in document:
        values, which = tuple(document[_SPLIT]["values"]), columns.pop(_SPLIT)
        if len(which) and int(which.max()) >= len(values):
            raise DataError(f"column {_SPLIT!r} names value {int(which.max())} of {len(values)}")
        split = Split(str(document[_SPLIT]["field"]), values, which)
    return Manifest(
        split=split,
        groups=groups,
        schema=document["schema"],
        length_field=document["length_field"],
        metadata=document["metadata"],
        **columns,
    )
