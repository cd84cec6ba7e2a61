"""A dataset is written, streamed and resumed the same way in every store."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import subprocess
import sys

import pytest

import streamshard as ss
from streamshard.errors import StorageError
from streamshard.prefetch.scheduler import ReadAhead
from streamshard.storage import local_store
from streamshard.storage.open import open_store
from tests.conftest import sample, write_dataset

pytestmark = pytest.mark.servers


def test_a_dataset_streams_and_resumes_from_every_store(place, tmp_path):
    url, options = place
    write_dataset(url, 203, storage_options=options)
    local = write_dataset(tmp_path / "same", 203)
    assert ss.open_manifest(url, storage_options=options).version == ss.open_manifest(local).version
    whole = [item["id"] for item in ss.StreamDataset(local, partitions=4)]
    dataset = ss.StreamDataset(url, partitions=4, storage_options=options)
    got = [item["id"] for item in itertools.islice(iter(dataset), 77)]
    resumed = ss.StreamDataset(url, partitions=4, storage_options=options)
    resumed.load_state_dict(dataset.state_dict())
    assert got + [item["id"] for item in resumed] == whole


def test_a_packed_mixture_streams_and_resumes_from_every_store_and_over_several(place, tmp_path):
    """One source in the store, with credentials of its own, and one in a directory."""
    url, options = place
    write_dataset(url, 203, storage_options=options, length_field="tokens")
    local = write_dataset(tmp_path / "same", 203, length_field="tokens")

    def read(where, settings):
        mixture = ss.Mixture({"far": ss.Source(where, storage_options=settings), "near": local}, (2, 1))
        return ss.StreamDataset(mixture, ss.Pack(32, window=20), partitions=4, repeat=True, shuffle_buffer=30)

    def rows(dataset, count):
        return [row["input_ids"].tolist() for row in itertools.islice(iter(dataset), count)]

    whole = rows(read(local, None), 120)
    dataset = read(url, options)
    got = rows(dataset, 50)
    resumed = read(url, options)
    resumed.load_state_dict(dataset.state_dict())
    assert got + rows(resumed, 70) == whole
    if options:
        assert dataset.storage_counters().requests > 0


def test_appending_and_parallel_writers_work_in_every_store(place):
    url, options = place
    for name in ("b", "a"):
        with ss.DatasetWriter(url, writer=name, storage_options=options) as writer:
            writer.write({"id": 10 if name == "a" else 20})
    ss.commit_writers(url, ["b", "a"], storage_options=options)
    with ss.DatasetWriter(url, append=True, storage_options=options) as writer:
        writer.write({"id": 30})
    dataset = ss.StreamDataset(url, shuffle=False, storage_options=options)
    assert [item["id"] for item in dataset] == [10, 20, 30]


def test_a_location_that_does_not_exist_or_cannot_be_written_is_found_out_at_once(s3):
    options, _ = s3
    with (
        pytest.raises(StorageError, match=r"s3://no-such-bucket.* cannot be written to"),
        ss.DatasetWriter("s3://no-such-bucket/x", storage_options=options) as writer,
    ):
        writer.write(sample(0))


def _read_in_child(url, options, queue):
    queue.put(sorted(item["id"] for item in ss.StreamDataset(url, storage_options=options)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_child_reads_a_store_that_its_parent_has_used(kind, method, request):
    options, make_bucket = request.getfixturevalue(kind)
    url = make_bucket(f"child-{method}-bucket")
    write_dataset(url, 50, storage_options=options)
    assert len(list(ss.StreamDataset(url, storage_options=options))) == 50
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(url, options, queue))
    child.start()
    assert queue.get(timeout=60) == list(range(50))
    child.join(timeout=30)
    assert child.exitcode == 0


def test_a_gcs_emulator_is_reached_at_once_even_when_gcsfs_was_imported_before(gcs):
    """gcsfs asks an emulator over gRPC what kind of bucket it has, and waits a minute for the answer."""
    options, make_bucket = gcs
    url = make_bucket("probed-bucket")
    script = (
        "import gcsfs, sys, time, json; from streamshard.storage.open import open_store; start = time.monotonic();"
        "open_store(sys.argv[1], json.loads(sys.argv[2])).put('key', b'1'); print(time.monotonic() - start)"
    )
    command = [sys.executable, "-c", script, url, json.dumps(options)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert float(out) < 10


@pytest.mark.parametrize(("streams", "megabytes"), [(1, 4), (8, 4), (32, 2), (1000, 1)])
def test_the_first_speculative_request_is_larger_where_fewer_streams_share_the_budget(streams, megabytes):
    assert ReadAhead(256 << 20, streams).first_unit == megabytes << 20


def test_a_local_directory_is_read_less_far_ahead_than_a_store_that_has_to_be_waited_for(tmp_path, monkeypatch):
    local, remote = open_store(str(tmp_path)), open_store("s3://bucket/prefix")
    assert [local.look_ahead(streams) >> 20 for streams in (1, 2, 8, 32)] == [16, 32, 64, 64]
    assert remote.look_ahead(1) == remote.look_ahead(32) == 256 << 20
    url = write_dataset(tmp_path / "ds", 4000, per_shard=400, block_bytes=2048)
    monkeypatch.setattr(local_store, "_LOOK_AHEAD", 8192)
    assert look_ahead_peak(ss.StreamDataset(url, partitions=1, interleave=1)) < 2 * 8192
    assert look_ahead_peak(ss.StreamDataset(url, partitions=1, interleave=1, prefetch_bytes=1 << 16)) > 4 * 8192


def look_ahead_peak(dataset):
    loader = ss.StreamLoader(dataset, batch_size=4, collate=list, prefetch=0)
    for _ in loader:
        pass
    return loader.storage_counters().lookahead_peak
