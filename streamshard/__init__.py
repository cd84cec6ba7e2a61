"""streamshard: exact, elastic streaming of training data from object storage into PyTorch."""

from streamshard.catalog import open_manifest
from streamshard.dataset import StreamDataset
from streamshard.distributed.gather import GatheredState, gather_state
from streamshard.distributed.replicas import verify_replicas
from streamshard.distributed.sharded import ShardedState
from streamshard.distributed.topology import Topology
from streamshard.errors import (
    CorruptError,
    DataError,
    StateError,
    StorageError,
    StreamshardError,
    UsageError,
    WorkerError,
)
from streamshard.frameworks.track import TrackedLoader, track
from streamshard.loader import StreamLoader, broadcast_batches
from streamshard.map_dataset import MapDataset
from streamshard.order.cursor import Ref
from streamshard.sources import Mixture, Source
from streamshard.state import merge_states
from streamshard.steps.batch import Batch
from streamshard.steps.bucket import BucketBatch
from streamshard.steps.contract import Segment
from streamshard.steps.counts import Counts, SourceCounts, SourceProgress
from streamshard.steps.filter import Filter
from streamshard.steps.flat_map import FlatMap
from streamshard.steps.map import Map
from streamshard.steps.pack import Pack
from streamshard.steps.tensors import collate
from streamshard.storage.policy import StoragePolicy
from streamshard.writer import DatasetWriter, WriterProgress, commit_writers

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BucketBatch",
    "CorruptError",
    "Counts",
    "DataError",
    "DatasetWriter",
    "Filter",
    "FlatMap",
    "GatheredState",
    "Map",
    "MapDataset",
    "Mixture",
    "Pack",
    "Ref",
    "Segment",
    "ShardedState",
    "Source",
    "SourceCounts",
    "SourceProgress",
    "StateError",
    "StorageError",
    "StoragePolicy",
    "StreamDataset",
    "StreamLoader",
    "StreamshardError",
    "Topology",
    "TrackedLoader",
    "UsageError",
    "WorkerError",
    "WriterProgress",
    "broadcast_batches",
    "collate",
    "commit_writers",
    "gather_state",
    "merge_states",
    "open_manifest",
    "track",
    "verify_replicas",
]
