"""A run that is stopped and started on other numbers of ranks and workers goes on as if it had not been stopped."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest
import torch.distributed.checkpoint as dcp

import streamshard as ss
from streamshard.errors import StateError, UsageError
from tests.conftest import write_dataset
from tests.distributed.launch import launch
from tests.distributed.scenarios_states import MODES, PARTS, made

COUNT = 1003
LIVES = [  # ranks, workers, batches a rank takes, how it resumes; 0 batches: the rest of what is finite
    (4, 2, 5, ""), (2, 3, 3, "dcp"), (8, 1, 4, "gathered"), (1, 0, 3, "files"), (4, 2, 0, "dcp"),
]  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("states") / "ds", COUNT)


@pytest.fixture(scope="module")
def lives(url, tmp_path_factory):
    """[life][rank][mode] -> batches of ids."""
    folder = tmp_path_factory.mktemp("lives")
    found = []
    for number, (ranks, workers, batches, way) in enumerate(LIVES):
        asked = map(str, (url, folder, number, workers, batches, way))
        found.append(launch("scenarios_states.life", ranks, folder / f"answers-{number}", *asked))
    return found


def committed(mode, batches):
    """Those that are in the state: whole optimizer steps."""
    accumulation = MODES[mode][3]
    return batches[: len(batches) // accumulation * accumulation]


def test_micro_batches_are_those_of_an_undisturbed_run_in_its_order(lives, url):
    got = []
    for life in lives:
        for step in itertools.zip_longest(*(answer["micro-batches"] for answer in life)):
            got += step
    alone = made(url, "micro-batches", ss.Topology(0, 1), 0)
    assert got == [batch["id"].tolist() for batch in itertools.islice(alone, len(got))]
    alone.close()


@pytest.mark.parametrize("mode", ["rows", "accumulated", "contents", "packed", "mixed"])
def test_batches_of_the_whole_job_are_the_same_sets_in_the_same_order(lives, url, mode):
    """`accumulated` is saved in the middle of an optimizer step, which comes again whole."""
    got = []
    for life in lives:
        steps = [[i for batch in step for i in batch] for step in zip(*(answer[mode] for answer in life), strict=True)]
        got += [sorted(step) for step in committed(mode, steps)]
    alone = made(url, mode, ss.Topology(0, 1), 0)
    assert got == [sorted(batch["id"].tolist()) for batch in itertools.islice(alone, len(got))]
    alone.close()


def test_counts_go_on_over_every_change_and_every_rank_gets_the_sum(lives, url):
    alone = made(url, "packed", ss.Topology(0, 1), 0)
    batches = iter(alone)
    for life in lives:
        for _ in life[0]["packed"]:
            next(batches)
        assert [answer["counted"] for answer in life] == [alone.counts().as_dict()] * len(life)
    alone.close()


def test_what_a_mixture_has_drawn_goes_on_over_every_change(lives, url):
    alone = made(url, "mixed", ss.Topology(0, 1), 0)
    batches = iter(alone)
    for life in lives:
        for _ in life[0]["mixed"]:
            next(batches)
        expected = {path: list(astuple(one)) for path, one in alone.sources().items()}
        assert [answer["sources"] for answer in life] == [expected] * len(life)
    alone.close()


def test_with_other_global_batch_sizes_nothing_is_repeated_or_skipped(lives):
    got = [i for life in lives for answer in life for batch in answer["finite"] for i in batch]
    assert sorted(got) == sorted([*range(0, COUNT, 2)] * 2)


def at_least_four(sample):
    return sample["id"] >= 4


def ranks_after(url, counts, total=4, **options):
    """States of pretended ranks, each after as many batches as `counts` says; and where `options` differ."""
    states = []
    for rank, count in enumerate(counts):
        dataset = ss.StreamDataset(url, partitions=PARTS, repeat=True, topology=ss.Topology(rank, total), **options)
        with ss.StreamLoader(dataset, batch_size=2, collate=list) as loader:
            for _ in itertools.islice(loader, count):
                pass
            states.append(loader.state_dict())
    return states


def test_states_of_two_saves_are_refused_and_ragged_ones_accepted_on_request(url):
    states = ranks_after(url, [6, 6, 4, 6])
    with pytest.raises(
        StateError, match=r"state 0 \(rank 0/4\) was saved after 6 batches and state 2 \(rank 2/4\) after 4: two"
    ):
        ss.merge_states(states)
    assert ss.merge_states(states, allow={"ragged"})["scope"] == "full"
    with pytest.raises(UsageError, match="only 'ragged'"):
        ss.merge_states(states, allow={"steps"})


def test_states_of_another_number_of_ranks_or_of_a_missing_rank_are_refused(url):
    four, two = ranks_after(url, [2, 2, 2, 2]), ranks_after(url, [2, 2], total=2)
    with pytest.raises(StateError, match="different numbers of ranks are mixed"):
        ss.merge_states([four[0], two[1]])
    with pytest.raises(StateError, match="are in none of the 3 states"):
        ss.merge_states(four[:3])
    other = ranks_after(url, [2, 2, 2, 2], seed=1)
    with pytest.raises(StateError, match="seed"):
        ss.merge_states([*four[:3], other[3]])


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_own_no_partition_are_part_of_a_save(tmp_path):
    """Four ranks resume with two partitions left: the two that own nothing save nothing, and say so."""
    url = write_dataset(tmp_path / "ds", 8)
    steps, options = (ss.Filter(at_least_four),), {"partitions": 4, "shuffle": False}
    dataset = ss.StreamDataset(url, *steps, **options)
    next(iter(dataset))  # of the third partition: the first two have nothing
    state = dataset.state_dict()
    states = []
    for rank in range(4):
        part = ss.StreamDataset(url, *steps, topology=ss.Topology(rank, 4), **options)
        part.load_state_dict(state)
        with ss.StreamLoader(part, batch_size=1, collate=list) as loader:
            next(iter(loader), None)
            states.append(loader.state_dict())
    assert min(len(state["partitions"]) for state in states) == 0
    merged = ss.merge_states(states)
    fresh = ss.StreamDataset(url, *steps, **options)
    saved_by_dcp(states, tmp_path / "dcp")
    dcp.load({"data": ss.ShardedState(fresh)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert fresh.state_dict()["partitions"] == merged["partitions"]


@pytest.mark.filterwarnings("ignore")
def test_ragged_states_pass_through_dcp_when_that_is_allowed(url, tmp_path):
    saved_by_dcp(ranks_after(url, [6, 6, 4, 6]), tmp_path / "dcp")
    fresh = ss.StreamDataset(url, partitions=PARTS, repeat=True)
    dcp.load({"data": ss.ShardedState(fresh, allow={"ragged"})}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert fresh.state_dict()["scope"] == "full"


def saved_by_dcp(states, folder):
    """As four ranks save: their keys together, the one that several have from the first."""
    whole = {}
    for state in states:
        taken = ss.ShardedState(Holding(state)).state_dict()
        whole = {**taken, **whole, "partitions": {**taken["partitions"], **whole.get("partitions", {})}}
    dcp.save({"data": whole}, checkpoint_id=folder, no_dist=True)


class Holding:
    """A loader that stands somewhere."""

    def __init__(self, state, inner=None):
        self.state = state
        self.inner = inner

    def state_dict(self):
        return self.state if self.inner is None else {"data": self.inner.state_dict()}

    def load_state_dict(self, state, allow=()):
        self.state, self.allowed = state, allow


@pytest.mark.filterwarnings("ignore")
def test_a_dcp_folder_that_mixes_two_saves_is_refused(url, tmp_path):
    early, late, other = ranks_after(url, [3] * 4), ranks_after(url, [4] * 4), ranks_after(url, [3] * 4, seed=1)
    fresh = ss.StreamDataset(url, partitions=PARTS, repeat=True)
    saved_by_dcp(early, tmp_path / "good")
    dcp.load({"data": ss.ShardedState(fresh)}, checkpoint_id=tmp_path / "good", no_dist=True)
    assert fresh.state_dict() == ss.merge_states(early)
    for name, states, words in [
        ("steps", [*early[:3], late[3]], "two saves are mixed"),
        ("runs", [*early[:3], other[3]], "by another run, or with other settings"),
        (
            "begun",
            [*early[:3], ss.StreamDataset(url, partitions=PARTS, repeat=True).state_dict()],
            "before their first item",
        ),
    ]:
        saved_by_dcp(states, tmp_path / name)
        with pytest.raises(StateError, match=words):
            dcp.load(
                {"data": ss.ShardedState(ss.StreamDataset(url, partitions=PARTS, repeat=True))},
                checkpoint_id=tmp_path / name,
                no_dist=True,
            )


@pytest.mark.filterwarnings("ignore")
def test_dcp_without_the_wrapper_is_refused_when_it_saves(url, tmp_path):
    dataset = ss.StreamDataset(url, partitions=PARTS)
    loader = ss.StreamLoader(dataset, batch_size=2, collate=list)
    for thing, words in ((dataset, r"ShardedState\(dataset\)"), (loader, r"ShardedState\(loader\)")):
        with pytest.raises(Exception, match=words):
            dcp.save({"data": thing}, checkpoint_id=tmp_path / "bare", no_dist=True)
        with pytest.raises(Exception, match=words):
            dcp.save({"app": Holding(None, thing)}, checkpoint_id=tmp_path / "bare", no_dist=True)


def test_a_state_that_was_taken_apart_on_its_way_is_refused(url):
    (state,) = ranks_after(url, [3], total=1)
    with pytest.raises(StateError, match="says that it holds 48 partitions and comes with 0"):
        ss.StreamDataset(url, partitions=PARTS, repeat=True).load_state_dict({**state, "partitions": {}})


def test_dcp_needs_to_know_how_many_partitions_to_ask_for(url):
    with pytest.raises(UsageError, match="pass partitions="):
        ss.ShardedState(ss.StreamDataset(url)).state_dict()
    loader = ss.StreamLoader(ss.StreamDataset(url, partitions=PARTS, repeat=True), batch_size=2, collate=list)
    state = ss.ShardedState(Holding(ranks_after(url, [3, 3])[0])).state_dict()
    with pytest.raises(StateError, match="load into a loader that has not begun"):
        ss.ShardedState(loader).load_state_dict(state)
    loader.close()


def test_a_state_from_before_the_first_batch_goes_through_dcp(url, tmp_path):
    fresh = ss.ShardedState(ss.StreamDataset(url, partitions=PARTS, repeat=True))
    state = fresh.state_dict()
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
