"""Small worlds that other loaders get wrong."""

from __future__ import annotations

import itertools

import streamshard as ss
from tests.conftest import write_dataset
from tests.distributed.launch import launch


def loader(url, rank, ranks, size, **options):
    dataset = ss.StreamDataset(url, topology=ss.Topology(rank, ranks), **options)
    return ss.StreamLoader(dataset, batch_size=size, collate=list)


def take(found, count):
    return [[sample["id"] for sample in batch] for batch in itertools.islice(found, count)]


def test_sixteen_ids_come_once_over_two_ranks_and_then_one(tmp_path):
    url = write_dataset(tmp_path / "ds", 16)
    ids, states = [], []
    for rank in range(2):
        with loader(url, rank, 2, 2, partitions=48) as found:
            ids += [i for batch in take(found, 2) for i in batch]
            states.append(found.state_dict())
    with loader(url, 0, 1, 2, partitions=48) as found:
        found.load_state_dict(ss.merge_states(states))
        ids += [i for batch in take(found, None) for i in batch]
    assert sorted(ids) == list(range(16))


def test_ten_shards_are_all_visited_by_four_ranks(tmp_path):
    url = write_dataset(tmp_path / "ds", 40, per_shard=4)
    assert len(ss.open_manifest(url)) == 10
    ids = []
    for rank in range(4):
        with loader(url, rank, 4, 3, partitions=48) as found:
            ids += [i for batch in take(found, None) for i in batch]
    assert sorted(ids) == list(range(40))


def test_two_ranks_take_next_what_one_rank_would_have_taken(tmp_path):
    url = write_dataset(tmp_path / "ds", 16)
    options = {"partitions": 4, "shuffle": False}
    with loader(url, 0, 1, 4, **options) as found:
        batches = iter(found)
        take(batches, 1)
        state = found.state_dict()
        expected = take(batches, 1)[0]
    got = []
    for rank in range(2):
        with loader(url, rank, 2, 2, **options) as found:
            found.load_state_dict(state)
            got += take(found, 1)[0]
    assert sorted(got) == sorted(expected)


def test_four_different_cursors_come_back_through_dcp(tmp_path):
    answers = launch("scenarios_states.cursors", 4, tmp_path, write_dataset(tmp_path / "ds", 203), str(tmp_path))
    saved = {p: cursor for own, _ in answers for p, cursor in own.items()}
    assert len(saved) == len(set(saved.values())) == 4
    assert all(loaded == saved for _, loaded in answers)
