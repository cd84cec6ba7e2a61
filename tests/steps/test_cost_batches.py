"""Batches that cost at most so many tokens, padding included, lose nothing and go on exactly after every one of them."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamshard as ss
from streamshard.errors import DataError, UsageError
from streamshard.steps.step import StepContext
from streamshard.testing import assert_exact_resume
from tests.steps.test_pack import Memory, corpus, halves, lognormal, noisy, odd


def batches(step, lengths, cursor=None):
    """(stage, batches as lists of lengths), of documents in memory."""
    cursor = cursor or step.start((0, 0))
    upstream = Memory(lengths, step.inner(cursor))
    stage = step.open(upstream, cursor, StepContext(0, 1, past=upstream))
    return stage, ([int(n) for n in batch["cu_seqlens"][:, 1]] for batch in stage)


def cost(batch):
    return len(batch) * max(batch)


def test_a_batch_ends_where_the_next_document_would_cost_too_much_padding():
    _, found = batches(ss.Batch(max_tokens=150), [100, 10, 10, 10, 100])
    assert list(found) == [[100], [10, 10, 10], [100]]
    _, found = batches(ss.Batch(2, max_tokens=150), [100, 10, 10, 10, 100])
    assert list(found) == [[100], [10, 10], [10], [100]]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 200), st.none() | st.integers(1, 5))
def test_batches_hold_consecutive_documents_and_as_many_as_they_can(lengths, most, size):
    stage, found = batches(ss.Batch(size, max_tokens=most), lengths)
    found = list(found)
    assert list(itertools.chain(*found)) == lengths
    assert all(cost(batch) <= most and len(batch) <= (size or 99) for batch in found)
    for batch, following in itertools.pairwise(found):
        assert cost([*batch, following[0]]) > most or len(batch) == size
    counts = ss.Batch(size, max_tokens=most).counts(stage.cursor())
    assert (counts.rows, counts.real, counts.physical) == (len(lengths), sum(lengths), sum(map(cost, found)))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 60), max_size=60),
    st.integers(1, 15),
    st.booleans(),
    st.sampled_from(["drop", "alone", "truncate"]),
)
def test_buckets_hold_documents_of_their_lengths_and_all_documents_leave_in_time(lengths, window, fixed, overflow):
    step = ss.BucketBatch([8, 16, 32], 48, window=window, fixed_shapes=fixed, overflow=overflow)
    stage, found = batches(step, lengths)
    found = list(found)
    kept = [min(n, 48) if overflow == "truncate" else n for n in lengths if n <= 48 or overflow != "drop"]
    assert Counter(itertools.chain(*found)) == Counter(kept)
    bucket = [next((b for b in (8, 16, 32) if n <= b), 99) for n in range(61)]
    for batch in found:
        assert len({bucket[n] for n in batch}) == 1
        width = bucket[batch[0]] if fixed and bucket[batch[0]] < 99 else max(batch)
        assert len(batch) * width <= 48 or len(batch) == 1
    counts = step.counts(stage.cursor())
    assert counts.real == sum(kept)
    assert counts.total.documents == len(lengths)
    assert counts.total.dropped == (sum(n > 48 for n in lengths) if overflow == "drop" else 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=50), st.sampled_from(["bucket", "tokens"]), st.integers(0, 40))
def test_a_stage_goes_on_after_any_batch_with_the_same_batches_and_counts(lengths, kind, stop):
    step = (
        ss.BucketBatch([8, 16, 32], 48, window=9, overflow="drop")
        if kind == "bucket"
        else ss.Batch(max_tokens=48, overflow="drop")
    )
    whole, expected = batches(step, lengths)
    expected = list(expected)
    first, found = batches(step, lengths)
    got = list(itertools.islice(found, stop))
    second, rest = batches(step, lengths, first.cursor())
    got += list(rest)
    assert got == expected
    assert second.cursor() == whole.cursor()
    total = step.counts(whole.cursor()).total
    assert (total.documents, total.dropped) == (len(lengths), sum(n > 48 for n in lengths))
    assert total.dropped_tokens == sum(n for n in lengths if n > 48)


def test_buckets_waste_little_and_change_no_shares():
    lengths = [n for n in lognormal(20_000) if n <= 4096]
    step = ss.BucketBatch([256, 512, 1024, 2048, 4096], 16_384)
    stage, found = batches(step, lengths)
    assert Counter(itertools.chain(*found)) == Counter(lengths)  # over an epoch, shares are those of the documents
    assert step.counts(stage.cursor()).padding < 0.35
    plain = ss.Batch(max_tokens=16_384)
    stage, found = batches(plain, lengths)
    assert list(itertools.chain(*found)) == lengths
    assert plain.counts(stage.cursor()).padding > 0.5


PIPELINES = {
    "tokens": (ss.Batch(max_tokens=64, overflow="truncate"),),
    "tokens, all before": (ss.Filter(odd), ss.Map(noisy, rng=True), ss.FlatMap(halves), ss.Batch(max_tokens=64, overflow="alone")),
    "tokens, dropping": (ss.Batch(max_tokens=12, overflow="drop"),),
    "buckets": (ss.BucketBatch([6, 12, 24], 64, window=9, overflow="alone"),),
    "buckets, all before": (ss.Filter(odd), ss.Map(noisy, rng=True, threads=2), ss.FlatMap(halves), ss.BucketBatch([4, 9], 64, window=9, overflow="alone")),
}  # fmt: skip


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_resumes_at_every_batch(tmp_path, name, snapshot):
    directory = corpus(tmp_path)
    options = {"partitions": 3, "shuffle_buffer": 7, "snapshot": snapshot, "provenance": True}
    assert_exact_resume(lambda: ss.StreamDataset(directory, *PIPELINES[name], **options), chain=1)
    assert_exact_resume(
        lambda: ss.StreamDataset(directory, *PIPELINES[name], repeat=True, **options), items=60, stops=range(0, 60, 7)
    )


@pytest.mark.parametrize("name", ["tokens", "buckets"])
def test_batches_of_a_mixture_are_the_same_on_any_number_of_ranks(tmp_path, name):
    directory = corpus(tmp_path)
    mixture = ss.Mixture({"a": directory, "b": ss.Source(directory, ss.FlatMap(halves))}, (2, 1))

    def open_rank(rank, ranks):
        topology = ss.Topology(rank, ranks)
        return ss.StreamDataset(
            mixture, *PIPELINES[name], partitions=6, shuffle_buffer=7, repeat=True, topology=topology
        )

    def key(batch):
        return batch["input_ids"].tolist()

    alone = open_rank(0, 1)
    expected = [key(batch) for batch in itertools.islice(iter(alone), 60)]
    got, state = [], None
    for ranks, count in ((2, 9), (6, 2), (1, 12), (3, 6)):
        datasets = [open_rank(rank, ranks) for rank in range(ranks)]
        for dataset in datasets if state else ():
            dataset.load_state_dict(state)
        taken = [[key(batch) for batch in itertools.islice(iter(dataset), count)] for dataset in datasets]
        got += itertools.chain(*zip(*taken, strict=True))
        state = ss.merge_states([dataset.state_dict() for dataset in datasets])
    assert got == expected
    resumed = open_rank(0, 1)
    resumed.load_state_dict(state)
    assert resumed.counts() == alone.counts()


def test_batches_are_by_the_contract_and_can_be_traced(tmp_path):
    directory = corpus(tmp_path)
    stored = {item["__ref__"]: item["tokens"].tolist() for item in ss.StreamDataset(directory, provenance=True)}
    for batch in ss.StreamDataset(
        directory, ss.BucketBatch([9, 24], 64, overflow="alone"), provenance=True, partitions=2
    ):
        rows, size = batch["input_ids"].shape
        assert batch["max_seqlen"] == size == int(batch["cu_seqlens"].max())
        for row in range(rows):
            (segment,) = batch["__segments__"][row]
            assert batch["input_ids"][row, : segment.length].tolist() == stored[segment.ref]
            assert batch["segment_ids"][row].tolist() == [0] * segment.length + [-1] * (size - segment.length)
            assert int(batch["labels"][row, 0]) == -100


def test_items_that_are_no_documents_are_put_together_by_a_function(tmp_path):
    with ss.DatasetWriter(str(tmp_path)) as writer:
        for number in range(40):
            writer.write({"id": number, "frames": 1 + number % 20})
    for step in (
        ss.Batch(max_tokens=60, length="frames", collate_fn=list),
        ss.BucketBatch([5, 10, 20], 60, length="frames", collate_fn=list),
    ):
        found = list(ss.StreamDataset(str(tmp_path), step, partitions=2))
        assert sorted(item["id"] for batch in found for item in batch) == list(range(40))
        assert all(cost([item["frames"] for item in batch]) <= 60 for batch in found)


def test_a_document_that_costs_more_than_a_batch_is_refused_with_its_place(tmp_path):
    directory = corpus(tmp_path)
    for step in (ss.Batch(max_tokens=12), ss.BucketBatch([4, 8], 12)):
        with pytest.raises(DataError, match=r"and a batch at most 12.*'truncate', 'drop' or 'alone'") as caught:
            list(ss.StreamDataset(directory, step, partitions=1))
        assert "shard" in str(caught.value.__notes__)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ss.Batch, "pass the number of items, or max_tokens="),
        (lambda: ss.Batch(max_tokens=0), "max_tokens=0"),
        (lambda: ss.Batch(max_tokens=9, ragged="pad"), "ragged= and drop_last="),
        (lambda: ss.Batch(4, fields={}), "are about max_tokens="),
        (lambda: ss.Batch(4, overflow="drop"), "are about max_tokens="),
        (lambda: ss.Batch(max_tokens=9, pad_id="x"), "pad_id='x'"),
        (lambda: ss.BucketBatch([4], 9, pad_id=-5), "pad_id=-5"),
        (lambda: ss.Batch(max_tokens=9, length=5, collate_fn=list), "length=5"),
        (lambda: ss.Batch(max_tokens=9, fields={"input_ids": "a"}, collate_fn=list), "leave fields= out"),
        (lambda: ss.Batch(max_tokens=9, overflow="split"), "'error', 'truncate', 'drop', 'alone'"),
        (lambda: ss.Batch(max_tokens=9, overflow="truncate", collate_fn=list), "cut items in a Map"),
        (lambda: ss.Batch(max_tokens=9, length="n"), "for items that collate_fn= puts together"),
        (lambda: ss.BucketBatch([], 9), "boundaries=[]"),
        (lambda: ss.BucketBatch([4, 2], 9), "must rise"),
        (lambda: ss.BucketBatch([4, 20], 9), "leave out boundaries above max_tokens"),
        (lambda: ss.BucketBatch([4], 9, window=0), "window=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(UsageError) as caught:
        make()
    assert message in str(caught.value)


def test_a_loader_does_not_batch_batches(tmp_path):
    directory = corpus(tmp_path)
    for step in (ss.Batch(max_tokens=64, overflow="truncate"), ss.BucketBatch([24], 64, overflow="alone")):
        dataset = ss.StreamDataset(directory, step, partitions=2)
        with pytest.raises(UsageError, match="would batch the batches of"):
            ss.StreamLoader(dataset, batch_size=2)
        with ss.StreamLoader(dataset, workers=2) as loader:
            rows = sum(len(batch["input_ids"]) for batch in loader)
            assert rows == loader.counts().rows == 90
        with pytest.raises(UsageError, match="depends on the data"):
            dataset.whereabouts(1, 0)


def test_items_that_cost_nothing_are_refused(tmp_path):
    with ss.DatasetWriter(str(tmp_path)) as writer:
        for number in range(9):
            writer.write({"id": number, "cost": number % 3})
    for step in (
        ss.Batch(max_tokens=9, length="cost", collate_fn=list),
        ss.BucketBatch([2], 9, length="cost", collate_fn=list),
    ):
        with pytest.raises(DataError, match="has the length 0; lengths are at least 1"):
            list(ss.StreamDataset(str(tmp_path), step, partitions=1))


def test_rows_are_not_put_into_rows_again(tmp_path):
    with pytest.raises(UsageError, match=r"Batch\(max_tokens=128\), comes after Pack\(64\).*Use Batch\(n\)"):
        ss.StreamDataset(str(tmp_path), ss.Pack(64), ss.Batch(max_tokens=128))
