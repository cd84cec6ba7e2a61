"""`DatasetWriter`: samples into a published dataset; and several writers into one with `commit_writers`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from streamshard.catalog import current_tag, load_manifest, publish
from streamshard.errors import StorageError, UsageError
from streamshard.shard.manifest import Manifest, ShardGroup, Split, column, decode_manifest
from streamshard.shard.schema import Schema, merge
from streamshard.shard.writer import FinishedShard, ShardWriter
from streamshard.storage.open import open_store
from streamshard.storage.store import Store

_UPLOADS = 2  # shards on their way to the store while the next is being filled
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class WriterProgress:
    """How far a writer is: samples taken, bytes of them as msgpack, and what of it is stored already."""

    samples: int
    packed_bytes: int
    stored_shards: int
    stored_bytes: int


class DatasetWriter:
    """Writes samples as shards below `url` and publishes them as one dataset when closed. Not thread-safe.

    Use it as a context manager: leaving normally publishes, leaving by an exception publishes nothing and leaves a dataset
    that was there as it was. Shards are uploaded in the background and named by content.

    length_field: a field whose value (a count, or something with a length) is stored per row, for packing, bucketing and
        token accounting without reading data.
    writer: a name, for several writers at once: shards only; `commit_writers` publishes them together.
    append: add to the dataset that is there; without it an existing dataset is refused.
    split_by: a field of text values that is to be constant within each shard: one shard is kept open for each value, and the
        manifest says which shard has which, so that a `Mixture` can read the values as sources. Costs `shard_bytes` of memory
        a value.
    metadata: JSON-safe facts for readers (tokenizer name and digest, origin ...).
    shard_bytes: size at which an object is finished; the default suits ranged reads and object counts alike.
    block_bytes: uncompressed size of a block, the unit of reading. Smaller blocks start faster and shuffle finer, larger
        ones compress a little better (1 MiB: about 1 %).
    level: zstd level.
    on_progress: called with a `WriterProgress` after every stored shard.

    Raises `UsageError` for what cannot be stored and for conflicts with other writers, `StorageError` from the store.
    """

    def __init__(
        self,
        url: str,
        *,
        length_field: str | None = None,
        split_by: str | None = None,
        writer: str | None = None,
        append: bool = False,
        metadata: Mapping[str, Any] | None = None,
        shard_bytes: int = 64 << 20,
        block_bytes: int = 512 << 10,
        level: int = 3,
        storage_options: Mapping[str, Any] | None = None,
        on_progress: Callable[[WriterProgress], None] | None = None,
    ) -> None:
        _check_sizes(shard_bytes, block_bytes, level)
        if writer is not None:
            _check_name(writer)
        if split_by is not None and not isinstance(split_by, str):
            raise UsageError(f"split_by={split_by!r}: pass the name of a field")
        self._store = open_store(url, storage_options)
        self._writer = writer
        self._append = append
        self._metadata = dict(metadata) if metadata is not None else None
        self._length_field = length_field
        self._split_by = split_by
        self._sizes = {"shard_bytes": shard_bytes, "block_bytes": block_bytes, "level": level}
        self._on_progress = on_progress
        self._samples = self._packed = 0
        self._done: list[tuple[str, FinishedShard]] = []  # value of the split field, shard
        self._shards: dict[str, ShardWriter] = {}  # open ones, by value of the split field
        self._state = "new"
        self._base: Manifest | None = None
        self._tag: str | None = None
        self._schema: Schema = {}
        self._uploads: deque[tuple[str, FinishedShard, Future[None]]] = deque()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @property
    def progress(self) -> WriterProgress:
        """How far this writer is."""
        return WriterProgress(self._samples, self._packed, len(self._done), sum(shard.size for _, shard in self._done))

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append one sample, a mapping of field names to values.

        A sample that is refused (`UsageError`) is not written and changes nothing; writing may go on.
        """
        if self._state != "open":
            self._open()
        if not isinstance(sample, Mapping):
            raise UsageError(
                f"sample {self._samples} is a {type(sample).__name__}, {_short(sample)}; write a mapping of field names "
                f"to values, for example {{'tokens': array}}"
            )
        try:
            value = self._value(sample)
            shard = self._shards.get(value) or self._new_shard(value)
            self._packed += shard.add(sample)
        except UsageError as error:
            raise UsageError(f"sample {self._samples} ({_short(sample)}) is refused: {error}") from error
        self._samples += 1
        if shard.full:
            self._finish_shard(value)

    def _value(self, sample: Mapping[str, Any]) -> str:
        if self._split_by is None:
            return ""
        value = sample.get(self._split_by)
        if not isinstance(value, str):
            raise UsageError(f"split_by={self._split_by!r} needs text in that field, and this is {value!r}")
        return value

    def _new_shard(self, value: str) -> ShardWriter:
        self._shards[value] = ShardWriter(length_field=self._length_field, schema=self._schema, **self._sizes)
        return self._shards[value]

    def close(self) -> None:
        """Store what is left and publish (or, with `writer=`, leave the record that `commit_writers` reads)."""
        if self._state in ("closed", "aborted"):
            return
        self._open()
        try:
            for value in sorted(self._shards):
                if self._shards[value].samples:
                    self._finish_shard(value)
            while self._uploads:
                self._await_upload()
            self._publish()
        except BaseException:
            self.abort()
            raise
        self._state = "closed"
        self._pool.shutdown()

    def abort(self) -> None:
        """Stop without publishing. Shards already stored stay as unlisted objects that no reader looks at."""
        if self._state == "open":
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._state = "aborted"

    def _open(self) -> None:
        """Look whether writing here is possible, before any work is done."""
        if self._state == "open":
            return
        if self._state != "new":
            raise UsageError(f"this writer to {self._store.url} is {self._state}; make a new one")
        if self._writer is not None:
            self._refuse_second_writer()
        else:
            self._base, self._tag = load_base(self._store, append=self._append)
            self._schema = dict(self._base.schema) if self._base else {}
            self._adopt_length_field()
            self._adopt_split()
        self._probe()
        self._pool = ThreadPoolExecutor(_UPLOADS, "streamshard-upload")
        self._state = "open"

    def _adopt_length_field(self) -> None:
        if self._base is None:
            return
        if self._length_field not in (None, self._base.length_field):
            raise UsageError(
                f"length_field={self._length_field!r} differs from {self._base.length_field!r} of the dataset at "
                f"{self._store.url}; leave it out when appending"
            )
        self._length_field = self._base.length_field

    def _adopt_split(self) -> None:
        if self._base is None:
            return
        found = self._base.split.field if self._base.split is not None else None
        if self._split_by not in (None, found):
            raise UsageError(
                f"split_by={self._split_by!r} differs from {found!r} of the dataset at {self._store.url}; leave it out when "
                f"appending"
            )
        self._split_by = found

    def _refuse_second_writer(self) -> None:
        try:
            self._store.stat(record_key(str(self._writer)))
        except StorageError as error:
            if error.kind != "missing":
                raise
        else:
            raise UsageError(self._second_writer())

    def _second_writer(self) -> str:
        return (
            f"writer={self._writer!r} has already finished at {self._store.url} and awaits commit_writers; give every "
            f"parallel writer a name of its own, or delete {record_key(str(self._writer))} to write its part again"
        )

    def _probe(self) -> None:
        """A location that cannot be written to is found out now, not after the first 64 MiB."""
        key = f"writers/{self._writer or 'main'}.probe"
        try:
            self._store.put(key, b"probe")
            self._store.delete(key)
        except StorageError as error:
            raise StorageError(f"{self._store.url} cannot be written to: {error}", kind=error.kind) from error

    def _finish_shard(self, value: str = "") -> None:
        while len(self._uploads) >= _UPLOADS:
            self._await_upload()
        shard = self._shards[value].finish()
        key = template(self._writer).format(index=self._first_index + self._finished, digest=shard.index_digest)
        self._uploads.append((value, shard, self._pool.submit(self._store.put, key, shard.data)))

    @property
    def _finished(self) -> int:
        return len(self._done) + len(self._uploads)

    @property
    def _first_index(self) -> int:
        return len(self._base) if self._base else 0

    def _await_upload(self) -> None:
        value, shard, upload = self._uploads.popleft()
        try:
            upload.result()
        except BaseException:
            self.abort()  # a dataset without this shard must never be published
            raise
        self._done.append((value, replace(shard, data=b"")))
        if self._on_progress is not None:
            self._on_progress(self.progress)

    def _split(self) -> Split | None:
        if self._split_by is None:
            return None
        values = tuple(dict.fromkeys(value for value, _ in self._done))
        return Split(self._split_by, values, column([values.index(value) for value, _ in self._done]))

    def _publish(self) -> None:
        done = [shard for _, shard in self._done]
        part = Manifest(
            split=self._split(),
            groups=(ShardGroup(template(self._writer), self._first_index, len(self._done)),) if self._done else (),
            samples=column([shard.samples for shard in done]),
            bytes=column([shard.size for shard in done]),
            index_bytes=column([shard.index_bytes for shard in done]),
            index_digests=column([shard.index_digest for shard in done]),
            lengths=column([shard.length_sum for shard in done]),
            schema=self._schema,
            length_field=self._length_field,
            metadata=self._metadata or {},
        )
        if self._writer is not None:
            data = part.encode(created="")
            if not self._store.put_if(record_key(self._writer), data, tag=None):
                raise UsageError(self._second_writer())
            return
        if not self._samples:
            raise UsageError(f"no sample was written to {self._store.url}; write at least one, nothing was published")
        whole = combine([*([("the dataset", self._base)] if self._base else []), ("this writer", part)], self._metadata)
        publish(self._store, whole, tag=self._tag)


def _merged_split(parts: Sequence[tuple[str, Manifest]]) -> Split | None:
    """One split out of those of several manifests, whose shards follow one another."""
    fields = {part.split.field if part.split is not None else None for _, part in parts if len(part)}
    if len(fields) > 1:
        raise UsageError(
            f"the parts are split by different fields {sorted(map(str, fields))}; write all with one split_by"
        )
    found = [part.split for _, part in parts if part.split is not None and len(part)]
    if not found:
        return None
    values = tuple(dict.fromkeys(value for split in found for value in split.values))
    whole = [values.index(split.values[which]) for split in found for which in split.column.tolist()]
    return Split(found[0].field, values, column(whole))


def commit_writers(
    url: str,
    names: Sequence[str],
    *,
    append: bool = False,
    metadata: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Publish the shards of finished ``DatasetWriter(url, writer=name)`` as one dataset, in the order (name, index).

    The order does not depend on who finished first, nor on the order of `names`, so the dataset version is reproducible.
    Raises `UsageError` naming writers that have not finished, and for fields whose types differ between writers.
    """
    store = open_store(url, storage_options)
    names = sorted(names)
    if not names or len(set(names)) < len(names):
        raise UsageError(f"commit_writers(names={names}): give the name of every writer once")
    finished = {stat.key for stat in store.list("writers")}
    absent = [name for name in names if record_key(name) not in finished]
    if absent:
        have = sorted(key.removeprefix("writers/").removesuffix(".json") for key in finished if key.endswith(".json"))
        raise UsageError(
            f"writers {absent} have not finished at {store.url} (finished: {have}); close them first, or leave their "
            f"names out. Nothing was published"
        )
    base, tag = load_base(store, append=append)
    parts = [(f"writer {n!r}", decode_manifest(store.read(record_key(n)), where=record_key(n))) for n in names]
    for name, (_, part) in zip(names, parts, strict=True):
        if base is not None and _overlap(base, part):
            raise UsageError(
                f"shards of writer {name!r} are already part of the dataset at {store.url}: an earlier commit published them "
                f"and was interrupted before it removed the record. Delete {record_key(name)}; nothing was changed"
            )
    whole = combine([*([("the dataset", base)] if base else []), *parts], metadata)
    if not whole.total_samples:
        raise UsageError(f"the writers {names} wrote no sample to {store.url}; nothing was published")
    publish(store, whole, tag=tag)
    for name in names:
        store.delete(record_key(name))
    return whole


def _overlap(base: Manifest, part: Manifest) -> bool:
    """Whether a shard of `part` is listed in `base` under the same key."""
    if not np.isin(part.index_digests.astype(np.uint64), base.index_digests.astype(np.uint64)).any():
        return False
    return not {base.key(shard) for shard in range(len(base))}.isdisjoint(part.key(shard) for shard in range(len(part)))


def combine(parts: Sequence[tuple[str, Manifest]], metadata: Mapping[str, Any] | None) -> Manifest:
    """One manifest out of several named ones, shards in the order given; later metadata wins."""
    fields = {part.length_field for _, part in parts if len(part)}
    if len(fields) > 1:
        raise UsageError(f"the parts have different length fields {sorted(map(str, fields))}; write all with one")
    merged: dict[str, Any] = {}
    for _, part in parts:
        merged.update(part.metadata)
    columns = {
        name: column(np.concatenate([getattr(part, name).astype(np.uint64) for _, part in parts]))
        for name in ("samples", "bytes", "index_bytes", "index_digests", "lengths")
    }
    return Manifest(
        groups=tuple(group for _, part in parts for group in part.groups),
        schema=merge([(name, part.schema) for name, part in parts]),
        length_field=next(iter(fields), None),
        split=_merged_split(parts),
        metadata={**merged, **(metadata or {})},
        **columns,
    )


def load_base(store: Store, *, append: bool) -> tuple[Manifest | None, str | None]:
    """(current manifest, its tag) to append to; an existing dataset without `append` is refused."""
    tag = current_tag(store)
    if tag is None:
        return None, None
    if not append:
        raise UsageError(
            f"{store.url} already holds a dataset; pass append=True to add to it, or choose another URL (nothing there was "
            f"changed)"
        )
    return load_manifest(store), tag


def template(writer: str | None) -> str:
    """Shard keys by content: two writers can never overwrite each other's data with something else."""
    return f"shards/{writer or 'part'}-{{index:06d}}-{{digest:016x}}.msgpack.zst"


def record_key(writer: str) -> str:
    """Where a finished parallel writer leaves its list of shards."""
    return f"writers/{writer}.json"


def _check_name(writer: str) -> None:
    if not isinstance(writer, str) or not _NAME.fullmatch(writer):
        raise UsageError(
            f"writer={writer!r}: use 1 to 64 letters, digits, '_', '-' and '.', not beginning with '.' or '-'"
        )


def _check_sizes(shard_bytes: int, block_bytes: int, level: int) -> None:
    for name, value, low, high in (
        ("shard_bytes", shard_bytes, 1024, 4 << 30),
        ("block_bytes", block_bytes, 1, 256 << 20),
        ("level", level, -7, 22),
    ):
        if not isinstance(value, int) or not low <= value <= high:
            raise UsageError(f"{name}={value!r} must be an int from {low} to {high}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
