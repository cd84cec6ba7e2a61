"""A random permutation of [0, n) that never exists in memory: index in, index out.

A four-round Feistel network over the smallest even number of bits that covers n, with cycle walking: values that fall
outside of [0, n) are permuted again until they fall inside (fewer than four tries on average). Round functions mix 32-bit
halves with multiply-xorshift constants (the finaliser of MurmurHash3) under keys from Philox. This serves random-access
sampling of datasets for which an array of n indices would be gigabytes; it is not cryptography.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamshard.order.random import raw_words, stream_key

_ROUNDS = 4
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


class IndexPermutation:
    """The permutation of ``range(size)`` named by `key`. Immutable and thread-safe."""

    def __init__(self, key: int, size: int) -> None:
        self.size = size
        bits = max(2, (max(size, 2) - 1).bit_length())
        self._half = np.uint64((bits + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = raw_words(key, 0, _ROUNDS)

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where `indices` (each in [0, size)) go; same shape."""
        values = self._scramble(indices.astype(np.uint64))
        outside = values >= self.size
        while outside.any():
            values[outside] = self._scramble(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _scramble(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for multiplier in _MULTIPLIERS:
        values = (values ^ (values >> _SHIFT)) * multiplier  # wraps around: arithmetic modulo 2**64
    return values ^ (values >> _SHIFT)


def indices_of_run(slots: NDArray[np.int64], epoch: int, size: int, seed: int, *, shuffle: bool) -> NDArray[np.int64]:
    """The indices of a dataset of `size` samples at `slots` of a run that began with `epoch`: a permutation for each epoch."""
    if not shuffle:
        return slots % size
    epochs = epoch + slots // size
    out = np.empty_like(slots)
    for number in np.unique(epochs).tolist():
        chosen = epochs == number
        out[chosen] = IndexPermutation(stream_key(seed, number, "map", ""), size)(slots[chosen] % size)
    return out
