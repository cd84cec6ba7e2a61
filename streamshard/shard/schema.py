"""The field schema: what type each field has, learnt while writing and held to.

A training job that meets a string where it expects tokens fails hours in; a writer that refuses the sample fails at
once and can name it. None and missing fields are always allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streamshard.errors import UsageError

Schema = dict[str, str]  # field -> "str", "int", "float", "bool", "bytes", "list", "map" or "array[dtype, ndim]"

_PLAIN: dict[type, str] = {str: "str", int: "int", float: "float", bool: "bool", bytes: "bytes"}
_KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float"}


def field_type(value: object) -> str | None:
    """The schema's name for the type of `value`; None for None, which fits every type."""
    plain = _PLAIN.get(type(value))
    if plain is not None or value is None:
        return plain
    if isinstance(value, np.ndarray):
        return f"array[{value.dtype.newbyteorder('=')}, {value.ndim}]"
    if isinstance(value, np.generic):
        return _KINDS.get(value.dtype.kind, "unknown")
    if isinstance(value, list | tuple):
        _check_nested(value)
        return "list"
    if isinstance(value, Mapping):
        _check_nested(value)
        return "map"
    return next((name for base, name in _PLAIN.items() if isinstance(value, base)), "unknown")


def _check_nested(value: object) -> None:
    """Maps inside a sample need text keys: msgpack would write others, and its decoder would refuse them later."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise UsageError(f"a nested map has the key {key!r} of type {type(key).__name__}; use str keys")
            _check_nested(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            if isinstance(inner, list | tuple | Mapping):
                _check_nested(inner)


def extend(schema: Schema, sample: Mapping[str, Any]) -> None:
    """Learn new fields of `sample` into `schema`; refuse a field whose type differs from before.

    Nothing is learnt from a refused sample.
    """
    new: Schema = {}
    for name, value in sample.items():
        if not isinstance(name, str):
            raise UsageError(f"the field name {name!r} is of type {type(name).__name__}; field names are str")
        found = field_type(value)
        known = schema.get(name)
        if found == known or found is None:
            continue
        if known is not None:
            raise UsageError(f"field {name!r} is {found} where earlier samples have {known}; convert it before writing")
        new[name] = found
    schema.update(new)


def merge(schemas: list[tuple[str, Schema]]) -> Schema:
    """One schema out of several named ones; a field with two types is refused."""
    merged: Schema = {}
    origin: dict[str, str] = {}
    for source, schema in schemas:
        for name, kind in schema.items():
            if merged.setdefault(name, kind) != kind:
                raise UsageError(
                    f"field {name!r} is {merged[name]} in {origin[name]} and {kind} in {source}; "
                    f"write both with one type"
                )
            origin.setdefault(name, source)
    return merged
