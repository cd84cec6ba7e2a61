"""Randomness that means the same in every NumPy version.

Only the *raw* 64-bit output of the Philox counter-based generator is used; NumPy keeps that stream stable
across versions, while it does not promise this for ``Generator`` methods. Everything made from the raw words
(bounded integers, permutations) is arithmetic of ours, pinned by golden lists in the tests.

Counter-based means random access: word ``i`` of a stream costs the same whatever ``i`` is, so a cursor never
has to carry a generator's state.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_WORDS_PER_BLOCK = 4  # Philox4x64: one counter step makes four words
_UINT32 = np.uint64(32)


def stream_key(*parts: int | str) -> int:
    """A 128-bit Philox key for the stream named by `parts`; different tuples give unrelated streams.

    Parts are tagged with their type and length, so that ``("a", "b")`` and ``("ab",)`` or ``1`` and ``"1"``
    never meet.
    """
    hasher = blake2b(digest_size=16)
    for part in parts:
        text = str(part).encode()
        tag = b"s" if isinstance(part, str) else b"i"
        hasher.update(tag + len(text).to_bytes(8, "little") + text)
    return int.from_bytes(hasher.digest(), "little")


def raw_words(key: int, start: int, count: int) -> NDArray[np.uint64]:
    """Words ``start … start + count - 1`` of the stream `key`, shape ``(count,)``, uint64."""
    block, skip = divmod(start, _WORDS_PER_BLOCK)
    generator = np.random.Philox(key=key, counter=block)
    words: NDArray[np.uint64] = generator.random_raw(skip + count)
    return words[skip:]


def bounded(words: NDArray[np.uint64], bounds: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Integers in ``[0, bound)`` by multiply-and-shift of the upper 32 bits; `bounds` broadcasts, each <= 2**32.

    The bias is below bound / 2**32 (1e-7 for a buffer of 512), and there is no rejection loop: draw ``k`` always uses
    word ``k``, which is what makes the draws random-access.
    """
    limits = np.asarray(bounds, dtype=np.uint64)
    return (((words >> _UINT32) * limits) >> _UINT32).astype(np.int64)


def permutation(key: int, size: int) -> NDArray[np.int64]:
    """A permutation of ``range(size)``, int64: the stable argsort of raw words (ties, if any, keep their order)."""
    return np.argsort(raw_words(key, 0, size), kind="stable")
