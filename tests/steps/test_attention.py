"""A document in a row trains exactly as it would alone, through every way to feed a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import streamshard as ss
from streamshard.attention import block_mask, flatten, flex_mask, hugging_face, varlen
from streamshard.errors import UsageError
from streamshard.steps.contract import Fields, Layout
from streamshard.steps.tensors import collate

VOCABULARY, WIDTH, HEADS = 97, 32, 4


def some_documents(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"tokens": rng.integers(0, VOCABULARY, n), "loss_mask": (rng.random(n) < 0.8).astype(np.int8)} for n in lengths
    ]


def row_of(documents, size, **layout):
    pieces = [Fields({}).read(document) for document in documents]
    return Layout(size, **layout).row(pieces, [0] * len(pieces))


def batch_of(*rows, size, **layout):
    return collate([row_of(documents, size, **layout) for documents in rows])


class Transformer(nn.Module):
    """Two layers, learnt positions, SDPA with our mask or flex_attention with ours."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, batch, flex=False):
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        for projection, mlp in zip(self.projections, self.mlps, strict=True):
            q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in projection(x).chunk(3, dim=2))
            if flex:
                seen = flex_attention(q.float(), k.float(), v.float(), block_mask=flex_mask(batch)).double()
            else:
                seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=block_mask(batch))
            x = x + seen.transpose(1, 2).flatten(2)
            x = x + mlp(x)
        return self.head(x)


def summed_loss(logits, labels):
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def test_a_documents_logits_do_not_move_by_a_bit_when_its_neighbour_changes():
    model = Transformer()
    first, second, other = some_documents([9, 12, 9])
    one, two = (model(batch_of([document, second], size=24)) for document in (first, other))
    assert not torch.equal(one[0, :9], two[0, :9])
    assert torch.equal(one[0, 9:21], two[0, 9:21])


@pytest.mark.parametrize("layout", [{}, {"segments": 5}])
def test_the_loss_of_packed_rows_is_the_sum_over_the_documents_alone(layout):
    model = Transformer()
    documents = some_documents([9, 12, 3, 20, 1, 7])
    packed = batch_of(documents[:3], documents[3:], size=30, **layout)
    alone = sum(
        summed_loss(model(batch), batch["labels"])
        for batch in (batch_of([document], size=len(document["tokens"])) for document in documents)
    )
    loss = summed_loss(model(packed), packed["labels"])
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=0)


def test_labels_shifted_beforehand_give_the_same_loss():
    model = Transformer()
    documents = some_documents([9, 12, 3])
    plain, shifted = (batch_of(documents, size=30, shifted=shift) for shift in (False, True))
    logits = model(plain)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), shifted["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(loss, summed_loss(logits, plain["labels"]), rtol=1e-12, atol=0)


def test_flex_attention_sees_what_sdpa_sees():
    model = Transformer()
    documents = some_documents([9, 12, 3, 20])
    batch = batch_of(documents[:3], documents[3:], size=30)
    with torch.no_grad():  # flex_attention has no backward on CPUs
        torch.testing.assert_close(model(batch, flex=True), model(batch), rtol=1e-4, atol=1e-5)


def test_a_block_mask_need_not_be_causal():
    batch = batch_of(some_documents([2, 1]), size=4)
    assert block_mask(batch, causal=False)[0, 0].tolist() == [
        [True, True, False, False], [True, True, False, False], [False, False, True, False], [False, False, False, True],
    ]  # fmt: skip
    assert block_mask(batch)[0, 0, 0].tolist() == [True, False, False, False]


@pytest.mark.parametrize("layout", [{}, {"segments": 5}])
def test_a_flat_batch_is_its_documents_end_to_end(layout):
    documents = some_documents([9, 12, 3, 20, 1, 7])
    flat = flatten(batch_of(documents[:3], documents[3:], size=30, **layout))
    assert flat["input_ids"].tolist() == [token for document in documents for token in document["tokens"]]
    assert flat["cu_seqlens"].tolist() == [0, 9, 21, 24, 44, 45, 52]
    assert flat["cu_seqlens"].dtype == torch.int32
    assert flat["max_seqlen"] == 20
    assert {name: len(flat[name]) for name in ("labels", "loss_mask", "position_ids", "segment_ids")} == dict.fromkeys(
        ("labels", "loss_mask", "position_ids", "segment_ids"), 52
    )


@pytest.mark.parametrize("layout", [{}, {"segments": 4}])
def test_rows_end_to_end_have_the_same_segments_with_their_padding(layout):
    documents = some_documents([3, 1, 4, 2, 5])
    batch = batch_of(documents[:3], documents[3:], size=10, **layout)
    ends, longest = varlen(batch)
    assert sorted(set(ends.tolist())) == [0, 3, 4, 8, 10, 12, 17, 20]
    assert ends.diff().min() >= 0
    assert longest == 10
    assert len(ends) == 2 * batch["cu_seqlens"].shape[1] + 1


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_hugging_face_model_gets_the_loss_of_the_documents_alone(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=64, attn_implementation=kind,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    documents = some_documents([9, 12, 3, 20, 7])
    batch = batch_of(documents[:3], documents[3:], size=30)
    packed = model(**hugging_face(batch, kind)).loss * batch["loss_mask"].sum()
    alone = 0.0
    for document in documents:
        one = batch_of([document], size=len(document["tokens"]))
        plain = model(input_ids=one["input_ids"], labels=one["labels"])
        alone += plain.loss.item() * int(one["loss_mask"].sum())
    assert packed.item() == pytest.approx(alone, rel=1e-5)


def test_flash_arguments_are_one_row_without_padding():
    documents = some_documents([9, 12, 3])
    given = hugging_face(batch_of(documents, size=30), "flash")
    assert given["input_ids"].shape == given["position_ids"].shape == (1, 24)
    assert given["cu_seq_lens_q"].tolist() == given["cu_seq_lens_k"].tolist() == [0, 9, 21, 24]
    assert given["max_length_q"] == given["max_length_k"] == 12


def test_what_is_no_batch_of_rows_is_told_so():
    with pytest.raises(UsageError, match="segment_ids of shape"):
        block_mask({"input_ids": torch.zeros(2, 3)})
    with pytest.raises(UsageError, match="'sdpa', 'eager', 'flash'"):
        hugging_face(batch_of(some_documents([3]), size=4), "flash2")


def test_a_row_becomes_tensors_through_the_batch_step(tmp_path):
    with ss.DatasetWriter(str(tmp_path)) as writer:
        for document in some_documents([9, 12, 3, 20, 7]):
            writer.write(document)
    dataset = ss.StreamDataset(str(tmp_path), ss.Pack(30), ss.Batch(2), partitions=1)
    batch = next(iter(dataset))
    assert batch["input_ids"].shape == (2, 30)
    assert isinstance(batch["max_seqlen"], int)
    assert block_mask(batch).shape == (2, 1, 30, 30)
