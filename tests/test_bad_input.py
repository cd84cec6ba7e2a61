"""Bad input gets an error that names the thing, the value and the cure: one row each, all three parts asserted."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
import zstandard

import streamshard as ss
from streamshard.shard import layout
from streamshard.shard.compression import digest64
from streamshard.shard.manifest import Manifest, ShardGroup, column, decode_manifest
from tests.conftest import sample, write_dataset


def read(directory, **options):
    return list(ss.StreamDataset(str(directory), **{"partitions": 1, **options}))


def check(error, kind, thing, value, cure):
    """The message has all three parts, and no library's error is the one that is raised."""
    text = str(error.value)
    for part in (thing, value, cure):
        assert part in text, f"{part!r} is not in: {text}"
    assert error.type is kind


@pytest.fixture
def directory(tmp_path):
    return Path(write_dataset(tmp_path / "ds", 100))


def shard_file(directory, shard=1):
    return directory / ss.open_manifest(str(directory)).key(shard)


# ------------------------------------------------------------------------------------------------ datasets and manifests


def test_a_missing_manifest(tmp_path):
    with pytest.raises(ss.StorageError) as error:
        read(tmp_path / "nothing")
    check(error, ss.StorageError, "manifest.json", "nothing", "write one with streamshard.DatasetWriter")
    assert error.value.kind == "missing"


def test_an_empty_dataset_is_neither_written_nor_read(tmp_path):
    with pytest.raises(ss.UsageError) as error, ss.DatasetWriter(str(tmp_path)):
        pass
    check(error, ss.UsageError, "no sample was written", str(tmp_path), "write at least one")
    empty = column([])
    manifest = Manifest((), empty, empty, empty, empty, empty, {})
    (tmp_path / "manifest.json").write_bytes(manifest.encode(created=""))
    with pytest.raises(ss.DataError) as error:
        read(tmp_path)
    check(error, ss.DataError, "manifest.json", "0 samples", "write samples before reading")


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda d: d.update(format=99), "format version 99"),
        (lambda d: d["totals"].update(samples=7) or d.update(metadata={"x": 1}), "its content hashes to"),
        (lambda d: d["data"].update(samples="AAAAAAAA"), "entries for 3 shards"),
        (lambda d: d.pop("groups"), "KeyError: 'groups'"),
        (lambda d: d["groups"][0].__setitem__(0, "../../etc/{index:06d}-{digest:016x}"), "../../etc/"),
        (lambda d: d["columns"].update(bytes="<f8"), "'<f8'"),
    ],
)  # fmt: skip
def test_a_damaged_manifest(directory, change, value):
    document = json.loads((directory / "manifest.json").read_text())
    change(document)
    (directory / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(ss.DataError) as error:
        read(directory)
    check(error, ss.DataError, "manifest.json" if "etc" not in value and "f8" not in value else "", value, "")


def test_a_manifest_that_is_no_json(directory):
    (directory / "manifest.json").write_text("{")
    with pytest.raises(ss.DataError) as error:
        read(directory)
    check(error, ss.DataError, "manifest.json", "not valid JSON", "restore it from manifests/<version>.json")


# ------------------------------------------------------------------------------------------------------------- shards


def test_a_missing_shard(directory):
    shard_file(directory).unlink()
    with pytest.raises(ss.StorageError) as error:
        read(directory)
    check(error, ss.StorageError, "shard 1", "part-000001-", "check the path")


@pytest.mark.parametrize(
    ("change", "value"), [(lambda data: data[:-100], "bytes than the manifest says"),
                          (lambda data: data + b"more", "bytes where the manifest says"),
                          (lambda data: data[: len(data) // 2], "bytes than the manifest says")],
)  # fmt: skip
def test_a_shard_of_another_size(directory, change, value):
    path = shard_file(directory)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ss.CorruptError) as error:
        read(directory)
    check(error, ss.CorruptError, "shard 1", value, "Restore the object, or write the dataset again")


def test_a_shard_replaced_by_a_consistent_other_one(tmp_path, directory):
    other = write_dataset(tmp_path / "other", 100, block_bytes=300)
    source = Path(other) / ss.open_manifest(other).key(1)
    target = shard_file(directory)
    data = source.read_bytes()
    size = target.stat().st_size
    target.write_bytes(data[:size].ljust(size, b"\0"))
    with pytest.raises(ss.CorruptError) as error:
        read(directory)
    check(error, ss.CorruptError, "shard 1", "is not the one the manifest pins", "Restore the object")


def test_a_flipped_bit_anywhere_that_is_read_is_noticed_and_the_samples_before_it_are_right(directory):
    """Every byte of a shard: in the seek table, which is never read, nothing happens."""
    manifest = ss.open_manifest(str(directory))
    path = shard_file(directory, 0)
    data = path.read_bytes()
    whole = [item["id"] for item in ss.StreamDataset(str(directory), shuffle=False)]
    size = int(manifest.index_bytes[0])
    blocks = layout.decode_index(data[:size], size=size, digest=int(manifest.index_digests[0]), samples=40)
    table = int(blocks.offsets[-1])
    for place in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        got = []
        try:
            got.extend(item["id"] for item in ss.StreamDataset(str(directory), shuffle=False))
        except ss.DataError as error:
            assert place < table, f"byte {place} of the seek table was read"
            assert "shard 0" in str(error)
            assert "index frame" in str(error) or "block" in str(error)
        else:
            assert place >= table, f"a flipped bit in byte {place} went unnoticed"
            assert got == whole
        assert got == whole[: len(got)]


def forge(directory, *, index=None, blocks=None, frames=None, samples=None):
    """A dataset of one shard whose manifest, index and blocks agree with each other in a lie."""
    directory.mkdir(parents=True, exist_ok=True)
    plain = msgpack.packb({"id": 1}) + msgpack.packb({"id": 2})
    frames = frames or [zstandard.ZstdCompressor(write_checksum=True).compress(plain)]
    blocks = blocks or [(2, len(frames[0]), len(plain), digest64(frames[0]))]
    frame = index or layout.encode_index({"id": "int"}, blocks, None)
    data = frame + b"".join(frames) + layout.encode_seek_table(len(frame), blocks)
    manifest = Manifest(
        (ShardGroup("shards/part-{index:06d}-{digest:016x}.msgpack.zst", 0, 1),), column([samples or 2]),
        column([len(data)]), column([len(frame)]), column([digest64(frame)]), column([0]), {"id": "int"},
    )  # fmt: skip
    path = directory / manifest.key(0)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    (directory / "manifest.json").write_bytes(manifest.encode(created=""))
    return directory


def frame_claiming(size):
    """A zstd frame whose header claims `size` bytes of content (single segment, 8-byte size field)."""
    return b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + struct.pack("<Q", size) + b"\x01\x00\x00"


def test_the_forger_makes_readable_datasets(tmp_path):
    assert [item["id"] for item in read(forge(tmp_path / "ds"), shuffle=False)] == [1, 2]


PLAIN = msgpack.packb({"id": 1}) + msgpack.packb({"id": 2})
FRAME = zstandard.ZstdCompressor(write_checksum=True).compress(PLAIN)
TWO_FRAMES = FRAME + FRAME
TERABYTE = frame_claiming(1 << 40)
BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 24))


def block(count, frame, plain):
    return [(count, len(frame), plain, digest64(frame))]


LIES = {
    "a header that claims a terabyte": ({"frames": [TERABYTE], "blocks": block(2, TERABYTE, len(PLAIN))}, "declares 1099511627776"),
    "an index that claims three gigabytes": ({"blocks": block(2, FRAME, 3 << 30)}, "claims a block of 3221225472 bytes"),
    "a bomb behind a small size": ({"frames": [BOMB], "blocks": block(2, BOMB, 100)}, "declares 16777216 bytes where the index says 100"),
    "too many samples": ({"blocks": block(3, FRAME, len(PLAIN)), "samples": 3}, "do not decode as msgpack"),
    "too few samples": ({"blocks": block(1, FRAME, len(PLAIN)), "samples": 1}, "do not decode as msgpack"),
    "more samples than bytes": ({"blocks": block(10**6, FRAME, len(PLAIN)), "samples": 10**6}, "more samples than a block has bytes"),
    "another count than the manifest": ({"samples": 5}, "counts 2 samples where the manifest says 5"),
    "an uncompressed size too large": ({"blocks": block(2, FRAME, len(PLAIN) + 1)}, f"declares {len(PLAIN)} bytes"),
    "two frames as one block": ({"frames": [TWO_FRAMES], "blocks": block(4, TWO_FRAMES, 2 * len(PLAIN)), "samples": 4}, "declares"),
    "garbage as msgpack": ({"frames": [zstandard.compress(b"\xc1" * 20)], "blocks": block(2, zstandard.compress(b"\xc1" * 20), 20)}, "do not decode as msgpack"),
    "numbers as samples": ({"frames": [zstandard.compress(b"\x01\x02")], "blocks": block(2, zstandard.compress(b"\x01\x02"), 2)}, "a sample is a int"),
    "a truncated frame": ({"frames": [FRAME[:-6]], "blocks": block(2, FRAME[:-6], len(PLAIN))}, "decode"),
    "an unknown index version": ({"index": layout.skippable(0x184D2A50, msgpack.packb({"format": 7}))}, "format version 7"),
    "no index frame": ({"index": b"x" * 40}, "magic"),
    "an index of garbage": ({"index": layout.skippable(0x184D2A50, b"\xc1\xc1")}, "do not decode as msgpack"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_consistent_lie_is_found_before_it_does_harm(tmp_path, name):
    forged, value = LIES[name]
    directory = forge(tmp_path / "ds", **forged)
    with pytest.raises(ss.DataError) as error:
        read(directory)
    check(error, ss.DataError, "shard 0", value, "write the dataset again")


def test_stored_pickles_and_unknown_extensions_are_not_executed(tmp_path):
    for code in (2, 42, 127):
        plain = msgpack.packb({"x": msgpack.ExtType(code, b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")}) * 2
        frame = zstandard.ZstdCompressor(write_checksum=True).compress(plain)
        directory = forge(tmp_path / f"ds{code}", frames=[frame], blocks=block(2, frame, len(plain)))
        with pytest.raises(ss.DataError) as error:
            read(directory)
        check(error, ss.DataError, "block 0 (rows 0 to 1)", f"extension type {code} is unknown", "arrays")


# -------------------------------------------------------------------------------------------------------------- samples

BAD_SAMPLES = {
    "not a mapping": ([1, 2], "sample 3 is a list", "[1, 2]", "write a mapping"),
    "object array": ({"x": np.array([object()])}, "sample 3", "dtype object", "convert it to one of"),
    "a tensor": ({"x": torch.zeros(2)}, "sample 3", "torch.Tensor", "tensor.numpy()"),
    "a type that changes": ({"id": "seven"}, "field 'id'", "is str where earlier samples have int", "convert it"),
    "a dtype that changes": ({"tokens": np.zeros(3, np.int64)}, "field 'tokens'", "array[int64, 1]", "convert it"),
    "a key that is no text": ({"x": {1: 2}}, "nested map", "key 1 of type int", "use str keys"),
    "a field name that is no text": ({7: "x"}, "field name", "7", "field names are str"),
    "a field name that is no text, of None": ({7: None}, "field name", "7", "field names are str"),
    "a set": ({"x": {1, 2}}, "sample 3", "builtins.set", "lists and maps"),
    "an integer beyond 64 bits": ({"x": 1 << 70}, "sample 3", "cannot be stored as msgpack", "must fit 64 bits"),
    "a lone surrogate": ({"x": "\ud800"}, "sample 3", "surrogate", "valid unicode"),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_sample_that_cannot_be_written(tmp_path, name):
    item, thing, value, cure = BAD_SAMPLES[name]
    with ss.DatasetWriter(str(tmp_path)) as writer:
        for number in range(3):
            writer.write(sample(number))
        with pytest.raises(ss.UsageError) as error:
            writer.write(item)
    check(error, ss.UsageError, thing, value, cure)
    assert len(read(tmp_path)) == 3


def test_a_length_field_that_has_no_length(tmp_path):
    with ss.DatasetWriter(str(tmp_path), length_field="size") as writer:
        writer.write({"size": 3})
        with pytest.raises(ss.UsageError) as error:
            writer.write({"other": 1})
    check(error, ss.UsageError, "length_field='size'", "None", "a count from 0")


# -------------------------------------------------------------------------------------------------------------- writers


def test_a_dataset_that_exists(directory):
    with pytest.raises(ss.UsageError) as error, ss.DatasetWriter(str(directory)):
        pass
    check(error, ss.UsageError, str(directory), "already holds a dataset", "append=True")


def test_two_writers_with_one_name(tmp_path):
    first, second = (ss.DatasetWriter(str(tmp_path), writer="a") for _ in range(2))
    first.write(sample(0))
    second.write(sample(1))
    first.close()
    with pytest.raises(ss.UsageError) as error:
        second.close()
    check(error, ss.UsageError, "writer='a'", "has already finished", "a name of its own")
    with pytest.raises(ss.UsageError) as error, ss.DatasetWriter(str(tmp_path), writer="a"):
        pass
    check(error, ss.UsageError, "writer='a'", "has already finished", "a name of its own")
    ss.commit_writers(str(tmp_path), ["a"])
    assert [item["id"] for item in read(tmp_path)] == [0]


def test_committing_writers_that_have_not_finished(tmp_path):
    with ss.DatasetWriter(str(tmp_path), writer="a") as writer:
        writer.write(sample(0))
    with pytest.raises(ss.UsageError) as error:
        ss.commit_writers(str(tmp_path), ["a", "b"])
    check(error, ss.UsageError, "writers ['b'] have not finished", "finished: ['a']", "close them first")


def test_a_commit_that_was_interrupted_is_not_published_twice(tmp_path):
    with ss.DatasetWriter(str(tmp_path), writer="a") as writer:
        writer.write(sample(0))
    record = (tmp_path / "writers" / "a.json").read_bytes()
    ss.commit_writers(str(tmp_path), ["a"])
    (tmp_path / "writers" / "a.json").write_bytes(record)  # as if the process had died before it removed the record
    with pytest.raises(ss.UsageError) as error:
        ss.commit_writers(str(tmp_path), ["a"], append=True)
    check(error, ss.UsageError, "writer 'a'", "already part of the dataset", "Delete writers/a.json")
    assert len(read(tmp_path)) == 1


def test_writers_whose_fields_differ(tmp_path):
    for name, value in (("a", 1), ("b", "one")):
        with ss.DatasetWriter(str(tmp_path), writer=name) as writer:
            writer.write({"x": value})
    with pytest.raises(ss.UsageError) as error:
        ss.commit_writers(str(tmp_path), ["a", "b"])
    check(error, ss.UsageError, "field 'x'", "int in writer 'a' and str in writer 'b'", "with one type")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65])
def test_a_writer_name_that_is_no_name(tmp_path, name):
    with pytest.raises(ss.UsageError) as error:
        ss.DatasetWriter(str(tmp_path), writer=name)
    check(error, ss.UsageError, "writer=", repr(name), "use 1 to 64 letters")


def test_sizes_that_make_no_sense(tmp_path):
    with pytest.raises(ss.UsageError) as error:
        ss.DatasetWriter(str(tmp_path), block_bytes=0)
    check(error, ss.UsageError, "block_bytes", "0", "from 1 to")


# ---------------------------------------------------------------------------------------------------- datasets and steps


def test_readers_that_do_not_divide_the_partitions(directory):
    with pytest.raises(ss.UsageError) as error:
        read(directory, partitions=16, topology=ss.Topology(0, 3))
    check(error, ss.UsageError, "partitions=16", "3 ranks x 1 workers", "pass partitions=48")


@pytest.mark.parametrize(
    ("options", "thing"),
    [({"shuffle_buffer": 0}, "shuffle_buffer=0"), ({"interleave": -1}, "interleave=-1"), ({"partitions": 0}, "partitions=0"),
     ({"snapshot": "full"}, "snapshot='full'"), ({"seed": "x"}, "seed='x'"), ({"prefetch_bytes": 1.5}, "prefetch_bytes=1.5")],
)  # fmt: skip
def test_options_that_make_no_sense(options, thing):
    with pytest.raises(ss.UsageError) as error:
        ss.StreamDataset("anywhere", **options)
    check(error, ss.UsageError, thing, "", "must be" if "snapshot" not in options else "choose 'cursor' or 'contents'")


def plain_function(item):
    return item


STEPS = {
    "a function": ((plain_function,), "step 0", "plain_function", "pass Map(plain_function)"),
    "a number": ((7,), "step 0", "7", "Map, Filter, FlatMap or Batch"),
    "a class": ((ss.Batch,), "step 0", "Batch", "not a step"),
    "noise after a batch": ((ss.Batch(2), ss.Map(plain_function, rng=True)), "step 1", "rng=True", "move it before Batch(2)"),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_cannot_work(name):
    steps, thing, value, cure = STEPS[name]
    with pytest.raises(ss.UsageError) as error:
        ss.StreamDataset("anywhere", *steps)
    check(error, ss.UsageError, thing, value, cure)


@pytest.mark.parametrize(
    ("make", "thing", "value"),
    [(lambda: ss.Map(3), "Map(...)", "3"), (lambda: ss.Filter(None), "Filter(...)", "None"), (lambda: ss.Batch(0), "Batch(0)", ">= 1"),
     (lambda: ss.FlatMap("x"), "FlatMap(...)", "'x'"), (lambda: ss.Map(len, batch=0), "Map(batch=0)", ">= 1"),
     (lambda: ss.Batch(2, ragged="cut"), "ragged='cut'", "'pad'"), (lambda: ss.Topology(3, 2), "rank=3", "size=2"),
     (lambda: ss.Topology(0, 0), "size=0", "rank must be")],
)  # fmt: skip
def test_steps_and_topologies_refused_at_construction(make, thing, value):
    with pytest.raises(ss.UsageError) as error:
        make()
    check(error, ss.UsageError, thing, value, "")


def test_a_filter_that_rejects_everything_under_repeat(directory):
    dataset = ss.StreamDataset(str(directory), ss.Filter(lambda item: False), repeat=True, partitions=4)
    with pytest.raises(ss.DataError) as error:
        next(iter(dataset))
    check(error, ss.DataError, "Filter(", "dropped all of the last", "Loosen the step, or use repeat=False")


def test_a_flat_map_without_outputs_under_repeat(directory):
    dataset = ss.StreamDataset(str(directory), ss.FlatMap(lambda item: []), repeat=True, partitions=4)
    with pytest.raises(ss.DataError, match="FlatMap.*Loosen"):
        next(iter(dataset))


def test_a_batched_map_that_changes_the_number(directory):
    dataset = ss.StreamDataset(str(directory), ss.Map(lambda items: items[1:], batch=4))
    with pytest.raises(ss.DataError) as error:
        next(iter(dataset))
    check(error, ss.DataError, "Map(", "got 4 items and returned 3 items", "use FlatMap")


def test_ragged_fields_and_other_fields_in_one_batch(directory):
    with pytest.raises(ss.DataError) as error:
        next(iter(ss.StreamDataset(str(directory), ss.Batch(7))))
    check(error, ss.DataError, "field 'tokens'", "shapes (", "ragged='pad'")
    drop = ss.Map(lambda item: {k: v for k, v in item.items() if k != "id" or v % 2})
    with pytest.raises(ss.DataError) as error:
        next(iter(ss.StreamDataset(str(directory), drop, ss.Batch(7, ragged="list"))))
    check(error, ss.DataError, "item", "fields", "add a Map that fills or removes")


# --------------------------------------------------------------------------------------------------------------- states


def state_of(directory, count=3, **options):
    dataset = ss.StreamDataset(str(directory), **{"partitions": 4, **options})
    iterator = iter(dataset)
    for _ in range(count):
        next(iterator)
    return dataset.state_dict()


def test_a_state_of_another_dataset(tmp_path, directory):
    other = write_dataset(tmp_path / "other", 90)
    with pytest.raises(ss.StateError) as error:
        ss.StreamDataset(other, partitions=4).load_state_dict(state_of(directory))
    version = ss.open_manifest(str(directory)).version
    check(error, ss.StateError, "dataset=", version, "allow={'dataset'}")


@pytest.mark.parametrize(
    ("options", "thing", "value", "cure"),
    [({"seed": 9}, "seed=0", "seed=9", "pass seed=0"), ({"partitions": 8}, "partitions=4", "partitions=8", "pass partitions=4"),
     ({"shuffle": False}, "interleave=2", "interleave=1", "interleave=2"), ({"shuffle_buffer": 3}, "shuffle_buffer=512", "=3", "pass shuffle_buffer=512"),
     ({"repeat": True}, "repeat=False", "repeat=True", "pass repeat=False")],
)  # fmt: skip
def test_a_state_of_other_settings(directory, options, thing, value, cure):
    with pytest.raises(ss.StateError) as error:
        ss.StreamDataset(str(directory), **{"partitions": 4, **options}).load_state_dict(state_of(directory))
    check(error, ss.StateError, thing, value, cure)


def test_a_state_of_other_steps(directory):
    dataset = ss.StreamDataset(str(directory), ss.Filter(plain_function), partitions=4)
    with pytest.raises(ss.StateError) as error:
        dataset.load_state_dict(state_of(directory))
    check(error, ss.StateError, "steps=[]", "plain_function", "allow={'steps'}")


def test_a_state_of_another_scope(directory):
    state = state_of(directory, topology=ss.Topology(1, 2))
    dataset = ss.StreamDataset(str(directory), partitions=4, topology=ss.Topology(0, 2))
    dataset.load_state_dict(state)
    with pytest.raises(ss.StateError) as error:
        next(iter(dataset))
    check(error, ss.StateError, "rank 1/2", "rank 0/2", "merge_states(states)")
    with pytest.raises(ss.StateError):  # and not, at the second try, an epoch from its beginning
        next(iter(dataset))


@pytest.mark.parametrize("state", [None, {}, [], {"model": 1}, {"format": 99}])
def test_something_that_is_no_state(directory, state):
    with pytest.raises(ss.StateError) as error:
        ss.StreamDataset(str(directory)).load_state_dict(state)
    check(error, ss.StateError, "state", "99" if state == {"format": 99} else "no state", "")


def test_a_damaged_state(directory):
    state = state_of(directory) | {"partitions": {"0": "[1"}}
    with pytest.raises(ss.StateError) as error:
        ss.StreamDataset(str(directory), partitions=4).load_state_dict(state)
    check(error, ss.StateError, "damaged", "JSONDecodeError", "an earlier checkpoint")


def test_an_unknown_permission(directory):
    with pytest.raises(ss.UsageError) as error:
        ss.StreamDataset(str(directory), partitions=4).load_state_dict(state_of(directory), allow={"seed"})
    check(error, ss.UsageError, "allow='seed'", "unknown", "'batch', 'dataset', 'mixture', 'steps'")


def test_states_that_do_not_merge(directory):
    states = [state_of(directory, topology=ss.Topology(rank, 2)) for rank in range(2)]
    later = state_of(directory, count=5, topology=ss.Topology(0, 2))
    with pytest.raises(ss.StateError) as error:
        ss.merge_states(states[:1])
    check(error, ss.StateError, "partitions [1, 3] of 4", "1 states", "all ranks and workers")
    with pytest.raises(ss.StateError) as error:
        ss.merge_states([*states, later])
    check(error, ss.StateError, "partition 0", "state 2 (rank 0/2)", "one save only")
    with pytest.raises(ss.StateError) as error:
        ss.merge_states([states[0], state_of(directory, seed=4, topology=ss.Topology(1, 2))])
    check(error, ss.StateError, "seed=0", "seed=4", "pass seed=0")
    fresh = [ss.StreamDataset(str(directory), partitions=4, topology=ss.Topology(r, 2)).state_dict() for r in range(2)]
    assert ss.merge_states(fresh)["scope"] == "full"
    with pytest.raises(ss.StateError) as error:
        ss.merge_states([states[0], fresh[1]])
    check(error, ss.StateError, "states [1]", "before their first item", "save when all have given something")
    with pytest.raises(ss.StateError, match="got no state"):
        ss.merge_states([])


def test_a_version_file_that_holds_another_version(tmp_path, directory):
    old = ss.open_manifest(str(directory)).version
    state = state_of(directory)
    with ss.DatasetWriter(str(directory), append=True) as writer:
        writer.write(sample(100))
    (directory / "manifests" / f"{old}.json").write_bytes((directory / "manifest.json").read_bytes())
    dataset = ss.StreamDataset(str(directory), partitions=4)
    dataset.load_state_dict(state, allow={"dataset"})
    with pytest.raises(ss.DataError) as error:
        next(iter(dataset))
    check(error, ss.DataError, old, ss.open_manifest(str(directory)).version, "restore the file")


def test_an_epoch_that_contradicts_the_loaded_state(directory):
    dataset = ss.StreamDataset(str(directory), partitions=4)
    dataset.load_state_dict(state_of(directory))
    dataset.set_epoch(0)
    with pytest.raises(ss.UsageError) as error:
        dataset.set_epoch(3)
    check(error, ss.UsageError, "set_epoch(3)", "epoch 0", "iterate first")
    with pytest.raises(ss.UsageError, match="an epoch is an int >= 0"):
        ss.StreamDataset(str(directory)).set_epoch(-1)


def test_the_state_of_the_dataset_while_workers_read(directory):
    dataset = ss.StreamDataset(str(directory), ss.Map(lambda item: item["id"]))
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ss.UsageError) as error:
        dataset.state_dict()
    check(error, ss.UsageError, "dataset.state_dict() in the main process", "worker processes", "StatefulDataLoader")
    del iterator


def test_errors_survive_the_way_out_of_a_worker(directory):
    shutil.rmtree(directory / "shards")
    loader = torch.utils.data.DataLoader(ss.StreamDataset(str(directory)), batch_size=None, num_workers=1)
    with pytest.raises(ss.StorageError, match=r"(?s)shard \d.*check the path"):
        next(iter(loader))


def test_the_manifest_decoder_names_where_it_read():
    with pytest.raises(ss.DataError, match="s3://bucket/manifest.json is not valid JSON"):
        decode_manifest(b"\xff", where="s3://bucket/manifest.json")
