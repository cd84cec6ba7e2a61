"""Rows say exactly where documents begin and end, and nothing is charged to the wrong token."""

from __future__ import annotations

import numpy as np
import pytest

import streamshard as ss
from streamshard.errors import DataError, UsageError
from streamshard.order.cursor import Ref
from streamshard.steps.contract import Fields, Layout, loss_tokens


def documents(lengths, **columns):
    made, token = [], 1
    for length in lengths:
        made.append(Fields({}).read({"tokens": np.arange(token, token + length, dtype=np.uint16), **columns}))
        token += length
    return made


def row_of(samples, size, fields=None, **layout):
    reader = Fields(fields or {})
    pieces = [reader.read(sample) for sample in samples]
    return Layout(size, extras=reader.extras, **layout).row(pieces, [0] * len(pieces))


def test_ends_come_from_lengths():
    row = Layout(11).row(documents([3, 1, 1, 2]), [0] * 4)
    assert row["cu_seqlens"].tolist() == [0, 3, 4, 5, 7]
    assert row["max_seqlen"] == 3
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 0, 0, 1, 0, 1, 2, 3]
    assert row["segment_ids"].tolist() == [0, 0, 0, 1, 2, 3, 3, -1, -1, -1, -1]
    assert row["labels"].tolist() == [-100, 2, 3, -100, -100, -100, 7, -100, -100, -100, -100]
    assert row["loss_mask"].tolist() == [False, True, True, False, False, False, True, False, False, False, False]


def test_fixed_shapes_have_the_padding_as_a_segment_and_then_repeat():
    row = Layout(11, segments=6).row(documents([3, 1, 1, 2]), [0] * 4)
    assert row["cu_seqlens"].tolist() == [0, 3, 4, 5, 7, 11, 11, 11]
    assert row["max_seqlen"] == 11
    full = Layout(7, segments=4).row(documents([3, 1, 1, 2]), [0] * 4)
    assert full["cu_seqlens"].tolist() == [0, 3, 4, 5, 7, 7]


def test_dtypes_are_what_torch_and_flash_attention_take():
    row = Layout(8).row(documents([3]), [0])
    dtypes = {name: value.dtype.name for name, value in row.items() if isinstance(value, np.ndarray)}
    assert dtypes == {
        "input_ids": "int64", "labels": "int64", "loss_mask": "bool", "position_ids": "int64", "segment_ids": "int32",
        "cu_seqlens": "int32",
    }  # fmt: skip


def test_nothing_at_the_end_of_a_document_is_charged_for_the_next_ones_first_token():
    a = {"tokens": np.array([5, 6, 7]), "loss_mask": np.array([0, 1, 1])}
    b = {"tokens": np.array([8, 9]), "loss_mask": np.array([1, 1])}
    assert row_of([a, b], 6)["labels"].tolist() == [-100, 6, 7, -100, 9, -100]
    shifted = row_of([a, b], 6, shifted=True)
    assert shifted["labels"].tolist() == [6, 7, -100, 9, -100, -100]
    assert shifted["loss_mask"].tolist() == [True, True, False, True, False, False]


def test_a_chat_with_end_tokens_inside_is_one_segment():
    eos = 2
    chat = {"tokens": np.array([1, 5, eos, 1, 6, eos, 1, 7, eos]), "loss_mask": np.array([0, 1, 1, 0, 1, 1, 0, 1, 1])}
    other = {"tokens": np.array([1, eos, 8])}
    row = row_of([chat, other], 16)
    assert row["cu_seqlens"].tolist() == [0, 9, 12]
    assert row["position_ids"].tolist()[:12] == [*range(9), 0, 1, 2]


def test_labels_that_a_sample_brings_are_used_and_masked_too():
    given = {"input_ids": [4, 5, 6, 7], "labels": [4, 9, -100, 7], "loss_mask": [1, 1, 1, 0]}
    assert row_of([given], 5)["labels"].tolist() == [-100, 9, -100, -100, -100]


def test_fields_can_have_any_name_and_columns_of_the_users_come_along():
    sample = {"text": [4, 5], "keep": [1, 0], "weight": np.array([0.5, 2.0], np.float32)}
    fields = {"input_ids": "text", "loss_mask": "keep", "weights": "weight"}
    row = row_of([sample], 3, fields)
    assert row["weights"].tolist() == [0.5, 2.0, 0.0]
    assert row["weights"].dtype == np.float32
    assert row["labels"].tolist() == [-100, -100, -100]


def test_columns_of_the_users_have_one_dtype_whatever_a_sample_has():
    for values, dtype in (
        ([1, 2], np.int64),
        (np.array([1, 2], np.uint8), np.int64),
        ([0.5, 1.0], np.float32),
        ([True, False], np.bool_),
    ):
        assert row_of([{"tokens": [4, 5], "w": values}], 3, {"w": "w"})["w"].dtype == dtype
    with pytest.raises(DataError, match="columns of rows are numbers or bools"):
        row_of([{"tokens": [4, 5], "w": ["a", "b"]}], 3, {"w": "w"})


def test_a_row_knows_where_its_segments_come_from():
    pieces = [piece._replace(ref=Ref("web", 3, number)) for number, piece in enumerate(documents([2, 4]))]
    row = Layout(8, provenance=True).row([pieces[0], pieces[1].cut(1, 4)], [0, 1])
    assert row["__segments__"] == [ss.Segment(Ref("web", 3, 0), 0, 2), ss.Segment(Ref("web", 3, 1), 1, 3)]


def test_loss_tokens_are_labels_without_each_segments_first():
    masked = Fields({}).read({"tokens": [1, 2, 3], "loss_mask": [1, 1, 0]})
    assert loss_tokens(masked) == 1
    assert loss_tokens(documents([5])[0]) == 4
    row = row_of([{"tokens": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"tokens": [4, 5]}], 8)
    assert (len(row["input_ids"]), (row["segment_ids"] >= 0).sum(), row["loss_mask"].sum()) == (8, 5, 3)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": "a"}, "no tokens in 'input_ids' or 'tokens', it has the fields ['text']"),
        ({"tokens": np.zeros(0, np.uint16)}, "'tokens' has no tokens; leave empty documents out with a Filter"),
        ({"tokens": np.zeros((2, 2), np.uint16)}, "shape (2, 2)"),
        ({"tokens": np.zeros(3)}, "float64 where token ids are integers"),
        ({"tokens": [1, 2], "loss_mask": [1]}, "'loss_mask' has 1 values for the 2 tokens in 'tokens'"),
        ({"tokens": []}, "'tokens' has no tokens"),
        ({"tokens": [[1], [2, 3]]}, "lists of different lengths"),
        ({"tokens": "text"}, "'tokens' is a str, not a value for each token; tokenize it in a Map"),
        ({"tokens": [1, -2]}, "'tokens' holds -2"),
        ({"tokens": [1, 2], "labels": [1.5, 2.5]}, "'labels' holds float64 where labels are integers"),
        ({"tokens": [1, 2], "loss_mask": [0.5, 1.0]}, "values that are not 0 or 1"),
        ({"tokens": [1, 2], "loss_mask": [None, 1]}, "object values that are not 0 or 1"),
        ([1, 2], "this is a list"),
    ],
)
def test_documents_that_cannot_be_used_are_named_with_the_cure(sample, message):
    with pytest.raises(DataError) as caught:
        Fields({}).read(sample)
    assert message in str(caught.value)


def test_a_named_field_that_is_not_there_is_an_error():
    with pytest.raises(DataError, match="no field 'mask', which fields= names"):
        Fields({"loss_mask": "mask"}).read({"tokens": [1]})
    with pytest.raises(DataError, match="no tokens in 'ids'"):
        Fields({"input_ids": "ids"}).read({"tokens": [1]})


def test_what_is_made_from_lengths_cannot_be_given():
    with pytest.raises(UsageError, match="'cu_seqlens', 'position_ids'"):
        Fields({"position_ids": "p", "cu_seqlens": "c"})
    with pytest.raises(UsageError, match="pass a mapping"):
        ss.Pack(8, fields=["tokens"])
