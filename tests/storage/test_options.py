"""The same storage_options, and the same environment, mean the same through both transports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import trustme

from streamshard.errors import StorageError, UsageError
from streamshard.storage.obstore_options import gcs_arguments, other_arguments, s3_arguments
from streamshard.storage.open import open_store
from streamshard.storage.policy import StoragePolicy
from streamshard.testing.faults import fault_server
from tests.storage.conftest import FAST

DATA = os.urandom(10_000)
POLICY = StoragePolicy()


@pytest.fixture(autouse=True)
def good_weather(server, monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server.script()
    server.rules()
    server.put("bucket/place/key", DATA)
    server.clear()


def read(server, options, transport):
    assert open_store("s3://bucket/place", options, transport=transport, policy=FAST).get("key", 0, 10_000) == DATA
    return server.gets()[-1]


def key_of(entry):
    """The access key that signed a request."""
    return entry["authorization"].partition("Credential=")[2].partition("/")[0]


@pytest.mark.parametrize(
    "spelling",
    [
        lambda at: {"key": "AK", "secret": "SK", "endpoint_url": at},
        lambda at: {"key": "AK", "secret": "SK", "client_kwargs": {"endpoint_url": at}},
        lambda at: {"username": "AK", "password": "SK", "endpoint_url": at},
        lambda at: {"endpoint_url": at, "client_kwargs": {"aws_access_key_id": "AK", "aws_secret_access_key": "SK"}},
    ],
)
def test_keys_and_endpoints_in_any_spelling_sign_the_request(server, transport, spelling):
    entry = read(server, spelling(server.endpoint), transport)
    assert key_of(entry) == "AK"
    assert entry["key"] == "bucket/place/key"  # path style, as with any endpoint of one's own


def test_a_session_token_is_sent(server, transport):
    options = {"key": "AK", "secret": "SK", "token": "TOKEN", "endpoint_url": server.endpoint}
    assert read(server, options, transport)["token"] == "TOKEN"


def test_anonymous_requests_are_not_signed(server, transport):
    assert read(server, {"anon": True, "endpoint_url": server.endpoint}, transport)["authorization"] == ""


def test_with_no_options_the_usual_environment_is_used(server, transport, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROM-ENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    entry = read(server, {}, transport)
    assert key_of(entry) == "FROM-ENV"
    assert "/eu-central-1/s3/" in entry["authorization"]


def test_a_profile_is_found(server, transport, monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = FROM-PROFILE\naws_secret_access_key = SK\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert key_of(read(server, {"profile": "lab", "endpoint_url": server.endpoint}, transport)) == "FROM-PROFILE"


def test_a_profile_that_is_not_there_is_named(server, transport):
    options = {"profile": "nope", "endpoint_url": server.endpoint}
    with pytest.raises((UsageError, StorageError), match="nope"):
        open_store("s3://bucket/place", options, transport=transport, policy=FAST).read("key")


def test_without_credentials_the_error_says_what_to_pass(server, transport):
    with pytest.raises(StorageError, match="credential|key") as caught:
        open_store("s3://bucket/place", {"endpoint_url": server.endpoint}, transport=transport, policy=FAST).read("key")
    assert caught.value.kind == "denied"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """(file of the authority's certificate, file of the server's certificate and key)."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    return str(folder / "ca.pem"), str(folder / "server.pem")


def test_a_private_certificate_authority_is_trusted_when_named_and_otherwise_an_error_with_the_cure(
    authority, transport
):
    with fault_server(tls_pem=authority[1]) as server:
        server.put("bucket/place/key", DATA)
        options = {"key": "AK", "secret": "SK", "endpoint_url": server.endpoint}
        read(server, {**options, "client_kwargs": {"verify": authority[0]}}, transport)
        with pytest.raises(StorageError, match="'verify'") as caught:
            read(server, options, transport)
        assert caught.value.kind == "denied"


def test_addressing_style_region_and_requester_pays_have_a_word_in_both():
    virtual = s3_arguments(
        {"config_kwargs": {"s3": {"addressing_style": "virtual"}}, "endpoint_url": "http://e"}, POLICY
    )
    assert virtual.config["virtual_hosted_style_request"]
    path = s3_arguments({"config_kwargs": {"s3": {"addressing_style": "path"}}}, POLICY)
    assert not path.config["virtual_hosted_style_request"]
    assert s3_arguments({"client_kwargs": {"region_name": "r"}}, POLICY).config["region"] == "r"
    assert s3_arguments({"requester_pays": True}, POLICY).config["request_payer"]
    assert gcs_arguments({"token": "anon"}, POLICY).config == {"skip_signature": True}
    assert other_arguments({"account_name": "a", "sas_token": "s"}, POLICY).config == {
        "account_name": "a",
        "sas_key": "s",
    }


def test_an_option_that_obstore_has_no_word_for_means_fsspec_or_an_error_that_names_it(server):
    options = {**server.storage_options, "version_aware": True}
    store = open_store("s3://bucket/place", options)
    assert store.get("key", 0, 10) == DATA[:10]
    assert "S3fsTransport" in repr(store)
    with pytest.raises(UsageError, match=r"\['version_aware'\] mean nothing to obstore.*transport='fsspec'"):
        open_store("s3://bucket/place", options, transport="obstore").get("key", 0, 10)


def test_obstore_is_used_where_nothing_is_said(server):
    store = open_store("s3://bucket/place", server.storage_options)
    assert store.get("key", 0, 10) == DATA[:10]
    assert repr(store) == "RemoteStore(Resilient(ObstoreTransport('s3://bucket/place')))"


def test_without_obstore_installed_fsspec_is_used_and_asking_for_it_says_how_to_get_it(server):
    script = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "obstore" else find(name, *rest)
from streamshard.storage.open import open_store
store = open_store("s3://bucket/place", {server.storage_options!r})
assert len(store.get("key", 0, 10)) == 10
assert "S3fsTransport" in repr(store) and "obstore" not in sys.modules
try:
    open_store("s3://bucket/place", transport="obstore")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert "pip install streamshard[fast]" in done.stdout, done.stderr


@pytest.mark.parametrize("wrong", [{"transport": "boto3"}, {"policy": 3}])
def test_a_transport_or_policy_that_does_not_exist_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        open_store("s3://bucket/place", **wrong)
