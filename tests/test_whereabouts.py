"""What is in a step is known without reading, and a run can be moved to another step."""

from __future__ import annotations

import itertools

import pytest
import torch

import streamshard as ss
from streamshard.cli.main import main
from streamshard.errors import StateError, UsageError
from streamshard.order.cursor import Ref
from tests.conftest import write_dataset

COUNT, PARTS = 203, 8


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("where") / "ds", COUNT, length_field="tokens")


def same(sample):
    return sample


def even(sample):
    return sample["id"] % 2 == 0


def loader(url, rank=0, ranks=1, size=None, steps=(), **options):
    options = {"partitions": PARTS, "shuffle_buffer": 10, "seed": 5, "provenance": True, **options}
    dataset = ss.StreamDataset(url, *steps, topology=ss.Topology(rank, ranks), **options)
    collate = None if size is None else list
    return ss.StreamLoader(dataset, batch_size=size, collate=collate)


def refs(batch):
    return [sample["__ref__"] for sample in batch] if isinstance(batch, list) else list(batch["__ref__"])


def taken(url, count, **options):
    """Refs of the first batches."""
    with loader(url, **options) as found:
        return [refs(batch) for batch in itertools.islice(found, count)]


CASES = {
    "samples": {"size": 3, "repeat": True},
    "samples of an epoch": {"size": 3, "repeat": False},
    "micro-batches": {"steps": (ss.Map(same), ss.Batch(3, ragged="list")), "repeat": True},
    "micro-batches of an epoch": {"steps": (ss.Batch(3, ragged="list"),), "repeat": False},
    "whole micro-batches of an epoch": {"steps": (ss.Batch(3, ragged="list", drop_last=True),), "repeat": False},
    "file order": {"size": 3, "repeat": True, "shuffle": False},
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_refs_of_a_step_are_those_that_come_in_it(url, name, ranks):
    case = CASES[name]
    steps = 90 // ranks if case["repeat"] else 60 // ranks
    for rank in range(ranks):
        came = taken(url, steps, rank=rank, ranks=ranks, **case)
        with loader(url, rank, ranks, **case) as found:
            where = found.dataset.whereabouts(case.get("size") or 1, 0)
        for number, batch in enumerate(came):
            assert [ref for _, ref in where.step(number, rank)] == batch


@pytest.mark.parametrize("name", CASES)
def test_each_sample_is_found_in_the_step_and_on_the_rank_where_it_comes(url, name):
    case, ranks = CASES[name], 2
    with loader(url, 0, ranks, **case) as one:
        where = one.dataset.whereabouts(case.get("size") or 1, 0)
    for rank in range(ranks):
        for step, batch in enumerate(taken(url, 70, rank=rank, ranks=ranks, **case)):
            epoch = 0
            for ref in batch:
                epoch = next(
                    e
                    for e in (0, 1, 2)
                    if (p := where.find(ref.shard, ref.row, e)) and (p.step, p.rank) == (step, rank)
                )
            assert epoch == 0 or case["repeat"]


def test_a_sample_of_a_dropped_short_batch_is_found_nowhere(url):
    case = CASES["whole micro-batches of an epoch"]
    came = {ref for batch in taken(url, None, **case) for ref in batch}
    with loader(url, **case) as found:
        where = found.dataset.whereabouts(1, 0)
        counts = found.dataset.manifest.sample_counts.tolist()
    for shard, count in enumerate(counts):
        for row in range(count):
            assert (where.find(shard, row, 0) is None) == (Ref("", shard, row) not in came)


@pytest.mark.parametrize("repeat", [True, False])
def test_the_step_of_a_number_of_tokens_is_the_first_before_which_they_are_consumed(url, repeat):
    with loader(url, size=4, repeat=repeat) as found:
        lengths = [sum(len(s["tokens"]) for s in batch) for batch in itertools.islice(found, 120 if repeat else 50)]
        where = found.dataset.whereabouts(4, 0)
    consumed = [0, *itertools.accumulate(lengths)]
    for step in range(0, len(consumed), 7):
        assert where.tokens_before(where.slots(step)) == consumed[step]
        assert where.step_at(consumed[step]) == step
        assert where.step_at(consumed[step] + 1) == step + 1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_skipping_gives_the_batches_that_would_have_come_later(url, name, ranks):
    case = CASES[name]
    for rank in range(ranks):
        undisturbed = taken(url, 24, rank=rank, ranks=ranks, **case)
        for before, steps in ((0, 5), (4, 0), (4, 9)):
            with loader(url, rank, ranks, **case) as found:
                for _ in itertools.islice(found, before):
                    pass
                found.skip(steps)
                assert [refs(batch) for batch in itertools.islice(found, 8)] == undisturbed[before + steps :][:8]


def test_a_dataset_is_moved_too(url):
    whole = [item["id"] for item in itertools.islice(iter(loader(url, size=1, repeat=True).dataset), 300)]
    dataset = loader(url, size=1, repeat=True).dataset
    next(iter(dataset))
    dataset.skip(9)
    assert [item["id"] for item in itertools.islice(iter(dataset), 5)] == whole[10:15]
    dataset.skip(2, batch_size=100)
    assert [item["id"] for item in itertools.islice(iter(dataset), 5)] == whole[215:220]
    dataset.seek(0)
    assert next(iter(dataset))["id"] == whole[0]


def test_seeking_goes_to_the_step_of_so_many_tokens_forwards_and_back(url):
    with loader(url, size=4, repeat=True) as found:
        batches = list(itertools.islice(found, 100))
        consumed = [0, *itertools.accumulate(sum(len(s["tokens"]) for s in batch) for batch in batches)]
        for step in (70, 3, 0):
            found.seek(consumed[step])
            assert refs(next(iter(found))) == refs(batches[step])


def test_a_skip_is_in_the_state_and_the_next_save_of_all_ranks_belongs_together(url):
    states = []
    for rank in range(2):
        with loader(url, rank, 2, size=3, repeat=True) as found:
            found.skip(11)
            next(iter(found))
            states.append(found.state_dict())
    merged = ss.merge_states(states)
    assert merged["batches"] == 12
    with loader(url, size=6, repeat=True) as alone:
        alone.load_state_dict(merged)
        assert refs(next(iter(alone))) == taken(url, 13, size=6, repeat=True)[12]


def test_skipping_after_the_number_of_ranks_has_changed_goes_on_from_where_all_are(url):
    """One rank takes six items, which four ranks do not divide; then each of four takes two, skips two, and takes two."""
    with loader(url, size=6, repeat=True) as one:
        items = [ref for batch in itertools.islice(one, 5) for ref in refs(batch)]
    with loader(url, size=6, repeat=True) as one:
        next(iter(one))
        state = one.state_dict()
    got, states = [], []
    for rank in range(4):
        with loader(url, rank, 4, size=2, repeat=True) as found:
            found.load_state_dict(state)
            next(iter(found))
            found.skip(1)
            states.append(found.state_dict())
            got += refs(next(iter(found)))
    assert all(other == states[0] for other in states)
    assert sorted(got) == sorted(items[6 + 8 + 8 : 6 + 8 + 8 + 8])


def test_a_run_that_began_with_another_epoch_is_moved_within_its_own_order(url):
    def begun():
        found = loader(url, size=4, repeat=True)
        found.set_epoch(3)
        return found

    with begun() as first:
        undisturbed = [refs(batch) for batch in itertools.islice(first, 80)]
        where = first.dataset.whereabouts(4, 3)
    for step in (0, 7, 60):
        assert [ref for _, ref in where.step(step)] == undisturbed[step]
        with begun() as found:
            found.skip(step)
            assert refs(next(iter(found))) == undisturbed[step]


def test_after_the_end_of_an_epoch_skipping_counts_in_the_next(url):
    with loader(url, size=4) as found:
        list(found)
        second = [refs(batch) for batch in found]
    with loader(url, size=4) as found:
        list(found)
        found.skip(2)
        assert [refs(batch) for batch in found] == second[2:]


def test_a_dataset_that_has_not_settled_its_partitions_settles_them(url):
    dataset = ss.StreamDataset(url, seed=5)
    whole = [item["id"] for item in ss.StreamDataset(url, seed=5)]
    dataset.skip(3)
    assert [item["id"] for item in dataset] == whole[3:]


def test_a_state_from_before_a_change_of_batches_cannot_be_skipped_from(url):
    case = {"repeat": True, "partitions": PARTS}
    before = ss.StreamDataset(url, ss.Batch(2, ragged="list"), **case)
    for _ in itertools.islice(iter(before), PARTS):
        pass
    after = ss.StreamDataset(url, ss.Batch(6, ragged="list"), **case)
    after.load_state_dict(before.state_dict(), allow={"batch"})
    with pytest.raises(StateError, match="steps were changed in mid-run"):
        after.skip(0)


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (
            lambda url: loader(url, steps=(ss.Batch(2, ragged="list"), ss.Batch(3, collate_fn=list))).skip(1),
            UsageError,
            "a Batch of batches",
        ),
        (lambda url: loader(url).dataset.seek(10, batch_size=0), UsageError, "items=0 must be at least 1"),
        (lambda url: loader(url, size=2, steps=(ss.Filter(even),)).skip(3), UsageError, "the pipeline has a Filter"),
        (lambda url: loader(url, size=2).skip(-1), UsageError, "must be an int >= 0"),
        (lambda url: loader(url, size=2).seek(1.5), UsageError, "must be an int >= 0"),
        (lambda url: loader(url, size=2).skip(200), UsageError, "epoch 0 ends before slot 400"),
        (lambda url: loader(url, size=2).seek(10**9), UsageError, "has fewer than 1000000000 tokens"),
    ],
)
def test_what_cannot_be_skipped_is_refused(url, act, error, words):
    with pytest.raises(error, match=words):
        act(url)


def test_a_dataset_without_lengths_and_a_ragged_state_are_refused(url, tmp_path):
    bare = write_dataset(tmp_path / "bare", 30)
    with pytest.raises(UsageError, match="written without length_field="):
        loader(bare, size=2).seek(10)
    states = []
    for rank, count in ((0, 3), (1, 5)):
        with loader(url, rank, 2, size=2, repeat=True) as found:
            for _ in itertools.islice(found, count):
                pass
            states.append(found.state_dict())
    with loader(url, size=2, repeat=True) as found:
        found.load_state_dict(ss.merge_states(states, allow={"ragged"}))
        with pytest.raises(StateError, match="not at one place of the order"):
            found.skip(1)


# ----------------------------------------------------------------------------------------------------- the command


def test_the_command_says_what_is_in_a_step_and_where_a_sample_is(url, tmp_path, capsys):
    settings = [
        "--seed",
        "5",
        "--partitions",
        "8",
        "--shuffle-buffer",
        "10",
        "--repeat",
        "--ranks",
        "2",
        "--batch-size",
        "3",
    ]
    came = [taken(url, 5, rank=rank, ranks=2, size=3, repeat=True)[4] for rank in range(2)]
    assert main(["order", url, *settings, "--step", "4", "--rank", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [f"{ref.shard}:{ref.row}" for ref in came[1]]
    assert all(line.startswith("rank 1  ") and line.endswith(".msgpack.zst") for line in lines)
    shard, row = came[0][2].shard, came[0][2].row
    assert main(["order", url, *settings, "--find", f"{shard}:{row}"]) == 0
    assert f"sample {shard}:{row} is in step 4 of rank 0 (" in capsys.readouterr().out
    with loader(url, size=3, repeat=True) as found:
        next(iter(found))
        torch.save(found.state_dict(), tmp_path / "s.pt")
    assert (
        main(["order", url, "--state", str(tmp_path / "s.pt"), "--ranks", "2", "--batch-size", "3", "--step", "4"]) == 0
    )
    both = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert sorted(both) == sorted(f"{ref.shard}:{ref.row}" for refs in came for ref in refs)
    assert main(["order", url, *settings, "--tokens", "100"]) == 0
    assert capsys.readouterr().out.startswith("step ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--step", "0", "--ranks", "3"], "ranks=3 do not divide"), (["--step", "0", "--rank", "4"], "there are ranks 0 to 0"),
     (["--find", "a:b"], "pass the numbers of shard and row"), (["--find", "99:0"], "the dataset has shards 0 to 5"),
     (["--find", "0:99"], "the dataset has rows 0 to 39"), (["--step", "-1"], "step=-1 must be at least 0"),
     (["--step", "0", "--ranks", "0"], "ranks=0 must be at least 1")],
)  # fmt: skip
def test_the_command_names_what_it_cannot_answer(url, capsys, arguments, words):
    assert main(["order", url, *arguments]) == 2
    assert words in capsys.readouterr().err
