"""Hugging Face accelerate: every sample once or a refusal with the cure, and every rank at its own next id after a resume."""

from __future__ import annotations

import json

import pytest
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader

import streamshard as ss
from tests.conftest import write_dataset
from tests.frameworks.processes import launch
from tests.frameworks.train_accelerate import as_tensor, dataset_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def dataset_48(tmp_path_factory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "ds48", 48, per_shard=13, block_bytes=300)


def logged(folder, rank):
    return [json.loads(line) for line in (folder / f"ids-{rank}.jsonl").read_text().splitlines()]


def flat(batches):
    return [number for batch in batches for number in batch]


def prepared(directory, workers):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    loader = DataLoader(dataset_of(directory), batch_size=4, collate_fn=as_tensor, num_workers=workers)
    return accelerator, accelerator.prepare(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("stop", [1, 7, 12])
def test_in_one_process_a_prepared_loader_resumes_at_the_next_id(dataset_48, tmp_path, workers, epoch, stop):
    accelerator, loader = prepared(dataset_48, workers)
    epochs = []
    for number in range(4):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch.tolist())
            if number == epoch and len(epochs[-1]) == stop:
                accelerator.save_state(tmp_path / "saved")
    assert all(sorted(flat(found)) == list(range(48)) for found in epochs)
    assert len({str(found) for found in epochs}) == 4
    accelerator, loader = prepared(dataset_48, workers)
    accelerator.load_state(tmp_path / "saved")
    got = [[batch.tolist() for batch in loader] for _ in range(3)]
    expected = epochs[epoch + 1 :] if stop == 12 else [epochs[epoch][stop:], *epochs[epoch + 1 :]]
    assert got[: len(expected)] == expected[: len(got)]


def test_preparing_a_sharded_dataset_in_two_processes_is_refused_with_the_cure(dataset_48, tmp_path):
    assert launch("train_accelerate", 2, dataset_48, tmp_path, kind="prepare").returncode == 0
    for rank in range(2):
        found = logged(tmp_path, rank)
        assert [entry[:2] for entry in found] == [[False, 0], [False, 1], [True, 0], [True, 1]]
        for _, _, message in found:
            assert (
                "1 of every 2 samples would never be seen. Do not prepare the DataLoader: use StreamLoader" in message
            )


def test_a_dataset_that_every_rank_reads_whole_is_divided_by_accelerate(dataset_48, tmp_path):
    assert launch("train_accelerate", 2, dataset_48, tmp_path, kind="prepare", everything=True).returncode == 0
    for first, second in zip(logged(tmp_path, 0), logged(tmp_path, 1), strict=True):
        assert sorted(flat(first[2]) + flat(second[2])) == list(range(48)), first[:2]


def test_killed_in_two_processes_every_rank_goes_on_at_its_own_next_id_from_one_file(dataset_48, tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert launch("train_accelerate", 2, dataset_48, first, kind="train", die_after=5).returncode
    ran = launch("train_accelerate", 2, dataset_48, second, kind="train", resume=str(first / "saved"), die_after=6)
    assert ran.returncode
    ran = launch("train_accelerate", 1, dataset_48, third, kind="train", resume=str(second / "saved"))
    assert ran.returncode == 0, ran.stderr
    ids = []
    for folder, count in ((first, 5), (second, 6)):
        for rank in range(2):
            ids += flat(logged(folder, rank)[:count])
    ids += flat(logged(third, 0))
    assert sorted(ids) == sorted(2 * list(range(48)))


def test_a_loader_of_one_of_several_ranks_is_not_saved_for_all(dataset_48, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    loader = ss.StreamLoader(dataset_of(dataset_48, ss.Topology(0, 2)), batch_size=4, collate=as_tensor)
    accelerator.register_for_checkpointing(loader)
    next(iter(loader))
    with pytest.raises(ss.UsageError, match=r"that of rank 0: .* Register GatheredState\(loader\)"):
        accelerator.save_state(tmp_path / "saved")
    loader.close()
