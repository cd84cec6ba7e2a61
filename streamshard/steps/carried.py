"""Pieces that a window has left for the next one, as text for a cursor: a few bytes each.

Sorted by identity, a piece's position is mostly a small step from the one before, so numbers are stored as differences, in
seven bits a byte, and the bytes as base64.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from streamshard.errors import StateError

Identity = tuple[Any, ...]  # (source path, epoch, k, one index per FlatMap passed)

_AGE, _FIRST, _NEW_EPOCH, _CUT, _INDEXED = 3, 4, 8, 16, 32  # bits of a piece's head


class Carried(NamedTuple):
    """A piece that waits: whose it is, from which token on, how many windows it has waited for, and whether it is the first
    document of its stored sample.
    """

    identity: Identity
    start: int
    age: int
    first: bool


def encode(pieces: Iterable[Carried]) -> tuple[tuple[str, str], ...]:
    """(source path, text) for each source, immutable and safe for JSON."""
    ordered = sorted(pieces)
    return tuple((path, _encode(list(of))) for path, of in groupby(ordered, key=lambda piece: piece.identity[0]))


@lru_cache(maxsize=256)  # a contents snapshot asks with every item, and the answer changes once a window
def decode(groups: tuple[tuple[str, str], ...]) -> tuple[Carried, ...]:
    """The pieces again, sorted. Raises `StateError` for damaged text."""
    try:
        return tuple(piece for path, text in groups for piece in _decode(path, text))
    except (ValueError, TypeError) as error:
        raise StateError(
            f"the pieces that a step carries are damaged in the state ({error}); resume from an earlier checkpoint"
        ) from error


def _encode(pieces: list[Carried]) -> str:
    out = bytearray()
    last_epoch, last_k = 0, 0
    for (_, epoch, k, *indices), start, age, first in pieces:
        new = epoch != last_epoch
        out.append(age | first * _FIRST | new * _NEW_EPOCH | (start > 0) * _CUT | bool(indices) * _INDEXED)
        if new:
            _put(out, epoch - last_epoch)
        _put(out, k if new else k - last_k)
        if start:
            _put(out, start)
        if indices:
            _put(out, len(indices))
            for index in indices:
                _put(out, index)
        last_epoch, last_k = epoch, k
    return base64.b64encode(bytes(out)).decode()


def _decode(path: str, text: str) -> Iterator[Carried]:
    data = iter(base64.b64decode(text, validate=True))
    epoch, k = 0, 0
    for head in data:
        if head & _NEW_EPOCH:
            epoch, k = epoch + _get(data), 0
        k += _get(data)
        start = _get(data) if head & _CUT else 0
        indices = [_get(data) for _ in range(_get(data))] if head & _INDEXED else []
        yield Carried((path, epoch, k, *indices), start, head & _AGE, bool(head & _FIRST))


def _put(out: bytearray, number: int) -> None:
    while number > 127:
        out.append(128 | number & 127)
        number >>= 7
    out.append(number)


def _get(data: Iterator[int]) -> int:
    number = shift = 0
    while True:
        byte = next(data, None)
        if byte is None:
            raise ValueError("it ends in the middle of a number")
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number
