"""The command line tells what a checkpoint says about the data."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import streamshard as ss
from streamshard.cli.main import main
from streamshard.inspection import Inspected, first_difference
from streamshard.snapshot_contents import decode_contents
from streamshard.storage.open import open_store
from tests.conftest import write_dataset

COUNT, PARTS = 203, 4


def even(sample):
    return sample["id"] % 2 == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("cli") / "ds", COUNT, length_field="tokens")


def dataset(url, *steps, rank=0, ranks=1, **options):
    options = {"partitions": PARTS, "shuffle_buffer": 10, "seed": 5, "topology": ss.Topology(rank, ranks), **options}
    return ss.StreamDataset(url, *steps, **options)


def after(holder, count):
    """Its state after so many items, and the items."""
    items = list(itertools.islice(iter(holder), count))
    return holder.state_dict(), items


# ------------------------------------------------------------------------------------------------- what a state means


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_and_tokens_consumed_are_those_that_came_out(url, repeat, ranks):
    store = open_store(url)
    for count in [1, 2, 7, 40, 90, 101, *((150, 203, 420) if repeat else ())]:
        for rank in range(ranks):
            state, items = after(dataset(url, rank=rank, ranks=ranks, repeat=repeat), count)
            found = Inspected(state, store).consumed()[""]
            assert found.samples == len(items)
            assert found.tokens == sum(len(item["tokens"]) for item in items)


def test_samples_that_steps_drop_or_batch_are_consumed_too(url):
    state, _ = after(dataset(url, ss.Filter(even), ss.Batch(3, ragged="list")), 8)
    seen = [item["id"] for item in itertools.islice(iter(dataset(url)), None)]
    found = Inspected(state, open_store(url)).consumed()[""]
    assert 24 <= found.samples < len(seen)
    assert Inspected(state).items == 8


def test_the_refs_of_a_buffer_are_those_of_the_samples_that_a_contents_snapshot_keeps(url):
    store = open_store(url)
    whole = [item["__ref__"] for item in dataset(url, provenance=True)]
    for count in (1, 5, 50, 120, 200):
        state, items = after(dataset(url, snapshot="contents", provenance=True), count)
        gone = {item["__ref__"] for item in items}
        kept = {p: {s["id"] for s in found.values()} for blob in state["contents"].values()
                for p, found in decode_contents(blob).items()}  # fmt: skip
        ids = {item["__ref__"]: item["id"] for item in dataset(url, provenance=True)}
        for p, refs in Inspected(state, store).buffered():
            assert not gone & set(refs)
            assert set(refs) <= set(whole)
            begun = Inspected(state).snapshot.partitions[p].turn > 0  # else nothing was read yet
            assert {ids[ref] for ref in refs} == kept.get(p, set()) or not begun


def test_spread_tells_how_far_partitions_are_apart(url):
    states = [after(dataset(url, rank=rank, ranks=2), count)[0] for rank, count in ((0, 20), (1, 6))]
    spread = Inspected(ss.merge_states(states)).spread()
    assert (spread.held, spread.least, spread.most, spread.done) == (4, 3, 10, 0)
    assert spread.ahead == 13  # the next slot is partition 1's fourth: 0 should be at 4 then, and 2 at 3


@pytest.mark.parametrize(
    ("change", "words"),
    [({"seed": 6}, "seed: 5 and 6"), ({"rank": 0, "ranks": 2}, "scope: 'full' and 'rank 0/2'"),
     ({"steps": (ss.Filter(even),)}, "steps: "), ({}, None)],
)  # fmt: skip
def test_the_first_difference_is_the_one_that_matters_most(url, change, words):
    change = dict(change)
    steps = change.pop("steps", ())
    one, other = after(dataset(url), 6)[0], after(dataset(url, *steps, **change), 6)[0]
    difference = first_difference(one, other)
    assert difference is None if words is None else difference.startswith(words)


def test_states_of_different_moments_differ_in_a_partition(url):
    assert first_difference(after(dataset(url), 6)[0], after(dataset(url), 7)[0]) == "turn of partition 2: 1 and 2"


# ---------------------------------------------------------------------------------------------------- the commands


@pytest.mark.filterwarnings("ignore")
def test_show_reads_states_wherever_they_are(url, tmp_path, capsys):
    loader = ss.StreamLoader(dataset(url), batch_size=5, collate=list)
    for _ in itertools.islice(loader, 4):
        pass
    state = loader.state_dict()
    torch.save({"model": torch.zeros(3), "nested": {"data": state}}, tmp_path / "all.pt")
    (tmp_path / "state.json").write_text(json.dumps(state))
    dcp.save({"app": {"data": ss.ShardedState(loader).state_dict()}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loader.close()
    texts = []
    for file, where in (("all.pt", ":nested.data"), ("state.json", ""), ("dcp", ":app.data")):
        assert main(["state", "show", str(tmp_path / file), "--data", url]) == 0
        first, _, rest = capsys.readouterr().out.partition("\n")
        assert first == f"{tmp_path / file}{where}"
        texts.append(rest)
    assert texts[0] == texts[1] == texts[2]
    for words in ("scope           full", "epoch           0", "4 batches of a rank", "20 items", "4 of 4 held, 0 done, 5 to 5",
                  "dataset: 20 samples, ", "shuffle_buffer  10", "seed            5"):  # fmt: skip
        assert words in texts[0]


def test_show_lists_the_refs_in_each_buffer(url, tmp_path, capsys):
    torch.save(after(dataset(url), 6)[0], tmp_path / "s.pt")
    assert main(["state", "show", str(tmp_path / "s.pt"), "--data", url, "--buffers"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "buffer of partition" in line]
    assert len(lines) == PARTS
    assert all(line.split("): ")[1].count(":") == 10 for line in lines)


def test_diff_says_what_differs_and_has_its_exit_code(url, tmp_path, capsys):
    for name, count in (("a", 6), ("b", 6), ("c", 9)):
        torch.save(after(dataset(url), count)[0], tmp_path / name)
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["state", "diff", a, b]) == 0
    assert capsys.readouterr().out.endswith("the same\n")
    assert main(["state", "diff", a, c]) == 1
    assert "turn of partition 0: 2 and 3" in capsys.readouterr().out


def test_merge_writes_a_state_that_resumes_anywhere(url, tmp_path, capsys):
    files = []
    for rank in range(2):
        files.append(str(tmp_path / f"rank-{rank}.pt"))
        torch.save({"data": after(dataset(url, rank=rank, ranks=2), 6)[0]}, files[-1])
    out = str(tmp_path / "full.pt")
    assert main(["state", "merge", *files, "-o", out]) == 0
    assert "the full state of 2" in capsys.readouterr().out
    resumed = dataset(url)
    resumed.load_state_dict(torch.load(out, weights_only=True))
    assert len(list(resumed)) == COUNT - 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["show", "absent.pt"], "absent.pt does not exist"), (["show", "text.pt"], "cannot be read as a file of torch.save"),
     (["show", "empty.pt"], "no state of a streamshard loader"), (["show", "text.json"], "is not JSON"),
     (["show", "folder"], "it has no .metadata"), (["show", "s.pt", "--buffers"], "--buffers needs the dataset"),
     (["merge", "s.pt", "-o", "o", "--allow", "steps"], "only 'ragged'"), (["diff", "two.pt", "s.pt"], "two.pt has 2 states")],
)  # fmt: skip
def test_what_cannot_be_read_is_named(url, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    state = after(dataset(url), 6)[0]
    torch.save(state, "s.pt")
    torch.save({"a": state, "b": state}, "two.pt")
    torch.save({"model": torch.zeros(2)}, "empty.pt")
    Path("text.pt").write_text("text")
    Path("text.json").write_text("text")
    Path("folder").mkdir()
    assert main(["state", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_command_is_installed(url, tmp_path):
    torch.save(after(dataset(url), 6)[0], tmp_path / "s.pt")
    command = Path(sys.executable).with_name("streamshard")
    done = subprocess.run(
        [command, "state", "show", tmp_path / "s.pt"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "4 of 4 held" in done.stdout
