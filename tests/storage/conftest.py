"""Real stores: a directory, an S3 server, a GCS server, fsspec's memory; or endpoints named by environment variables."""

from __future__ import annotations

import itertools
import json
import os

import pytest

from streamshard.storage.open import open_store
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


@pytest.fixture
def store(place):
    return open_store(*place)
