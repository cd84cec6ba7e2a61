"""Hugging Face's Trainer through `StreamTrainer`: the first batch after a resume is the next one."""

from __future__ import annotations

import json

import pytest
from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer, TrainingArguments

import streamshard as ss
from tests.conftest import write_dataset
from tests.frameworks.processes import launch
from tests.frameworks.train_transformers import Model, main, only_id

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def dataset_60(tmp_path_factory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "ds60", 60, per_shard=13, block_bytes=300)


@pytest.fixture(autouse=True)
def fresh_process():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trained(folder, rank=0):
    return [json.loads(line) for line in (folder / f"ids-{rank}.jsonl").read_text().splitlines()]


def flat(batches):
    return [number for batch in batches for number in batch]


KINDS = {
    "a known length": ({}, (1, 7, 15, 16)),
    "an unknown length": ({"filter": True, "max_steps": 16}, (1, 7, 8, 9)),
    "an endless stream": ({"repeat": True, "max_steps": 32}, (1, 15, 20)),
    "accumulation": ({"accumulation": 3, "every": 1}, (1, 4, 5, 6)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_batch_after_a_resume_is_the_next_one(kind, dataset_60, tmp_path):
    options, stops = KINDS[kind]
    main(dataset_60, str(tmp_path / "whole"), options)
    batches = trained(tmp_path / "whole")
    expected = sorted(2 * list(range(0, 60, 2))) if "filter" in options else sorted(2 * list(range(60)))
    assert sorted(flat(batches[: 30 if "filter" not in options else 16])) == expected
    for stop in stops:
        folder = tmp_path / f"resumed-{stop}"
        main(dataset_60, str(folder), {**options, "resume": str(tmp_path / "whole" / f"checkpoint-{stop}")})
        assert trained(folder) == batches[stop * options.get("accumulation", 1) :], stop


def test_killed_in_two_processes_it_goes_on_with_each_sample_once(dataset_60, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert launch("train_transformers", 2, dataset_60, first, die_after=5).returncode
    ran = launch("train_transformers", 2, dataset_60, second, resume=str(first / "checkpoint-4"))
    assert ran.returncode == 0, ran.stderr[-2000:]
    ids = [flat(trained(first, rank)[:4]) + flat(trained(second, rank)) for rank in range(2)]
    assert sorted(flat(ids)) == sorted(2 * list(range(60)))


def test_a_checkpoint_without_the_state_is_refused(dataset_60, tmp_path):
    main(dataset_60, str(tmp_path / "whole"), {"max_steps": 2})
    (tmp_path / "whole" / "checkpoint-2" / "streamshard_state.pt").unlink()
    with pytest.raises(
        ss.StateError, match=r"checkpoint-2 has no streamshard_state.pt: .* resume from a checkpoint that"
    ):
        main(dataset_60, str(tmp_path / "again"), {"resume": str(tmp_path / "whole" / "checkpoint-2")})


def test_trainer_s_own_path_is_warned_of(dataset_60, tmp_path, caplog):
    dataset = ss.StreamDataset(dataset_60, ss.Map(only_id), partitions=12)
    arguments = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=2,
        save_strategy="no",
        logging_strategy="no",
    )
    Trainer(Model(tmp_path, None), arguments, train_dataset=dataset).train()
    assert "resumes a StreamDataset by reading it again" in caplog.text
    assert "StreamTrainer(train_loader=" in caplog.text
