"""Every store keeps the same contract."""

from __future__ import annotations

import pickle
import threading

import pytest

from streamshard.errors import StorageError, UsageError
from streamshard.storage.local_store import LocalStore
from streamshard.storage.open import open_store

pytestmark = pytest.mark.servers


def test_what_is_put_is_read_whole_and_in_ranges(store):
    store.put("a/b", b"0123456789")
    assert store.read("a/b") == b"0123456789"
    assert store.get("a/b", 2, 5) == b"234"
    assert store.get("a/b", 3, 3) == b""
    assert store.stat("a/b").size == 10


def test_replacing_an_object_changes_its_tag(store):
    store.put("key", b"one")
    first = store.stat("key").tag
    store.put("key", b"two")
    assert first
    assert store.stat("key").tag != first


def test_a_range_beyond_the_end_is_an_error_and_not_fewer_bytes(store):
    store.put("key", b"0123456789")
    with pytest.raises(StorageError, match=r"key: asked for bytes 5 to 20, got 5"):
        store.get("key", 5, 20)


@pytest.mark.parametrize("verb", [lambda s: s.stat("no"), lambda s: s.read("no"), lambda s: s.get("no", 0, 1)])
def test_a_missing_object_is_named(store, verb):
    store.put("yes", b"1")
    with pytest.raises(StorageError, match=r"/no: no such .*check the") as caught:
        verb(store)
    assert caught.value.kind == "missing"


def test_listing_shows_what_lies_below_a_folder_and_nothing_stale(store):
    assert store.list("folder") == []
    store.put("folder/b", b"22")
    store.put("folder/a", b"1")
    store.put("folder-two/c", b"333")
    assert [(stat.key, stat.size) for stat in store.list("folder")] == [("folder/a", 1), ("folder/b", 2)]
    store.delete("folder/a")
    assert [stat.key for stat in store.list("folder")] == ["folder/b"]


def test_deleting_twice_is_fine(store):
    store.put("key", b"1")
    store.delete("key")
    store.delete("key")
    with pytest.raises(StorageError):
        store.stat("key")


def test_a_conditional_write_needs_the_tag_that_is_there(store):
    assert store.put_if("key", b"one", tag=None)
    assert not store.put_if("key", b"two", tag=None)
    tag = store.stat("key").tag
    assert store.put_if("key", b"three", tag=tag)
    assert not store.put_if("key", b"four", tag=tag)
    assert store.read("key") == b"three"


def test_a_store_travels_to_other_processes(store):
    store.put("key", b"1")
    assert pickle.loads(pickle.dumps(store)).read("key") == b"1"  # noqa: S301  (our own bytes)


@pytest.mark.parametrize("kind", ["directory", "gcs"])
def test_of_racing_conditional_writes_one_wins(kind, tmp_path, request):
    if kind == "directory":
        store = open_store(str(tmp_path))
    else:
        options, make_bucket = request.getfixturevalue("gcs")
        store = open_store(make_bucket("racing-bucket"), options)
    start, wins = threading.Barrier(8), []

    def race(number):
        start.wait()
        if store.put_if("key", b"%d" % number, tag=None):
            wins.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert store.read("key") == b"%d" % wins[0]


def test_wrong_credentials_are_called_that(s3):
    options, make_bucket = s3
    url = make_bucket("denied-bucket")
    with pytest.raises(StorageError, match="access denied.*storage_options") as caught:
        open_store(url, {**options, "key": "wrong"}).read("key")
    assert caught.value.kind == "denied"


def test_an_object_is_never_half_written(tmp_path, monkeypatch):
    """A put that fails in the middle leaves the old object and no temporary file."""
    store = LocalStore(str(tmp_path))
    store.put("key", b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        store.put("key", b"new")
    assert store.read("key") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_options_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"storage_options=\['key'\] mean nothing for the directory"):
        open_store(str(tmp_path), {"key": "value"})


def test_an_unknown_scheme_is_named():
    with pytest.raises(UsageError, match=r"nope://bucket.* cannot be opened"):
        open_store("nope://bucket").read("key")
