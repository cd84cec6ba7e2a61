"""Real stores: a directory, an S3 server, a GCS server, fsspec's memory; or endpoints named by environment variables."""

from __future__ import annotations

import itertools
import json
import os

import pytest

from streamshard.storage.open import open_store
from streamshard.storage.policy import StoragePolicy
from streamshard.testing.faults import fault_server
from streamshard.testing.servers import gcs_server, s3_server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """(storage options, a function that makes a bucket), of STREAMSHARD_TEST_S3 or of an embedded server.

    STREAMSHARD_TEST_S3 is JSON: {"options": {...}, "bucket": "existing-bucket"}.
    """
    if named := os.environ.get("STREAMSHARD_TEST_S3"):
        given = json.loads(named)
        yield given["options"], lambda name: f"s3://{given['bucket']}/{name}-{os.getpid()}"
        return
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server.storage_options, server.make_bucket


@pytest.fixture(scope="session")
def gcs(tmp_path_factory):
    with gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        yield server.storage_options, server.make_bucket


def fast(**changes):
    """The default policy with short waits: what is tested is what happens, not how long it takes."""
    waits = {
        "backoff_s": 0.01,
        "throttle_backoff_s": 0.05,
        "hidden_retry_after_s": 0.1,
        "stall_s": 0.6,
        "first_byte_s": 5.0,
    }
    return StoragePolicy(**{**waits, **changes})


FAST = fast()


@pytest.fixture(scope="session")
def server():
    """A store that misbehaves as it is told."""
    with fault_server() as running:
        yield running


@pytest.fixture(params=["obstore", "fsspec"])
def transport(request):
    return request.param


@pytest.fixture(params=["directory", "s3", "gcs", "memory"])
def place(request, tmp_path):
    """(url, storage options) of an empty place in each kind of store."""
    number = next(_numbers)
    if request.param == "directory":
        return str(tmp_path / "place"), None
    if request.param == "memory":
        return f"memory://place-{number}", None
    options, make_bucket = request.getfixturevalue(request.param)
    return f"{make_bucket(f'bucket-{number}')}/some/place", options


@pytest.fixture(params=["directory", "s3-obstore", "s3-fsspec", "gcs-fsspec", "memory"])
def store(request, tmp_path):
    """An empty store of each kind, through each transport."""
    kind, _, transport = request.param.partition("-")
    number = next(_numbers)
    if kind == "directory":
        return open_store(str(tmp_path / "place"))
    if kind == "memory":
        return open_store(f"memory://place-{number}")
    options, make_bucket = request.getfixturevalue(kind)
    return open_store(f"{make_bucket(f'bucket-{number}')}/some/place", options, transport=transport)
