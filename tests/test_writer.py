"""Writing publishes all or nothing, in one process or many."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import streamshard as ss
from streamshard.errors import StorageError, UsageError
from tests.conftest import sample, write_dataset


def stored_ids(directory):
    return [item["id"] for item in ss.StreamDataset(str(directory), shuffle=False)]


def test_what_was_written_is_read_back_field_by_field(tmp_path):
    directory = write_dataset(tmp_path / "ds", 100)
    for number, item in enumerate(ss.StreamDataset(directory, shuffle=False)):
        expected = sample(number)
        assert item.keys() == expected.keys()
        assert item["tokens"].dtype == np.uint16
        assert item["tokens"].tolist() == expected["tokens"].tolist()
        assert {k: v for k, v in item.items() if k != "tokens"} == {k: v for k, v in expected.items() if k != "tokens"}


def test_shards_close_near_their_size_and_blocks_by_bytes(tmp_path):
    rng = np.random.default_rng(0)
    with ss.DatasetWriter(str(tmp_path), shard_bytes=100_000, block_bytes=10_000) as writer:
        for _ in range(300):
            writer.write({"noise": rng.integers(0, 256, 2000, dtype=np.uint8)})
    manifest = ss.open_manifest(str(tmp_path))
    assert len(manifest) > 5
    assert all(100_000 <= size < 113_000 for size in manifest.bytes[:-1].tolist())


def test_progress_counts_samples_and_stored_bytes(tmp_path):
    seen = []
    with ss.DatasetWriter(str(tmp_path), shard_bytes=2000, block_bytes=500, on_progress=seen.append) as writer:
        for number in range(200):
            writer.write(sample(number))
        assert writer.progress.samples == 200
    assert [progress.stored_shards for progress in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].stored_bytes == ss.open_manifest(str(tmp_path)).total_bytes


def test_parallel_writers_are_committed_in_an_order_that_no_race_decides(tmp_path):
    def write(name):
        with ss.DatasetWriter(str(tmp_path), writer=name, shard_bytes=2000, block_bytes=500) as writer:
            for number in range(100):
                writer.write({"id": f"{name}-{number}"})

    threads = [threading.Thread(target=write, args=(name,)) for name in ("b", "c", "a")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(StorageError, match="no finished dataset"):
        ss.open_manifest(str(tmp_path))
    ss.commit_writers(str(tmp_path), ["c", "a", "b"])
    assert stored_ids(tmp_path) == [f"{name}-{number}" for name in "abc" for number in range(100)]
    assert [path.name for path in (tmp_path / "writers").iterdir() if not path.name.startswith(".")] == []


def test_appending_keeps_the_old_shards_in_front(tmp_path):
    directory = write_dataset(tmp_path / "ds", 50)
    before = ss.open_manifest(directory)
    with ss.DatasetWriter(directory, append=True, metadata={"more": True}) as writer:
        for number in range(50, 80):
            writer.write(sample(number))
    after = ss.open_manifest(directory)
    assert [after.key(i) for i in range(len(before))] == [before.key(i) for i in range(len(before))]
    assert stored_ids(directory) == list(range(80))
    assert after.metadata == {"more": True}


def test_two_commits_at_once_never_lose_one_silently(tmp_path):
    directory = write_dataset(tmp_path / "ds", 50)
    first = ss.DatasetWriter(directory, append=True)
    second = ss.DatasetWriter(directory, append=True)
    first.write(sample(50))
    second.write(sample(51))
    first.close()
    with pytest.raises(UsageError, match="was written by another commit.*append=True"):
        second.close()
    assert stored_ids(directory) == list(range(51))


def test_an_exception_in_the_with_block_publishes_nothing(tmp_path):
    directory = write_dataset(tmp_path / "ds", 50)
    with pytest.raises(ZeroDivisionError), ss.DatasetWriter(directory, append=True, shard_bytes=1024) as writer:
        for number in range(1000):
            writer.write(sample(number))
        raise ZeroDivisionError
    assert stored_ids(directory) == list(range(50))


KILLED = """
import os, signal, sys
import streamshard as ss
from tests.conftest import sample
with ss.DatasetWriter(sys.argv[1], append=sys.argv[2] == "append", shard_bytes=2000, block_bytes=500) as writer:
    for number in range(100, 1000):
        writer.write(sample(number))
        if writer.progress.stored_shards == 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("mode", ["new", "append"])
def test_a_writer_killed_half_way_leaves_the_dataset_as_it_was(tmp_path, mode):
    directory = tmp_path / "ds"
    if mode == "append":
        write_dataset(directory, 50)
    child = subprocess.run([sys.executable, "-c", KILLED, str(directory), mode], check=False, cwd=Path.cwd())
    assert child.returncode == -signal.SIGKILL
    assert len(list((directory / "shards").iterdir())) >= 3
    if mode == "append":
        assert stored_ids(directory) == list(range(50))
        with ss.DatasetWriter(str(directory), append=True) as writer:
            writer.write(sample(50))
        assert stored_ids(directory) == list(range(51))
    else:
        with pytest.raises(StorageError, match="no finished dataset here"):
            ss.open_manifest(str(directory))
        write_dataset(directory, 20)
        assert stored_ids(directory) == list(range(20))


def test_a_refused_sample_is_not_written_and_writing_goes_on(tmp_path):
    with ss.DatasetWriter(str(tmp_path)) as writer:
        writer.write({"id": 0})
        for bad in ({"id": "text"}, {"id": 1, "new": {1: "int key"}}, {"id": 2, "other": object()}, [1, 2]):
            with pytest.raises(UsageError):
                writer.write(bad)
        writer.write({"id": 3, "new": "text", "other": 7})
    assert list(ss.StreamDataset(str(tmp_path), shuffle=False)) == [{"id": 0}, {"id": 3, "new": "text", "other": 7}]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused_before_any_work(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="cannot be written to.*permission"), ss.DatasetWriter(str(tmp_path / "ds")):
        pass


def test_a_path_below_a_file_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file.*check the path"), ss.DatasetWriter(str(tmp_path / "file" / "ds")):
        pass


def test_a_failed_upload_fails_the_writer_and_publishes_nothing(tmp_path, monkeypatch):
    writer = ss.DatasetWriter(str(tmp_path), shard_bytes=1024, block_bytes=200)
    writer.write(sample(0))
    plain = writer._store.put

    def failing(key, data):
        if key.startswith("shards/"):
            raise StorageError(f"{key}: disk full")
        plain(key, data)

    monkeypatch.setattr(writer._store, "put", failing)
    with pytest.raises(StorageError, match="disk full"):
        for number in range(1, 1000):
            writer.write(sample(number))
    with pytest.raises(UsageError, match="is aborted; make a new one"):
        writer.write(sample(0))
    writer.close()
    assert not (tmp_path / "manifest.json").exists()


def test_shards_are_split_by_a_field_and_the_manifest_says_how(tmp_path):
    url = str(tmp_path)
    with ss.DatasetWriter(url, split_by="lang", shard_bytes=1024, block_bytes=200) as writer:
        for number in range(200):
            writer.write({"id": number, "lang": "en" if number % 3 else "de", "text": str(number) * 10})
    manifest = ss.open_manifest(url)
    assert manifest.split.field == "lang"
    assert sorted(manifest.split.values) == ["de", "en"]
    found = {}
    for item in ss.StreamDataset(url, provenance=True):
        found.setdefault(item["__ref__"].shard, set()).add(item["lang"])
    assert found == {n: {manifest.split.values[which]} for n, which in enumerate(manifest.split.column.tolist())}
    assert manifest.only("de").total_samples == 67
    assert manifest.only("de").version == manifest.version
    assert sum(item["id"] for item in ss.StreamDataset(url)) == sum(range(200))


def test_split_datasets_can_be_appended_to_and_committed_together(tmp_path):
    def write(url, langs, **options):
        with ss.DatasetWriter(url, **options) as writer:
            for number in range(20):
                writer.write({"id": number, "lang": langs[number % len(langs)]})

    url = str(tmp_path / "appended")
    write(url, ["en", "de"], split_by="lang")
    write(url, ["fr", "de"], append=True)
    split = ss.open_manifest(url).split
    assert set(split.values) == {"en", "de", "fr"}
    assert len(split.column) == 4
    together = str(tmp_path / "together")
    write(together, ["en", "de"], split_by="lang", writer="a")
    write(together, ["fr", "en"], split_by="lang", writer="b")
    assert set(ss.commit_writers(together, ["a", "b"]).split.values) == {"en", "de", "fr"}
    assert ss.open_manifest(together).only("en").total_samples == 20


def test_splits_that_cannot_be_are_refused(tmp_path):
    with ss.DatasetWriter(str(tmp_path / "a"), split_by="lang") as writer:
        with pytest.raises(UsageError, match="sample 0 .* split_by='lang' needs text in that field, and this is None"):
            writer.write({"id": 1})
        writer.write({"id": 1, "lang": "en"})
    with (
        pytest.raises(UsageError, match="split_by='domain' differs from 'lang'"),
        ss.DatasetWriter(str(tmp_path / "a"), split_by="domain", append=True),
    ):
        pass
    with ss.DatasetWriter(str(tmp_path / "b"), writer="x", split_by="lang") as writer:
        writer.write({"lang": "en"})
    with ss.DatasetWriter(str(tmp_path / "b"), writer="y") as writer:
        writer.write({"lang": "en"})
    with pytest.raises(UsageError, match="split by different fields"):
        ss.commit_writers(str(tmp_path / "b"), ["x", "y"])
