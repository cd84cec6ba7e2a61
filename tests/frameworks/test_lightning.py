"""Lightning: the first id after a resume is the next id, in one process and in two, with and without a length."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import streamshard as ss
from streamshard.frameworks.lightning import LightningData
from tests.conftest import write_dataset
from tests.frameworks.train_lightning import Model, main, only_id

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def dataset_60(tmp_path_factory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "ds60", 60, per_shard=13, block_bytes=300)


def trained(folder: Path, rank: int = 0) -> list[list[int]]:
    return [json.loads(line)[2] for line in (folder / f"ids-{rank}.jsonl").read_text().splitlines()]


def flat(batches):
    return [number for batch in batches for number in batch]


KINDS = {
    "a known length": {},
    "an unknown length": {"filter": True},
    "an endless stream in passes of seven": {"repeat": True, "limit": 7, "epochs": 6},
    "an endless stream": {"repeat": True, "max_steps": 40, "epochs": -1},
    "a torch DataLoader": {"torch_loader": True},
    "a torch DataLoader with workers": {"torch_loader": True, "workers": 2},
}


@pytest.fixture(scope="module", params=KINDS)
def whole(request, dataset_60, tmp_path_factory):
    """(options, folder of an undisturbed run with a checkpoint after every batch)"""
    folder = tmp_path_factory.mktemp("whole")
    main(dataset_60, str(folder), KINDS[request.param])
    return KINDS[request.param], folder


def test_an_undisturbed_run_sees_each_sample_once_an_epoch(whole):
    options, folder = whole
    expected = list(range(0, 60, 2)) if "filter" in options else list(range(60))
    ids = flat(trained(folder))
    assert len(ids) > 2 * len(expected)
    for start in range(0, len(ids) - len(expected) + 1, len(expected)):
        assert sorted(ids[start : start + len(expected)]) == expected


@pytest.mark.parametrize("stop", [1, 5, "last batch", 18])
def test_the_first_batch_after_a_resume_is_the_next_one(whole, dataset_60, tmp_path, stop):
    options, folder = whole
    batches = trained(folder)
    if stop == "last batch":
        stop = {"filter": 8, "repeat": 15, "workers": 16}.get(
            next((name for name in ("filter", "repeat", "workers") if name in options), ""), 15
        )
    resumed = {**options, "resume": str(folder / f"step={stop}.ckpt")}
    main(dataset_60, str(tmp_path), resumed)
    assert trained(tmp_path) == batches[stop:]


@pytest.mark.parametrize("kind", ["a known length", "an unknown length", "a torch DataLoader with workers"])
def test_a_checkpoint_saved_at_the_end_of_an_epoch_resumes_to_the_next(kind, dataset_60, tmp_path):
    options = {**KINDS[kind], "every": None, "at_epoch_end": True}
    main(dataset_60, str(tmp_path / "whole"), {**options})
    batches = trained(tmp_path / "whole")
    saved = sorted((tmp_path / "whole").glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    assert len(saved) == 3
    step = int(saved[0].stem.partition("=")[2])
    main(dataset_60, str(tmp_path / "resumed"), {**options, "resume": str(saved[0])})
    assert trained(tmp_path / "resumed") == batches[step:]


def launch(ranks: int, directory: str, folder: Path, **options) -> int:
    """A training in processes of its own; returns torchrun's exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "tests.frameworks.train_lightning"]
    options = json.dumps({"ranks": ranks, **options})
    return subprocess.run(
        [*command, directory, str(folder), options], capture_output=True, timeout=120, check=False
    ).returncode


def test_killed_twice_in_two_gloo_processes_it_goes_on_in_one_with_each_sample_once(dataset_60, tmp_path):
    lives = [tmp_path / name for name in ("first", "second", "third")]
    assert launch(2, dataset_60, lives[0], epochs=2, die_after=3)
    assert launch(2, dataset_60, lives[1], epochs=2, die_after=2, resume=str(lives[0] / "last.ckpt"))
    assert launch(1, dataset_60, lives[2], epochs=2, resume=str(lives[1] / "last.ckpt")) == 0
    begun = [0, *(torch.load(life / "last.ckpt", weights_only=False)["global_step"] for life in lives[:2]), 10**6]
    ids = []
    for number, life in enumerate(lives):
        for log in life.glob("ids-*.jsonl"):
            steps = map(json.loads, log.read_text().splitlines())
            ids += flat(batch for _, step, batch in steps if begun[number] <= step < begun[number + 1])
    assert sorted(ids) == sorted(2 * list(range(60)))


def test_a_bare_loader_is_refused_with_the_cure_before_the_first_step(dataset_60, tmp_path):
    for loader in (
        ss.StreamLoader(ss.StreamDataset(dataset_60, ss.Map(only_id)), batch_size=4),
        ss.track(DataLoader(ss.StreamDataset(dataset_60, ss.Map(only_id)), batch_size=4)),
    ):
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
        with pytest.raises(ss.UsageError, match=r"datamodule=LightningData\(loader\).*instead of this"):
            trainer.fit(Model(tmp_path, None), loader)
    assert not list(tmp_path.glob("ids-*"))


def test_a_bare_loader_may_validate(dataset_60, tmp_path):
    class Validating(Model):
        def validation_step(self, batch):
            self.seen = getattr(self, "seen", 0) + len(batch["id"])

    model = Validating(tmp_path, None)
    data = LightningData(
        ss.StreamLoader(ss.StreamDataset(dataset_60, ss.Map(only_id)), batch_size=4),
        validation=ss.StreamLoader(ss.StreamDataset(dataset_60, ss.Map(only_id)), batch_size=4),
    )
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=1, num_sanity_val_steps=0,
        enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    assert model.seen == 60
