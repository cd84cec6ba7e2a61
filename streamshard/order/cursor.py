"""Cursors and refs: where a partition stands, and which sample a sample is.

A *cursor* is a small immutable tuple. The source's is ``(epoch, k)``: k samples of that epoch have been emitted. A step
that adds something of its own wraps its upstream's cursor as its first element, so the innermost pair is always found by
following first elements. A *ref* names a sample for people and for ledgers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Cursor = tuple[Any, ...]

REF_FIELD = "__ref__"  # where provenance=True puts a sample's Ref


class Ref(NamedTuple):
    """The identity of a stored sample: source name ("" for a plain dataset), shard number, row in the shard."""

    source: str
    shard: int
    row: int


MIX = "mix"  # begins a mixture's cursor; see steps/mixture.py


def innermost(cursor: Cursor) -> Cursor:
    """The source's own cursor inside that of any pipeline: (epoch, k), or a mixture's."""
    while isinstance(cursor[0], tuple):
        cursor = cursor[0]
    return cursor if cursor[0] == MIX else cursor[:2]


def with_innermost(cursor: Cursor, inner: Cursor) -> Cursor:
    """`cursor` with another one of its source."""
    if not isinstance(cursor[0], tuple):
        return inner
    return with_innermost(cursor[0], inner), *cursor[1:]


def freeze(value: Any) -> Any:
    """Lists, as JSON or msgpack return them, back to tuples."""
    return tuple(freeze(item) for item in value) if isinstance(value, list | tuple) else value
