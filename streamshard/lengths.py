"""Sums of the lengths that the writer noted for each row, from manifests and indexes, without reading samples."""

from __future__ import annotations

import numpy as np

from streamshard.errors import UsageError
from streamshard.order.partition import PartitionOrder
from streamshard.order.shuffle import ShuffleBuffer
from streamshard.prefetch.access import ShardAccess


def emitted_length(partition: PartitionOrder, emitted: int, access: ShardAccess) -> int:
    """Sum of the lengths of the first `emitted` samples of a partition-epoch: all that was read, but for what is buffered.

    Reads the indexes of shards in which the partition begins, ends or is. Raises `UsageError` for a dataset without lengths.
    """
    if access.manifest.length_field is None:
        raise UsageError(
            "the dataset was written without length_field=, so how many tokens its samples have is not known"
        )
    buffer = ShuffleBuffer(partition)
    moment = min(emitted, buffer.drain_from)
    total = 0
    for stripe, done in enumerate(partition.progress(buffer.reads_before(moment))):
        start = partition.stripe_starts[stripe]
        for shard, first, last in partition.epoch.segments(start, start + done):
            total += _length(access, shard, first, last)
    reads = buffer.contents(emitted)
    shards, rows = partition.refs(reads[reads >= 0])
    for shard in np.unique(shards).tolist():
        lengths = access.index(shard).lengths
        assert lengths is not None  # the manifest has a length field
        total -= int(lengths[rows[shards == shard]].sum(dtype=np.int64))
    return total


def _length(access: ShardAccess, shard: int, first: int, last: int) -> int:
    if first == 0 and last == int(access.manifest.samples[shard]):
        return int(access.manifest.lengths[shard])
    lengths = access.index(shard).lengths
    assert lengths is not None  # the manifest has a length field
    return int(lengths[first:last].sum(dtype=np.int64))
