"""The data that the benchmarks read: made here, the same on every machine, kept in a scratch directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import zstandard

import streamshard as ss

SCRATCH = Path(os.environ.get("STREAMSHARD_BENCH", "/tmp/streamshard-bench"))  # noqa: S108  (a scratch directory)


def token_documents(count: int, seed: int = 0, mean: float = 800.0) -> Iterator[dict]:
    """Documents of lognormal length (mean as given, sigma 1) of uint16 tokens, Zipf 1.1 over 50,000 permuted ids."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(50_000).astype(np.uint16)
    weights = 1.0 / np.arange(1, 50_001) ** 1.1
    cumulative = np.cumsum(weights / weights.sum())
    lengths = np.maximum(1, rng.lognormal(np.log(mean) - 0.5, 1.0, count).astype(np.int64))
    for start in range(0, count, 1000):
        chunk = lengths[start : start + 1000]
        ranks = np.minimum(np.searchsorted(cumulative, rng.random(int(chunk.sum()))), 49_999)
        tokens = np.split(ids[ranks], np.cumsum(chunk)[:-1])
        yield from ({"id": f"doc-{start + i}", "tokens": t} for i, t in enumerate(tokens))


def token_dataset(count: int, *, where: str = "tokens", **options: object) -> str:
    """The directory of a token dataset of `count` documents, written on first use."""
    directory = SCRATCH / f"{where}-{count}"
    if not (directory / "manifest.json").exists():
        shutil.rmtree(directory, ignore_errors=True)
        with ss.DatasetWriter(str(directory), length_field="tokens", **options) as writer:  # type: ignore[arg-type]
            for document in token_documents(count):
                writer.write(document)
    return str(directory)


def images(count: int, seed: int = 0) -> Iterator[dict]:
    """Incompressible records of 110 KB, as JPEGs are."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        yield {"id": f"image-{number}", "image": rng.bytes(110_000), "label": number % 1000}


def plain_copy(directory: str) -> list[str]:
    """The same shards' samples as plain .msgpack.zst: one frame a shard, tokens as bytes, for the baseline."""
    plain = Path(directory + "-plain")
    if not (plain / "done").exists():
        shutil.rmtree(plain, ignore_errors=True)
        plain.mkdir(parents=True)
        manifest = ss.open_manifest(directory)
        for shard in range(len(manifest)):
            data = (Path(directory) / manifest.key(shard)).read_bytes()
            content = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
            unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=len(content))
            unpacker.feed(content)
            packed = b"".join(msgpack.packb({**s, "tokens": s["tokens"].data[8:]}) for s in unpacker)
            frame = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(packed)
            (plain / f"{shard:06d}.msgpack.zst").write_bytes(frame)
        (plain / "done").touch()
    return sorted(str(path) for path in plain.glob("*.zst"))
