"""The format is what docs/format.md says, for tools that have never heard of us."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import ormsgpack
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import streamshard as ss
from streamshard.errors import DataError, UsageError
from streamshard.shard import records
from streamshard.shard.layout import decode_index
from tests.conftest import sample, write_dataset

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
arrays = npst.arrays(st.sampled_from(records.DTYPES), npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


@given(st.dictionaries(st.text(), values, max_size=6))
@settings(max_examples=200, deadline=None)
def test_samples_come_back_as_they_went_in(item):
    assert records.unpack(records.pack_sample(item)) == item


@given(arrays)
@settings(max_examples=300, deadline=None)
def test_arrays_come_back_with_dtype_shape_and_bytes(array):
    back = records.unpack(records.pack({"a": array, "inside": [array]}))
    for found in (back["a"], back["inside"][0]):
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()


@given(st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_garbage_is_a_data_error_and_nothing_else(data):
    for read in (records.unpack, records.unpack_array):
        try:
            read(data)
        except DataError:
            pass


def test_big_endian_and_strided_arrays_are_stored_by_value():
    array = np.arange(24, dtype=">i4").reshape(4, 6)[::2, ::-3]
    back = records.unpack(records.pack(array))
    assert back.tolist() == array.tolist()
    assert back.dtype == np.dtype("int32")


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["text"]), np.zeros(2, "datetime64[s]"),
                                   np.zeros(2, [("a", "i4")])])  # fmt: skip
def test_arrays_that_would_need_pickle_are_refused(array):
    with pytest.raises(UsageError, match="cannot be stored; convert it to one of bool, uint8"):
        records.pack(array)


def test_decoded_arrays_are_read_only_views():
    back = records.unpack(records.pack(np.arange(5)))
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 7


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """(magic, content) of each frame of a shard, read with struct and another zstd library."""
    found, at = [], 0
    while at < len(data):
        (magic,) = struct.unpack_from("<I", data, at)
        if magic & 0xFFFFFFF0 == 0x184D2A50:
            (size,) = struct.unpack_from("<I", data, at + 4)
            found.append((magic, data[at + 8 : at + 8 + size]))
            at += 8 + size
        else:
            size = zstd.get_frame_size(data[at:])
            found.append((magic, zstd.decompress(data[at : at + size])))
            at += size
    return found


def shards(directory: str) -> list[bytes]:
    manifest = ss.open_manifest(directory)
    return [(Path(directory) / manifest.key(shard)).read_bytes() for shard in range(len(manifest))]


def test_a_plain_zstd_tool_and_a_plain_msgpack_decoder_read_a_shard(dataset_203):
    """backports.zstd and ormsgpack: neither is used by the package."""
    got = []
    for data in shards(dataset_203):
        content = zstd.decompress(data)  # all frames, skippable ones passed over
        for _, block in frames(data)[1:-1]:
            assert block in content
        at = 0
        while at < len(content):
            size = next(n for n in range(1, len(content)) if _decodes(content[at : at + n]))
            got.append(ormsgpack.unpackb(content[at : at + size], ext_hook=_array))
            at += size
    assert [item["id"] for item in got] == list(range(203))
    assert [item["tokens"] for item in got] == [sample(number)["tokens"].tolist() for number in range(203)]


def _array(code, data):
    """An array by docs/format.md: dtype code, ndim, zero, dimensions, padding to 8, little-endian data."""
    assert (code, data[0], data[1]) == (1, 2, 1)
    (length,) = struct.unpack_from("<I", data, 4)
    return list(struct.unpack_from(f"<{length}H", data, 8))


def _decodes(data):
    try:
        ormsgpack.unpackb(data, ext_hook=_array)
    except ValueError:
        return False
    return True


def test_the_seek_table_is_the_standard_one(dataset_203):
    for data in shards(dataset_203):
        magic, table = frames(data)[-1]
        assert magic == 0x184D2A5E
        count, descriptor, seekable = struct.unpack("<IBI", table[-9:])
        assert (descriptor, seekable) == (0, 0x8F92EAB1)
        entries = list(struct.iter_unpack("<II", table[:-9]))
        assert len(entries) == count
        assert sum(compressed for compressed, _ in entries) + len(table) + 8 == len(data)
        assert entries[0][1] == 0
        assert [plain for _, plain in entries[1:]] == [len(content) for _, content in frames(data)[1:-1]]


def test_every_block_has_a_content_size_and_a_checksum(dataset_203):
    for data in shards(dataset_203):
        at = 0
        for magic, content in frames(data):
            if magic == 0xFD2FB528:
                info = zstd.get_frame_info(data[at:])
                assert info.decompressed_size == len(content)
                assert data[at + 4] & 0b100  # Frame_Header_Descriptor: Content_Checksum_flag
                at += zstd.get_frame_size(data[at:])
            else:
                at += 8 + len(content)


def test_row_lengths_are_in_the_index_and_their_sum_in_the_manifest(tmp_path):
    directory = write_dataset(tmp_path / "ds", 100, length_field="tokens")
    manifest = ss.open_manifest(directory)
    lengths = []
    for shard, data in enumerate(shards(directory)):
        size = int(manifest.index_bytes[shard])
        index = decode_index(data[:size], size=size, digest=int(manifest.index_digests[shard]),
                             samples=int(manifest.samples[shard]))  # fmt: skip
        lengths += index.lengths.tolist()
    assert lengths == [len(sample(number)["tokens"]) for number in range(100)]
    assert manifest.total_length == sum(lengths)


def test_the_same_data_has_the_same_version_and_other_data_another(tmp_path):
    first = ss.open_manifest(write_dataset(tmp_path / "a", 50))
    second = ss.open_manifest(write_dataset(tmp_path / "b", 50))
    other = ss.open_manifest(write_dataset(tmp_path / "c", 51))
    assert first.version == second.version != other.version


def test_every_version_stays_readable(tmp_path):
    directory = write_dataset(tmp_path / "ds", 50)
    version = ss.open_manifest(directory).version
    with ss.DatasetWriter(directory, append=True) as writer:
        writer.write(sample(50))
    kept = json.loads((tmp_path / "ds" / "manifests" / f"{version}.json").read_text())
    assert kept["totals"]["samples"] == 50
    assert ss.open_manifest(directory).total_samples == 51
