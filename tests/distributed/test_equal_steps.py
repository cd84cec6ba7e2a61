"""With remainder="drop" or "pad" every rank makes the same number of steps, and nothing is lost without being counted."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import streamshard as ss
from streamshard.distributed import equal_steps
from streamshard.errors import DataError, UsageError
from streamshard.testing.servers import free_port
from tests.conftest import write_dataset
from tests.distributed.launch import launch
from tests.distributed.scenarios_equal import CASES, SIZE, only_id, plain, skewed

COUNT = 203
FILTERED = {"filtered", "workers", "apart", "micro-batches", "at once", "staged"}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("equal") / "ds", COUNT)


@pytest.fixture(scope="module")
def every_way(url, tmp_path_factory):
    return launch("scenarios_equal.every_way", 4, tmp_path_factory.mktemp("ways"), url)


def rows(batch):
    """(id, whether it is padding, sum of the mask, labels) of each row."""
    if isinstance(batch, list):
        return [(b["id"], b.get("padding", False), sum(b["loss_mask"]), b["labels"]) for b in batch]
    padding = batch.get("padding", False)
    flags = padding if isinstance(padding, list) else [padding] * len(batch["id"])
    return list(zip(batch["id"], flags, map(sum, batch["loss_mask"]), batch["labels"], strict=True))


def real(found):
    return [row[0] for rank in found for batch in rank["batches"] for row in rows(batch) if not row[1]]


def expected(name):
    return [i for i in range(COUNT) if name not in FILTERED or skewed({"id": i})]


@pytest.mark.parametrize("policy", ["drop", "pad"])
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_make_the_same_steps_in_every_epoch(every_way, name, policy):
    found = [answer[f"{name}, {policy}"] for answer in every_way]
    assert len({len(rank["batches"]) for rank in found}) == 1
    assert len({rank["again"] for rank in found}) == 1
    if name != "nothing":
        kept = [len(answer[f"{name}, keep"]["batches"]) for answer in every_way]
        assert found[0]["batches"]
        assert len(found[0]["batches"]) <= min(kept) if policy == "drop" else len(found[0]["batches"]) == max(kept)


@pytest.mark.parametrize("name", [name for name in CASES if name != "nothing"])
def test_what_is_dropped_is_counted_and_the_rest_comes_once_in_whole_batches(every_way, name):
    found = [answer[f"{name}, drop"] for answer in every_way]
    ids = real(found)
    assert len(ids) == len(set(ids))
    assert set(ids) <= set(expected(name))
    if name == "micro-batches":  # of which each is an item
        left = sum(len(answer[f"{name}, keep"]["batches"]) for answer in every_way) - sum(
            len(rank["batches"]) for rank in found
        )
        assert sum(rank["dropped"] for rank in found) == left > 0
        return
    assert all(len(rows(batch)) == SIZE for rank in found for batch in rank["batches"])
    assert len(ids) + sum(rank["dropped"] for rank in found) == len(expected(name))
    assert any(rank["dropped"] for rank in found)


@pytest.mark.parametrize("name", [name for name in CASES if name != "nothing"])
def test_padding_is_harmless_flagged_and_counted_and_every_sample_comes_once(every_way, name):
    found = [answer[f"{name}, pad"] for answer in every_way]
    assert sorted(real(found)) == expected(name)
    for rank in found:
        everything = [row for batch in rank["batches"] for row in rows(batch)]
        padded = [row for row in everything if row[1]]
        assert all(mask == 0 and labels == [-100] * 3 for _, _, mask, labels in padded)
        assert all(mask == 3 and labels == [0, 1, 2] for _, flag, mask, labels in everything if not flag)
        if name == "micro-batches":
            assert rank["padded"] == sum(batch["padding"] for batch in rank["batches"])
        else:
            assert rank["padded"] == len(padded)
            assert len(everything) == SIZE * len(rank["batches"])
    assert any(rank["padded"] for rank in found)


@pytest.mark.parametrize("policy", ["keep", "drop", "pad"])
@pytest.mark.parametrize("name", CASES)
def test_the_length_is_the_number_of_steps_or_not_known(every_way, name, policy):
    for answer in every_way:
        found = answer[f"{name}, {policy}"]
        assert found["length"] == (None if name in FILTERED | {"nothing"} else len(found["batches"]))


@pytest.mark.parametrize("policy", ["drop", "pad"])
def test_the_state_afterwards_is_that_of_the_end_of_the_epoch(every_way, url, policy):
    states = [answer[f"filtered, {policy}"]["state"] for answer in every_way]
    steps, options = CASES["filtered"]
    loader = ss.StreamLoader(ss.StreamDataset(url, *steps, partitions=48), **options)
    loader.load_state_dict(ss.merge_states(states))
    ids = [i for batch in loader for i in batch["id"].tolist()]
    assert sorted(ids) == expected("filtered")  # the next epoch, whole
    loader.close()


def test_a_filter_that_empties_a_shard_leaves_ranks_equal_and_nobody_waiting(tmp_path):
    """Five samples on two ranks: with two partitions one rank has a single sample after the filter, or none."""
    url = write_dataset(tmp_path / "five", 5, per_shard=2)
    answers = launch("scenarios_equal.small", 2, tmp_path / "answers", url)
    for name in answers[0]:
        batches = [answer[name][0] for answer in answers]
        assert len(batches[0]) == len(batches[1])
        assert all(answer[name][1] < 10 for answer in answers)
        ids = [b["id"][0] for rank in batches for b in rank if not b.get("padding", [False])[0]]
        assert len(ids) == len(set(ids))
        if name.startswith("pad"):
            assert sorted(ids) == [2, 3, 4]


def test_a_run_that_is_left_and_resumed_makes_the_steps_that_it_would_have_made(url, tmp_path):
    answers = launch("scenarios_equal.resumed", 4, tmp_path, url)
    for answer in answers:
        for begun, rest, _, whole in answer.values():
            assert begun + rest == whole
    for policy in ("drop", "pad"):  # and out of the state of all, which deals out the partitions that are left anew
        assert len({len(answer[policy][2]) for answer in answers}) == 1
        ids = [
            i for answer in answers for part in (answer[policy][0], answer[policy][2]) for batch in part
            for i, padding in zip(batch["id"], batch.get("padding", [False] * SIZE), strict=True) if not padding
        ]  # fmt: skip
        assert len(ids) == len(set(ids))
        if policy == "pad":
            assert sorted(ids) == expected("filtered")


def test_peers_have_the_same_steps_whether_they_read_or_receive(url, tmp_path):
    answers = launch("scenarios_equal.peers", 4, tmp_path, url)
    for first, second in (answers[:2], answers[2:]):
        assert first == second
        assert first[0] == first[1]
    assert len(answers[0][0]) == len(answers[2][0])


def without_torchrun(scenario, ranks, url, folder):
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
        }
        command = [sys.executable, "-m", "tests.distributed.scenarios_equal", scenario, url, str(folder)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
    return [process.wait(timeout=120) for process in processes]


def test_when_a_rank_dies_the_others_say_which_and_end_with_an_error(url, tmp_path):
    codes = without_torchrun("one_dies", 3, url, tmp_path)
    assert codes[2] == -9
    assert codes[:2] == [1, 1]
    for rank in range(2):
        seconds, _, message = (tmp_path / f"told-{rank}").read_text().partition(" ")
        assert float(seconds) < 10
        assert "data-parallel ranks [2] have not said within 4 s" in message


def test_when_the_process_with_the_store_dies_the_others_say_so(url, tmp_path):
    assert without_torchrun("store_gone", 2, url, tmp_path) == [-9, 1]
    assert "the job's store is gone" in (tmp_path / "told-1").read_text()


# ------------------------------------------------------------------------------------------------------ one process


@pytest.mark.parametrize(
    ("policy", "batches", "dropped", "padded"), [("keep", 51, 0, 0), ("drop", 50, 3, 0), ("pad", 51, 0, 1)]
)
def test_a_single_rank_needs_no_process_group(url, policy, batches, dropped, padded):
    with ss.StreamLoader(ss.StreamDataset(url), batch_size=SIZE, collate=list, remainder=policy) as loader:
        assert len(loader) == batches
        assert len(list(loader)) == batches
        counters = loader.counters()
    assert (counters.remainder_dropped, counters.remainder_padded) == (dropped, padded)


def test_nested_and_unmasked_fields_are_padded_too(tmp_path):
    with ss.DatasetWriter(str(tmp_path / "ds")) as writer:
        for number in range(3):
            writer.write({"id": number, "deep": {"x": np.full(2, number), "name": "n"}})
    with ss.StreamLoader(
        ss.StreamDataset(str(tmp_path / "ds"), shuffle=False), batch_size=2, remainder="pad"
    ) as loader:
        last = list(loader)[-1]
    assert last["padding"].tolist() == [False, True]
    assert last["deep"]["x"].tolist() == [[2, 2], [2, 2]]
    assert last["deep"]["name"] == ["n", "n"]


def test_the_template_is_not_what_the_loop_does_to_a_batch(tmp_path):
    with ss.DatasetWriter(str(tmp_path / "ds")) as writer:
        for number in range(3):
            writer.write({"id": number})
    with ss.StreamLoader(
        ss.StreamDataset(str(tmp_path / "ds"), shuffle=False), batch_size=2, remainder="pad"
    ) as loader:
        for batch in loader:
            seen = batch["id"].tolist()
            batch["id"].zero_()
    assert seen == [2, 2]


class Three:
    """Ranks of which one has three batches."""

    def __init__(self):
        self.asked = 0

    def ask(self, *, has, **_):
        self.asked += 1
        return equal_steps.Verdict(has and self.asked <= 3, has, None)

    def close(self):
        pass


@pytest.mark.parametrize("workers", [0, 2])
def test_many_batches_can_be_dropped_though_the_memory_for_batches_is_reused(url, monkeypatch, workers):
    monkeypatch.setattr(ss.StreamDataset, "agreement", lambda _: Three())
    dataset = ss.StreamDataset(url, ss.Map(only_id))
    with ss.StreamLoader(
        dataset, batch_size=SIZE, remainder="drop", device="cpu", workers=workers, start_method="fork"
    ) as loader:
        batches = iter(loader)
        assert len([next(batches) for _ in range(3)]) == 3
        assert next(batches, None) is None
        assert loader.counters().remainder_dropped == COUNT - 3 * SIZE


def test_peers_that_never_had_a_row_pad_with_the_same(monkeypatch):
    """Three ranks of two peers, the third of which have nothing."""
    shared = torch.distributed.HashStore()
    monkeypatch.setattr(equal_steps, "running", lambda: True)
    monkeypatch.setattr(equal_steps, "store", lambda: shared)
    monkeypatch.setattr(equal_steps, "nonce", lambda: "now")
    monkeypatch.setattr(equal_steps, "_begun", dict.fromkeys([("now", "here")], 0))
    readers = []
    for rank in range(3):
        for _ in range(2):
            equal_steps._begun["now", "here"] = 0  # each is a process of its own
            readers.append((rank, equal_steps.StepAgreement("here", ss.Topology(rank, 3))))

    def ask(place, rank, agreement):
        return agreement.ask(has=rank < 2, give=None if rank == 2 else f"row of process {place}".encode)

    with ThreadPoolExecutor(6) as threads:
        verdicts = list(threads.map(ask, range(6), *zip(*readers, strict=True)))
    assert all(verdict.someone and not verdict.everyone for verdict in verdicts)
    assert verdicts[4].template == verdicts[5].template != None  # noqa: E711
    assert all(verdict.template is None for verdict in verdicts[:4])


def unmasked(sample):
    return {"id": sample["id"], "deep": {"labels": 3, "loss_mask": [1, 1]}, "labels": np.arange(sample["id"] % 3 + 1)}


@pytest.mark.parametrize(
    "collate", [list, functools.partial(ss.collate, ragged="list"), functools.partial(ss.collate, ragged="pad")]
)
def test_padding_is_harmless_in_lists_numbers_and_nested_fields(url, collate):
    with ss.StreamLoader(
        ss.StreamDataset(url, ss.Map(unmasked)), batch_size=SIZE, collate=collate, remainder="pad"
    ) as loader:
        last = list(loader)[-1]  # three rows and one of padding
    row = plain(last)
    labels = row[3]["labels"] if isinstance(row, list) else row["labels"][3]
    deep = row[3]["deep"] if isinstance(row, list) else {name: column[3] for name, column in row["deep"].items()}
    assert set(labels.tolist() if hasattr(labels, "tolist") else labels) == {-100}
    assert (deep["labels"], deep["loss_mask"]) == (-100, [0, 0])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda d: ss.StreamLoader(d(), batch_size=2, collate=list, remainder="wrap"), UsageError, "choose 'keep', 'drop' or 'pad'"),
        (lambda d: ss.StreamLoader(d(repeat=True), batch_size=2, collate=list, remainder="drop"), UsageError, "repeat=True has none"),
        (lambda d: next(iter(ss.StreamLoader(d(topology=ss.Topology(0, 2)), batch_size=2, collate=list, remainder="pad"))),
         UsageError, "call torch.distributed.init_process_group first"),
        (lambda d: next(iter(ss.StreamLoader(d(), batch_size=2, collate=str, remainder="pad"))), DataError, "this is a str"),
        (lambda d: next(iter(ss.StreamLoader(d(ss.Map(with_padding)), batch_size=2, remainder="pad"))), DataError,
         "would overwrite the field 'padding'"),
    ],
)  # fmt: skip
def test_what_cannot_be_padded_or_agreed_is_refused(url, make, error, words):
    with pytest.raises(error, match=words):
        make(lambda *steps, **options: ss.StreamDataset(url, *steps, **options))


def with_padding(sample):
    return {"id": sample["id"], "padding": torch.zeros(1)}
