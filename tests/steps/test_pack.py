"""`Pack` fills rows, loses nothing silently, favours no document, and goes on exactly after every row."""

from __future__ import annotations

import collections
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamshard as ss
from streamshard.cli.main import main
from streamshard.errors import DataError, StateError, UsageError
from streamshard.jump import start_of
from streamshard.order.cursor import Ref
from streamshard.prefetch.access import ShardAccess
from streamshard.steps.carried import Carried, decode, encode
from streamshard.steps.planner import balanced, best_fit
from streamshard.steps.rounds import Piece
from streamshard.steps.step import StepContext
from streamshard.testing import assert_exact_resume
from tests import naive


class Memory:
    """A first stage over documents in memory, for what is about packing alone."""

    def __init__(self, lengths, cursor=(0, 0)):
        self._lengths = lengths
        self._k = cursor[1]

    def __iter__(self):
        while self._k < len(self._lengths):
            self._k += 1
            yield self._document(self._k)

    def _document(self, k):
        return {"tokens": np.broadcast_to(np.uint32(k), self._lengths[k - 1])}

    def cursor(self):
        return 0, self._k

    def identity(self):
        return "", 0, self._k

    def ref(self):
        return Ref("", 0, self._k)

    def counters(self):
        return iter(())

    def items(self, identities):
        return iter([(i, self._document(i[2]), Ref("", 0, i[2])) for i in identities])


def stage_of(pack, lengths, cursor=None, seed=0):
    cursor = cursor or pack.start((0, 0))
    upstream = Memory(lengths, pack.inner(cursor))
    return pack.open(upstream, cursor, StepContext(seed, 1, past=upstream))


def pieces_of(row):
    """(document, length) of the segments of a row of `Memory`'s documents."""
    ends = row["cu_seqlens"][: row["segment_ids"].max() + 2].tolist()
    return [(int(row["input_ids"][start]), stop - start) for start, stop in itertools.pairwise(ends)]


def packed(lengths, size, **options):
    """Rows as lists of (document, length), and the step's final counts."""
    pack = ss.Pack(size, **options)
    stage = stage_of(pack, lengths)
    return [pieces_of(row) for row in stage], pack.counts(stage.cursor())


def planned(lengths, size, **options):
    """As `packed`, without making the rows."""
    pack = ss.Pack(size, **options)
    stage = stage_of(pack, lengths)
    stage._planner.make = lambda row: [(piece.identity[2], piece.length) for piece in row]
    return list(stage), pack.counts(stage.cursor())


def lognormal(count, seed=0):
    rng = np.random.default_rng(seed)
    return np.maximum(1, rng.lognormal(np.log(800) - 0.5, 1, count).astype(int)).tolist()


def write(directory, documents, **options):
    with ss.DatasetWriter(str(directory), shard_bytes=1 << 12, block_bytes=400, **options) as writer:
        for number, tokens in enumerate(documents):
            writer.write({"id": number, "tokens": np.asarray(tokens, np.uint16)})
    return str(directory)


def corpus(tmp_path, count=90, seed=3):
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(2.2, 0.9, count).astype(int))
    return write(tmp_path / "corpus", [np.arange(100 * i, 100 * i + n) % 65536 for i, n in enumerate(lengths)])


# ------------------------------------------------------------------------------------------------------------- planning


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 25), st.sampled_from(["split", "truncate", "drop"]))
def test_rounds_are_those_of_the_naive_model(lengths, window, overflow):
    rows, _ = packed(lengths, 16, window=window, overflow=overflow)
    for expected in naive.best_fit_rounds(lengths, 16, window, overflow):
        got, rows = rows[: len(expected)], rows[len(expected) :]
        plain = [sorted((document + 1, length) for document, _, length in row) for row in expected]
        assert sorted(map(sorted, got)) == sorted(plain)
    assert not rows


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(2, 60))
def test_concatenating_cuts_the_documents_laid_end_to_end(lengths, size):
    stage = stage_of(ss.Pack(size, algorithm="concat"), lengths)
    tokens = [int(token) for row in stage for token in row["input_ids"][row["segment_ids"] >= 0]]
    assert tokens == [k for k, length in enumerate(lengths, 1) for _ in range(length)]
    _, counts = packed(lengths, size, algorithm="concat")
    assert counts.rows == -(-sum(lengths) // size)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=50), st.integers(1, 6) | st.none())
def test_best_fit_places_every_piece_once_and_overfills_nothing(lengths, most):
    rows = best_fit(lengths, 30, most)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in row) <= 30 for row in rows)
    assert all(len(row) <= (most or 30) for row in rows)


def test_a_document_that_is_too_long_is_split_truncated_or_dropped_and_counted():
    lengths = [5, 2, 3, 1]
    rows, counts = packed(lengths, 4, overflow="split")
    assert (len(rows), counts.real, counts.total.split, counts.truncation) == (3, 11, 1, 0)
    rows, counts = packed(lengths, 4, overflow="truncate")
    assert (len(rows), counts.real) == (3, 10)
    assert (counts.total.truncated, counts.total.truncated_tokens, counts.truncation) == (1, 1, 1 / 11)
    rows, counts = packed(lengths, 4, overflow="drop")
    assert (len(rows), counts.real, counts.total.documents) == (2, 6, 4)
    assert (counts.total.dropped, counts.total.dropped_tokens) == (1, 5)
    with pytest.raises(DataError, match="a document has 5 tokens, and a row 4.*Use 'split'"):
        packed(lengths, 4, overflow="error")


def test_splitting_breaks_only_documents_longer_than_a_row():
    lengths = lognormal(5000)
    rows, counts = packed(lengths, 2048)
    whole = Counter(document for row in rows for document, _ in row)
    assert {document for document, cuts in whole.items() if cuts > 1} == {
        k for k, length in enumerate(lengths, 1) if length > 2048
    }
    assert counts.total.split == sum(length > 2048 for length in lengths)
    assert counts.real == sum(lengths)


def test_every_document_leaves_in_its_round_or_the_next_two():
    lengths = [length for length in lognormal(20_000) if length <= 2048]
    pack = ss.Pack(2048, window=500)
    stage = stage_of(pack, lengths)
    number, start = 0, stage.cursor()[0]
    waited = Counter()
    for row in stage:
        waited.update(number - (document - 1) // 500 for document, _ in pieces_of(row))
        if stage.cursor()[0] != start:
            number, start = number + 1, stage.cursor()[0]
    assert set(waited) == {0, 1, 2}


def test_rows_are_in_no_order_of_their_longest_document():
    rows, _ = planned(lognormal(100_000), 2048)
    longest = [max(length for _, length in row) for row in rows]
    assert abs(np.corrcoef(np.arange(len(rows)), longest)[0, 1]) < 0.05
    within = [np.corrcoef(np.arange(300), longest[at : at + 300])[0, 1] for at in range(0, len(rows) - 300, 300)]
    assert abs(np.mean(within)) < 0.05


@pytest.mark.parametrize(("size", "least"), [(2048, 0.998), (8192, 0.997)])
def test_hardly_anything_is_padding(size, least):
    _, counts = planned(lognormal(100_000), size)
    assert 1 - counts.padding >= least


def test_one_token_more_or_less_in_a_row_makes_no_cliff():
    lengths = np.maximum(1, np.random.default_rng(0).normal(4096, 512, 100_000).astype(int)).tolist()
    one, other = (planned(lengths, size)[1].rows for size in (8192, 8193))
    assert abs(one - other) / one < 0.002


def test_rows_have_at_most_so_many_documents_when_asked():
    rows, _ = packed([1] * 100, 16, max_segments=3)
    assert max(map(len, rows)) == 3
    rows = list(stage_of(ss.Pack(16, max_segments=3, window=10), [1, 2, 5, 20, 7] * 9))
    assert {row["cu_seqlens"].shape for row in rows} == {(5,)}
    assert {row["max_seqlen"] for row in rows} == {16}


# --------------------------------------------------------------------------------------------------------------- resume


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), max_size=40),
    st.integers(1, 12),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(["best_fit", "concat"]),
    st.integers(0, 60),
)
def test_a_stage_goes_on_after_any_row_with_the_same_rows_and_counts(lengths, window, overflow, algorithm, stop):
    pack = ss.Pack(16, window=window, overflow="split" if algorithm == "concat" else overflow, algorithm=algorithm)
    whole = stage_of(pack, lengths)
    rows = [pieces_of(row) for row in whole]
    first = stage_of(pack, lengths)
    got = [pieces_of(row) for row in itertools.islice(first, stop)]
    second = stage_of(pack, lengths, first.cursor())
    got += [pieces_of(row) for row in second]
    assert got == rows
    assert second.cursor() == whole.cursor()


def test_counts_only_grow_and_are_those_of_the_rows_that_left():
    pack, lengths = ss.Pack(16, window=7), lognormal(200)
    stage = stage_of(pack, [1 + length % 40 for length in lengths])
    before = ss.Counts()
    for row in stage:
        counts = pack.counts(stage.cursor())
        assert counts.rows == before.rows + 1
        assert counts.physical == before.physical + 16
        assert counts.real == before.real + (row["segment_ids"] >= 0).sum()
        assert counts.loss == before.loss + row["loss_mask"].sum()
        assert counts.total.documents >= before.total.documents
        before = counts
    assert before.total.documents == before.total.samples == 200


def halves(item):
    middle = (len(item["tokens"]) + 1) // 2
    parts = [item["tokens"][:middle], item["tokens"][middle:]]
    return [{"id": item["id"], "tokens": part} for part in parts if len(part)]


def odd(item):
    return item["id"] % 3 > 0


def noisy(item, rng):
    return {**item, "tokens": item["tokens"] + rng.integers(0, 100, len(item["tokens"]), dtype=np.uint16)}


def one_more(items):
    return [{**item, "tokens": item["tokens"] + 1} for item in items]


PIPELINES = {
    "pack": (ss.Pack(24, window=7),),
    "flat map": (ss.FlatMap(halves), ss.Pack(24, window=7)),
    "filter, noise, flat map": (ss.Filter(odd), ss.Map(noisy, rng=True), ss.FlatMap(halves), ss.Pack(24, window=7)),
    "batched map": (ss.Map(one_more, batch=4), ss.Pack(24, window=7)),
    "threaded map": (ss.Map(noisy, rng=True, threads=2), ss.Pack(24, window=7)),
    "truncate": (ss.FlatMap(halves), ss.Pack(12, window=5, overflow="truncate")),
    "drop": (ss.Pack(12, window=5, overflow="drop"),),
    "concat": (ss.FlatMap(halves), ss.Pack(24, algorithm="concat")),
    "batched rows": (ss.Pack(24, window=7), ss.Batch(3)),
    "filtered rows": (ss.Pack(24, window=7), ss.Filter(lambda row: row["max_seqlen"] > 9)),
    "row after row": (ss.Pack(24, window=7), ss.FlatMap(lambda row: [{"a": row["input_ids"]}, {"a": row["labels"]}])),
}


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_resumes_at_every_item(tmp_path, name, snapshot):
    directory = corpus(tmp_path)
    report = assert_exact_resume(
        lambda: ss.StreamDataset(
            directory, *PIPELINES[name], partitions=3, shuffle_buffer=7, seed=5, snapshot=snapshot, provenance=True
        ),
        chain=2,
    )
    assert report.items >= 8


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
@pytest.mark.parametrize("name", ["filter, noise, flat map", "concat", "drop"])
def test_an_endless_run_resumes_in_windows_that_span_epochs(tmp_path, name, snapshot):
    directory = corpus(tmp_path, count=20)
    assert_exact_resume(
        lambda: ss.StreamDataset(
            directory, *PIPELINES[name], partitions=3, shuffle_buffer=4, repeat=True, snapshot=snapshot
        ),
        items=60,
        chain=1,
    )


def tokens_of(row):
    return row["input_ids"][row["segment_ids"] >= 0].tolist()


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3]])
def test_documents_that_pair_badly_come_back_the_same(tmp_path, lengths):
    directory = write(tmp_path / "corpus", [np.arange(10 * i, 10 * i + n) for i, n in enumerate(lengths)])
    assert_exact_resume(lambda: ss.StreamDataset(directory, ss.Pack(5), partitions=1))
    rows = [tokens_of(row) for row in ss.StreamDataset(directory, ss.Pack(5), partitions=1)]
    assert sorted(token for row in rows for token in row) == sorted(10 * i + j for i in range(4) for j in range(3))


@pytest.mark.parametrize("name", ["filter, noise, flat map", "concat"])
def test_rows_and_counts_survive_any_change_of_ranks(tmp_path, name):
    directory = corpus(tmp_path)

    def open_rank(rank, ranks):
        return ss.StreamDataset(
            directory, *PIPELINES[name], partitions=6, shuffle_buffer=7, repeat=True, topology=ss.Topology(rank, ranks)
        )

    def step(ranks, count):
        items = [list(itertools.islice(iter(dataset), count)) for dataset in ranks]
        return [tokens_of(row) for together in zip(*items, strict=True) for row in together]

    alone = open_rank(0, 1)
    expected = step([alone], 60)
    got, state, counts = [], None, []
    for size, count in ((2, 6), (3, 4), (1, 12), (6, 4)):
        ranks = [open_rank(rank, size) for rank in range(size)]
        for dataset in ranks if state else ():
            dataset.load_state_dict(state)
        counts.append(sum((dataset.counts() for dataset in ranks), ss.Counts()) if state else ss.Counts())
        got += step(ranks, count)
        state = ss.merge_states([dataset.state_dict() for dataset in ranks])
    assert got == expected
    assert [one.rows for one in counts] == [0, 12, 24, 36]
    resumed = open_rank(0, 1)
    resumed.load_state_dict(state)
    assert resumed.counts() == alone.counts()


def test_a_loader_hands_out_the_same_batches_and_counts_with_workers(tmp_path):
    directory = corpus(tmp_path)
    steps = PIPELINES["flat map"]

    def load(workers):
        return ss.StreamLoader(ss.StreamDataset(directory, *steps, partitions=4), batch_size=3, workers=workers)

    expected, counted = [], []
    with load(0) as plain:
        for batch in plain:
            expected.append(batch["input_ids"].tolist())
            counted.append(plain.counts())
    with load(2) as loader:
        for batch, rows, counts in zip(loader, expected, counted, strict=True):
            assert batch["input_ids"].tolist() == rows
            assert loader.counts() == counts
    assert [one.rows for one in counted] == [min(3 * (n + 1), counted[-1].rows) for n in range(len(counted))]


def test_contents_carry_the_documents_that_wait_so_that_nothing_old_is_read(tmp_path):
    directory = corpus(tmp_path, count=60)

    def open_dataset():
        return ss.StreamDataset(
            directory, ss.Pack(24, window=7), partitions=1, shuffle_buffer=4, interleave=1, snapshot="contents"
        )

    whole = [tokens_of(row) for row in open_dataset()]
    dataset = open_dataset()
    got = [tokens_of(row) for row in itertools.islice(iter(dataset), 12)]
    state = dataset.state_dict()
    places = ss.dataset.decode_contents(next(iter(state["contents"].values())))[0]
    resumed = open_dataset()
    resumed.load_state_dict(state)
    part = ss.state.decode_state(state).partitions[0]
    waiting = resumed.steps[0].carried(part.cursor)
    assert waiting
    assert len(places) <= 7 + 4 + len(waiting) + 2
    got += [tokens_of(row) for row in resumed]
    assert got == whole


# ----------------------------------------------------------------------------------------------------- what a state has


pieces = st.builds(
    Carried,
    st.tuples(st.sampled_from(["", "web", "a/b"]), st.integers(0, 300), st.integers(1, 1 << 40))
    | st.tuples(st.just("web"), st.integers(0, 3), st.integers(1, 1000), st.integers(0, 300), st.integers(0, 3)),
    st.integers(0, 1 << 20),
    st.integers(0, 2),
    st.booleans(),
)


@given(st.lists(pieces, max_size=30, unique_by=lambda piece: (piece.identity, piece.start)))
def test_carried_pieces_come_back(carried):
    assert sorted(decode(encode(carried))) == sorted(carried)


def test_a_carried_piece_takes_about_four_bytes():
    pack, lengths = ss.Pack(2048), lognormal(20_000)
    stage = stage_of(pack, lengths)
    found = set()
    for _ in itertools.islice(stage, 5000):
        found.add(stage.cursor()[0][1])
    sizes = [(len(decode(groups)), sum(len(text) for _, text in groups)) for groups in found if groups]
    assert max(size / count for count, size in sizes) < 5


def test_damaged_pieces_are_a_state_error():
    with pytest.raises(StateError, match="damaged in the state"):
        decode((("", "gA"),))
    with pytest.raises(StateError, match="in the middle of a number"):
        decode((("", "BP8="),))


@pytest.mark.parametrize("pack", [ss.Pack(24, window=7), ss.Pack(4, window=7), ss.Pack(6, algorithm="concat")])
def test_a_step_that_gives_other_lengths_on_resume_is_an_error(tmp_path, pack):
    directory = corpus(tmp_path)
    calls = itertools.count()

    def unsteady(item):
        return {**item, "tokens": np.arange(1 + next(calls))}  # never the same again

    def open_dataset():
        return ss.StreamDataset(directory, ss.Map(unsteady), pack, partitions=1)

    found = 0
    for rows in range(1, 12):  # in the middle of rounds, and between them
        dataset = open_dataset()
        list(itertools.islice(iter(dataset), rows))
        state = dataset.state_dict()
        cursor = ss.state.decode_state(state).partitions[0].cursor
        if not pack.carried(cursor) and (pack.algorithm == "concat" or cursor[1] == 0):
            continue  # nothing is held that could have changed
        resumed = open_dataset()
        resumed.load_state_dict(state)
        with pytest.raises(StateError, match="or is not deterministic"):
            list(resumed)
        found += 1
    assert found > 3


def test_other_settings_of_pack_do_not_fit_a_state(tmp_path):
    directory = corpus(tmp_path)
    dataset = ss.StreamDataset(directory, ss.Pack(24), partitions=1)
    next(iter(dataset))
    with pytest.raises(StateError, match="steps"):
        ss.StreamDataset(directory, ss.Pack(32), partitions=1).load_state_dict(dataset.state_dict())


# ------------------------------------------------------------------------------------------------------------ provenance


def test_every_token_can_be_traced_to_its_sample(tmp_path):
    directory = corpus(tmp_path)
    stored = {item["__ref__"]: item["tokens"] for item in ss.StreamDataset(directory, provenance=True)}
    traced = Counter()
    for row in ss.StreamDataset(directory, ss.Pack(24, window=7), provenance=True, partitions=3):
        at = 0
        for segment in row["__segments__"]:
            tokens = stored[segment.ref][segment.offset : segment.offset + segment.length]
            assert row["input_ids"][at : at + segment.length].tolist() == tokens.tolist()
            at += segment.length
            traced[segment.ref] += segment.length
    assert traced == {ref: len(tokens) for ref, tokens in stored.items()}


# ------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 1}, "sequence_length=1"),
        ({"sequence_length": "2048"}, "sequence_length='2048'"),
        ({"window": 0}, "window=0"),
        ({"overflow": "cut"}, "'split', 'truncate', 'drop', 'error'"),
        ({"algorithm": "first_fit"}, "'best_fit', 'concat'"),
        ({"algorithm": "concat", "overflow": "drop"}, "use overflow='split'"),
        ({"max_segments": 0}, "max_segments=0"),
        ({"balance": 0}, "balance=0"),
        ({"balance": 4, "algorithm": "concat"}, "are not reordered"),
        ({"pad_id": None}, "pad_id=None"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(UsageError) as caught:
        ss.Pack(**{"sequence_length": 8, **options})
    assert message in str(caught.value)


def test_only_steps_whose_output_can_be_made_again_come_before(tmp_path):
    with pytest.raises(UsageError, match=r"Batch\(4\) comes before Pack\(8\).*move Batch\(4\) behind it"):
        ss.StreamDataset(str(tmp_path), ss.Batch(4), ss.Pack(8))
    with pytest.raises(UsageError, match=r"Pack\(4\) comes before Pack\(8\)"):
        ss.StreamDataset(str(tmp_path), ss.Pack(4), ss.Pack(8))
    with pytest.raises(UsageError, match=r"rng=True, comes after Pack\(8\)"):
        ss.StreamDataset(str(tmp_path), ss.Pack(8), ss.Map(noisy, rng=True))


def test_a_document_that_cannot_be_used_is_named_with_its_place(tmp_path):
    directory = write(tmp_path / "corpus", [[1, 2], [], [3]])
    with pytest.raises(DataError, match="has no tokens") as caught:
        list(ss.StreamDataset(directory, ss.Pack(8), partitions=1))
    assert "in Pack(8) at shard 0, row 1" in str(caught.value.__notes__)


def test_dropping_everything_for_ever_is_an_error(tmp_path):
    directory = write(tmp_path / "corpus", [np.arange(9)] * 8)
    with pytest.raises(DataError, match=r"Pack\(8\) dropped all"):
        next(iter(ss.StreamDataset(directory, ss.Pack(8, overflow="drop"), partitions=2, repeat=True)))
    assert list(ss.StreamDataset(directory, ss.Pack(8, overflow="drop"), partitions=2)) == []


def test_counting_needs_a_step_that_counts(tmp_path):
    directory = corpus(tmp_path)
    with pytest.raises(UsageError, match="no step that counts tokens; add one, such as Pack"):
        ss.StreamDataset(directory).counts()


def test_a_failure_behind_pack_names_the_first_document_of_the_row(tmp_path):
    directory = corpus(tmp_path)

    def fail(row):
        raise ValueError("no")

    dataset = ss.StreamDataset(directory, ss.Pack(24), ss.Map(fail), partitions=1)
    rows = ss.StreamDataset(directory, ss.Pack(24), partitions=1, provenance=True)
    ref = next(iter(rows))["__segments__"][0].ref
    with pytest.raises(ValueError, match="no") as caught:
        next(iter(dataset))
    assert f"shard {ref.shard}, row {ref.row}" in str(caught.value.__notes__)


def test_other_steps_on_request_say_what_comes_again_and_what_is_left_out(tmp_path, caplog):
    directory = corpus(tmp_path)
    dataset = ss.StreamDataset(directory, ss.Pack(24, window=7), partitions=1)
    rows = iter(dataset)
    while True:  # until a row has left and others wait
        next(rows)
        cursor = ss.state.decode_state(dataset.state_dict()).partitions[0].cursor
        if cursor[1] and (waiting := dataset.steps[0].carried(cursor)):
            break
    with caplog.at_level("WARNING", logger="streamshard"):
        ss.StreamDataset(directory, ss.Pack(32), partitions=1).load_state_dict(dataset.state_dict(), allow={"steps"})
    assert f"the documents of {cursor[1]} rows that had left come again, and {len(waiting)} documents" in caplog.text


def test_the_command_line_shows_what_a_checkpoint_has_counted(tmp_path, capsys):
    directory = corpus(tmp_path)
    dataset = ss.StreamDataset(directory, ss.Filter(odd), ss.Pack(24, window=7), ss.Batch(2), partitions=2)
    list(itertools.islice(iter(dataset), 5))
    (tmp_path / "state.json").write_text(json.dumps(dataset.state_dict()))
    assert main(["state", "show", str(tmp_path / "state.json")]) == 0
    counts, shown = dataset.counts(), capsys.readouterr().out
    assert f"{counts.rows} rows of {counts.physical} tokens, {100 * counts.padding:.2f} % padding" in shown
    assert f"{counts.total.samples} samples, {counts.total.documents} documents, {counts.real} tokens" in shown


# ------------------------------------------------------------------------------ what a review found, and stays mended


def shift_in_place(item):
    """Changes what it is given: arrays are read-only, the dictionary is not."""
    item["tokens"] = item["tokens"] + 7
    return item


def shift_all_in_place(items):
    return [shift_in_place(item) for item in items]


@pytest.mark.parametrize(
    "steps",
    [
        (ss.Map(shift_in_place), ss.FlatMap(halves), ss.Pack(24, window=7)),
        (ss.Map(shift_in_place), ss.FlatMap(halves), ss.Pack(24, algorithm="concat")),
        (ss.Map(shift_all_in_place, batch=4), ss.Pack(24, window=7)),
    ],
)
def test_a_map_that_changes_its_input_resumes_from_contents(tmp_path, steps):
    directory = corpus(tmp_path, count=50)
    assert_exact_resume(
        lambda: ss.StreamDataset(directory, *steps, partitions=2, shuffle_buffer=5, snapshot="contents"), chain=3
    )


@pytest.mark.parametrize("steps", [(), (ss.FlatMap(halves),)])
def test_a_dataset_that_grew_begins_after_all_epochs_that_a_window_has_reached(tmp_path, steps):
    directory = corpus(tmp_path, count=20)

    def open_dataset():
        return ss.StreamDataset(directory, *steps, ss.Pack(24, window=15), partitions=2, repeat=True, shuffle_buffer=4)

    states = []
    for count in range(1, 40):
        dataset = open_dataset()
        states.append((list(itertools.islice(iter(dataset), count)), dataset.state_dict()))
    with ss.DatasetWriter(directory, append=True) as writer:
        for number in range(20, 26):
            writer.write({"id": number, "tokens": np.arange(number, dtype=np.uint16)})
    for rows, state in states:
        resumed = open_dataset()
        resumed.load_state_dict(state, allow={"dataset"})
        undisturbed = open_dataset()  # one that knew from its beginning when the dataset would grow
        undisturbed.load_state_dict(start_of(resumed.state_dict()))
        found = [*rows, *itertools.islice(iter(resumed), 30)]
        expected = [*itertools.islice(iter(undisturbed), len(found))]
        assert [tokens_of(row) for row in found] == [tokens_of(row) for row in expected]


def test_a_filter_behind_pack_is_patient(tmp_path):
    directory = write(tmp_path / "corpus", [np.arange(5 + i % 7) for i in range(64)])
    rows = ss.StreamDataset(
        directory, ss.Pack(24), ss.Filter(lambda row: row["cu_seqlens"][1] != 5), partitions=16, repeat=True
    )
    assert len(list(itertools.islice(iter(rows), 300))) == 300
    never = ss.StreamDataset(directory, ss.Pack(24, window=20), ss.Filter(lambda row: False), partitions=2, repeat=True)
    with pytest.raises(DataError, match="dropped all of the last"):
        next(iter(never))


def test_counts_of_what_is_read_elsewhere_are_refused(tmp_path):
    directory = corpus(tmp_path)
    dataset = ss.StreamDataset(directory, ss.Pack(24, window=7), partitions=2)
    with ss.StreamLoader(dataset, batch_size=2) as loader:
        next(iter(loader))
        with pytest.raises(UsageError, match="what a StreamLoader has read ahead"):
            dataset.counts()
        assert loader.counts().rows == 2


def test_counting_decides_nothing_and_the_end_of_an_epoch_keeps_its_counts(tmp_path):
    directory = corpus(tmp_path)

    def open_dataset():
        return ss.StreamDataset(directory, ss.Pack(24, window=7))

    dataset = open_dataset()
    assert dataset.counts() == ss.Counts()
    assert dataset._partitions is None
    rows = len(list(dataset))
    assert dataset.counts().rows == rows
    resumed = open_dataset()
    resumed.load_state_dict(dataset.state_dict())
    assert resumed.counts() == dataset.counts()
    dataset.set_epoch(7)
    assert dataset.counts() == ss.Counts()


def test_counts_go_on_when_steps_are_changed_on_request(tmp_path):
    directory = corpus(tmp_path)
    dataset = ss.StreamDataset(directory, ss.Pack(24, window=7), partitions=1)
    list(itertools.islice(iter(dataset), 9))
    changed = ss.StreamDataset(directory, ss.Pack(32, window=7), ss.Batch(2), partitions=1)
    changed.load_state_dict(dataset.state_dict(), allow={"steps", "batch"})
    assert changed.counts() == dataset.counts()
    next(iter(changed))
    assert changed.counts().rows == 11


class Encoding(collections.UserDict):
    """As tokenizers return."""


def encode_document(item):
    return Encoding(input_ids=item["tokens"])


def test_provenance_does_not_depend_on_what_a_map_returns(tmp_path):
    directory = corpus(tmp_path)
    for steps in (
        (ss.Map(encode_document),),
        (ss.Map(encode_document, threads=2),),
        (ss.FlatMap(halves), ss.Map(encode_document)),
    ):
        refs = Counter()
        for row in ss.StreamDataset(directory, *steps, ss.Pack(24, window=7), provenance=True, partitions=2):
            assert len(row["__segments__"]) == len(row["cu_seqlens"]) - 1
            refs.update(segment.ref for segment in row["__segments__"])
        assert len(refs) == 90


def test_the_documents_of_a_window_are_asked_for_together(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    directory = str(tmp_path / "corpus")
    with ss.DatasetWriter(directory, block_bytes=1 << 12) as writer:
        for _ in range(4000):
            writer.write({"tokens": rng.integers(0, 65536, 400, dtype=np.uint16)})
    sent = []
    send = ShardAccess.send
    monkeypatch.setattr(ShardAccess, "send", lambda *args, **options: sent.append(args) or send(*args, **options))

    def requests():
        sent.clear()
        next(iter(ss.StreamDataset(directory, ss.Pack(1024, window=1000), partitions=1, shuffle_buffer=8)))
        return len(sent)

    together = requests()
    monkeypatch.setattr(ss.dataset, "window", lambda steps: 0)
    assert together < requests() / 4


# --------------------------------------------------------------------------------------------------------------- balance


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=70), st.integers(1, 9))
def test_balancing_reorders_rows_and_keeps_groups_together(costs, size):
    order = balanced(costs, size)
    assert sorted(order) == list(range(len(costs)))
    sums = [sum(costs[row] for row in order[at : at + size]) for at in range(0, len(costs) - size + 1, size)]
    plain = sorted(costs, reverse=True)
    if len(sums) > 1:
        assert max(sums) - min(sums) <= max(plain[: len(sums) * size], default=0)


def conversations(seed, count):
    """Half of them as long as a row, the others of any length: what balancing is hard for."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.55, 2048, rng.integers(24, 2048, count)).tolist()


def test_groups_of_rows_cost_the_same_on_every_rank():
    def costs(lengths, balance):
        stage = stage_of(ss.Pack(2048, balance=balance), lengths)
        stage._planner.make = lambda row: sum(piece.length**2 for piece in row)
        return np.array(list(stage))

    def worst(balance):
        """Mean over steps of the dearest rank's cost over the mean one's."""
        ranks = [costs(conversations(seed, 6000), balance) for seed in range(8)]
        steps = min(map(len, ranks)) // 16
        sums = np.stack([rows[: 16 * steps].reshape(steps, 16).sum(1) for rows in ranks])
        return (sums.max(0) / sums.mean(0)).mean()

    assert worst(16) <= 1.03 < worst(None)


def test_balanced_rows_lose_nothing_and_resume():
    lengths = conversations(3, 400)
    pack = ss.Pack(2048, window=90, balance=16)
    whole = stage_of(pack, lengths)
    rows = [pieces_of(row) for row in whole]
    assert pack.counts(whole.cursor()).real == sum(lengths)
    plain = pack.counts(whole.cursor()).padding - packed(lengths, 2048, window=90)[1].padding
    assert plain < 0.01
    for stop in range(0, len(rows), 7):
        first = stage_of(pack, lengths)
        got = [pieces_of(row) for row in itertools.islice(first, stop)]
        got += [pieces_of(row) for row in stage_of(pack, lengths, first.cursor())]
        assert got == rows


def test_few_rows_in_a_window_are_told(caplog):
    lengths = lognormal(3000)
    pack = ss.Pack(8192, window=100, balance=16)
    stage = stage_of(pack, lengths)
    with caplog.at_level("WARNING", logger="streamshard"):
        list(stage)
    assert caplog.text.count("Use a larger window=") == 1
    assert pack.counts(stage.cursor()).real == sum(lengths)


def test_groups_go_on_where_a_window_has_left_one_unfinished():
    """Rows that may not wait can end a window in the middle of a group: the next one completes it, and groups stay aligned."""
    lengths = [n for n in lognormal(6000, seed=2) if n <= 8192]

    def spread(balance):
        stage = stage_of(ss.Pack(8192, window=700, balance=balance), lengths)
        stage._planner.make = lambda row: sum(piece.length**2 for piece in row)
        costs = np.array(list(stage))
        groups = costs[: len(costs) // 8 * 8].reshape(-1, 8).sum(1)[:-2]
        return groups.std() / groups.mean()

    assert spread(8) < spread(None) / 2


def test_within_a_window_rows_come_in_no_order_of_their_longest_document():
    stage = stage_of(ss.Pack(2048), lognormal(30_000))
    stage._planner.make = lambda row: max(piece.length for piece in row)
    found, window = [], []
    for longest in stage:
        window.append(longest)
        if stage.cursor()[1] == 0:
            found.append(np.corrcoef(np.arange(len(window)), window)[0, 1])
            window = []
    assert abs(np.mean(found)) < 0.05


def test_all_that_has_left_is_a_whole_number_of_groups():
    """Also after a window that began with rows which could not wait."""
    pack = ss.Pack(8192, window=700, balance=8)
    stage = stage_of(pack, [n for n in lognormal(6000, seed=2) if n <= 8192])
    ends = [pack.counts(stage.cursor()).rows for _ in stage if stage.cursor()[1] == 0]
    assert all(rows % 8 == 0 for rows in ends[:-1])
    packer = stage._planner
    leaves, rows = [True] * 40, [[Piece(("", 0, n), None, 0, 1, 1)] for n in range(40)]
    packer._keep_groups_whole(leaves, rows, 5, 0)
    assert (5 + sum(leaves)) % 8 == 0
