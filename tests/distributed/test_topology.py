"""Every process reads as the data-parallel rank that it is, and ranks that disagree are told on the first step."""

from __future__ import annotations

import pytest

import streamshard as ss
from streamshard.distributed import topology as module
from streamshard.errors import UsageError
from tests.conftest import write_dataset
from tests.distributed.launch import launch
from tests.distributed.scenarios_topology import MESHES

COUNT = 203


@pytest.fixture(scope="module")
def meshes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    return launch("scenarios_topology.meshes", 8, folder, write_dataset(folder / "ds", COUNT))


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checks")
    return launch("scenarios_topology.checks", 4, folder, write_dataset(folder / "ds", COUNT))


@pytest.mark.parametrize("name", MESHES)
def test_ranks_of_a_mesh_share_an_epoch_and_peers_get_the_same_batches(meshes, name):
    by_rank = {}
    for rank, size, peers, ids in (found[name] for found in meshes):
        assert size * peers == 8
        by_rank.setdefault((rank, size), []).append(ids)
    size = len(by_rank)
    assert sorted(by_rank) == [(rank, size) for rank in range(size)]
    for copies in by_rank.values():
        assert len(copies) == 8 // size
        assert all(copy == copies[0] for copy in copies)
    assert sorted(i for copies in by_rank.values() for i in copies[0]) == list(range(COUNT))


def test_dimensions_count_in_the_order_of_the_mesh_and_dp_stands_for_its_two_parts(meshes):
    assert [found["hybrid"][0] for found in meshes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [found["hybrid named"][0] for found in meshes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [found["pipeline"][0] for found in meshes] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [found["inner"][0] for found in meshes] == [0, 1, 2, 3] * 2
    assert [found["sliced"][:2] for found in meshes] == [[0, 2]] * 4 + [[1, 2]] * 4
    assert sorted(meshes[0]["sliced"][2] + meshes[7]["sliced"][2]) == list(range(COUNT))
    assert [found["split"] for found in meshes] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_without_a_topology_every_process_is_a_rank_and_is_told_once_of_from_mesh(meshes):
    assert sorted(i for found in meshes for i in found["unasked"]) == list(range(COUNT))
    for rank, found in enumerate(meshes):
        (warning,) = (line for line in found["warnings"] if "no topology" in line)
        assert f"rank {rank} of 8" in warning
        assert "Topology.from_mesh(mesh)" in warning


@pytest.mark.parametrize("name", [name for name, (_, names, _) in MESHES.items() if "tp" in names])
def test_without_a_topology_a_model_parallel_mesh_in_play_is_refused(meshes, name):
    for found in meshes:
        assert "Topology.from_mesh" in found[f"{name}: unasked"]
        assert "tp=" in found[f"{name}: unasked"]


def test_meshes_that_do_not_say_who_reads_what_are_refused_with_the_cure(meshes):
    for rank, found in enumerate(meshes):
        refused = found["refused"]
        assert "mesh_dim_names" in refused["unnamed"]
        assert "(dp=2, tp=4) has no dimension 'data': pass dims=('dp',)" in refused["no such"]
        assert "along 'tp' work on the same samples" in refused["model-parallel"]
        assert "leaves out the data-parallel dimension 'dp_replicate'" in refused["left out"]
        assert "along 'dp_shard_cp' work on the same samples" in refused["flattened"]
        assert "not a str" in refused["no mesh"]
        assert (f"global rank {rank}) is not in the mesh" in refused["outside"]) == (rank >= 4)


def test_torchrun_s_environment_is_a_topology(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert ss.Topology.from_environment() == ss.Topology(2, 3)
    assert module.resolve(None) == ss.Topology(2, 3)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(UsageError, match="RANK='two'"):
        ss.Topology.from_environment()
    monkeypatch.delenv("RANK")
    assert ss.Topology.from_environment() == ss.Topology(0, 1)


@pytest.mark.parametrize("values", [(2, 2), (-1, 2), (0, 0), ("0", 2), (True, 2)])
def test_a_topology_that_cannot_be_is_refused(values):
    with pytest.raises(UsageError, match="rank must be an int from 0 to size - 1"):
        ss.Topology(*values)


# ------------------------------------------------------------------------------------------------- the first step


@pytest.mark.parametrize("name", ["agree", "off", "peers agree", "peers differ, off", "resumed"])
def test_ranks_that_agree_or_do_not_want_to_be_compared_are_told_nothing(checks, name):
    assert [found[name] for found in checks] == [""] * 4


@pytest.mark.parametrize(
    ("name", "odd", "values"),
    [("seed", 2, ("seed=18", "seed=17")), ("partitions", 3, ("partitions=24", "partitions=48")),
     ("size", 1, ("ranks=2", "ranks=4")), ("epoch", 1, ("epoch=3", "epoch=2")), ("version", 3, ("dataset=",))],
)  # fmt: skip
def test_ranks_that_disagree_are_told_with_whom_and_about_what(checks, name, odd, values):
    """Whoever begins later compares itself with the first: the odd one is told, or all the others are."""
    told = [rank for rank, found in enumerate(checks) if found[name]]
    assert told in ([odd], [rank for rank in range(4) if rank != odd])
    for rank in told:
        message = checks[rank][name]
        assert f"global rank {rank} " in message
        assert f"global rank {odd} " in message
        assert all(value in message for value in values)


def test_two_processes_that_read_as_one_rank_are_told(checks):
    told = [found["same rank"] for found in checks if found["same rank"]]
    assert len(told) >= 3  # the first may have looked before the others came
    assert all("read as data-parallel rank 0 of 4, and 1 should" in message for message in told)
    assert any("global ranks [0, 1, 2, 3]" in message for message in told)


def test_peers_whose_first_batches_differ_are_told_the_field(checks):
    told = [found["peers differ"] for found in checks]
    assert sum(map(bool, told[:2])) == sum(map(bool, told[2:])) == 1
    for message in filter(None, told):
        assert message.startswith("'rank' of the first batch differs between global rank")


def test_a_rank_that_begins_when_another_has_finished_gets_its_own_samples(checks):
    assert sorted(i for found in checks for i in found["late"] if i >= 0) == list(range(COUNT))


def test_verify_replicas_names_the_field_and_the_rank_that_differs(checks):
    for rank, found in enumerate(checks):
        compared = found["compared"]
        assert compared["same"] == ""
        assert "'nested.mask' differs on rank 2 from what rank 0, 1, 3 has" in compared["all"]
        pair = "" if rank < 2 else "'nested.mask' differs on rank 3 from what rank 2 has"
        assert compared["two"].startswith(pair)
        assert bool(compared["two"]) == (rank >= 2)
        assert "'tokens' differs on rank 3 from what rank 0, 1, 2 has" in compared["shape"]


def test_verify_replicas_without_a_process_group_says_what_to_do():
    with pytest.raises(UsageError, match="init_process_group"):
        ss.verify_replicas({})
