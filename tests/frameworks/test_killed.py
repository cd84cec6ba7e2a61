"""SIGKILL in the middle of torch's loaders, with workers running ahead: the next process goes on with the next batch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import write_dataset


@pytest.fixture(scope="module")
def dataset_90(tmp_path_factory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "ds90", 90, per_shard=17, block_bytes=300)


def run(directory, folder, **options) -> int:
    command = [sys.executable, "-m", "tests.frameworks.train_loaders", directory, str(folder), json.dumps(options)]
    return subprocess.run(command, timeout=120, capture_output=True, check=False).returncode


@pytest.mark.parametrize(("kind", "workers"), [("track", 3), ("stateful", 3), ("nodes", 2)])
def test_killed_with_workers_ahead_every_sample_is_seen_once(dataset_90, tmp_path, kind, workers):
    for count in (9, 10**6):
        resume = {"resume": str(tmp_path / "state.pt")} if (tmp_path / "state.pt").exists() else {}
        code = run(dataset_90, tmp_path, kind=kind, workers=workers, die_after=count, **resume)
        assert code == (0 if count == 10**6 else -9)
    batches = [json.loads(line) for line in (tmp_path / "ids.jsonl").read_text().splitlines()]
    assert len(batches) > 14
    assert sorted(number for batch in batches for number in batch) == list(range(90))
