"""A batch that went through shared memory is the batch that was sent."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from streamshard.loading.parts import decode, encode
from streamshard.loading.shared_memory import Segment, anonymous_file
from streamshard.steps.tensors import fresh

DTYPES = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes(),
    hnp.complex_number_dtypes(), hnp.datetime64_dtypes(), hnp.unicode_string_dtypes(min_len=1, max_len=5),
)  # fmt: skip
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


def through(batch):
    descriptor = anonymous_file()
    there, here = Segment(descriptor), Segment(os.dup(descriptor))
    try:
        skeleton = encode(batch, there)
        return decode(skeleton, here, there.size, fresh)
    finally:
        there.close()
        here.close()


@settings(max_examples=200, deadline=None)
@given(st.lists(ARRAYS, max_size=6))
def test_arrays_of_every_kind_and_shape_come_back_as_they_were(arrays):
    batch = [{"id": place, "array": array, "name": "x"} for place, array in enumerate(arrays)]
    back = through(batch)
    assert [row["id"] for row in back] == list(range(len(arrays)))
    for sent, row in zip(arrays, back, strict=True):
        got = row["array"]
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert got.tobytes() == sent.tobytes()


@pytest.mark.parametrize(
    "array", [np.arange(24).reshape(4, 6).T, np.arange(20)[::-3], np.broadcast_to(np.int16(7), (3, 2))]
)
def test_arrays_that_are_not_contiguous_come_back_too(array):
    assert np.array_equal(through([array, array])[1], array)


def test_an_array_that_is_kept_is_read_only_and_does_not_keep_its_batch():
    back = through([np.zeros(1_000_000), np.arange(3)])
    assert not any(array.flags.writeable for array in (*back, *through([np.zeros((2, 0))])))
    memory = back[1]
    while isinstance(memory, np.ndarray):
        memory = memory.base
    assert len(memory) == 24
