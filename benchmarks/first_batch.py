"""Bytes requested and time until the first batch of 32 from a cold 1 GB token dataset on S3, at defaults.

``python -m benchmarks.first_batch``; the S3 server is the embedded one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import streamshard as ss
from benchmarks.corpora import token_documents
from benchmarks.report import save
from streamshard.testing.servers import s3_server

DOCUMENTS = 625_000  # 1 GB of tokens


def strip(sample: dict) -> dict:
    return {"tokens": sample["tokens"]}


def measure(url: str, options: dict) -> dict:
    start = time.perf_counter()
    dataset = ss.StreamDataset(url, ss.Map(strip), ss.Batch(32, ragged="list"), storage_options=options)
    iterator = iter(dataset)
    next(iterator)
    seconds = time.perf_counter() - start
    access = dataset._iteration.runs[0].source._book.epoch(0)[1]  # noqa: SLF001  (what was asked for, not what has arrived)
    result = {"seconds": seconds, "megabytes": access.requested_bytes / 1e6, "requests": access.requests}
    iterator.close()
    return result


def main() -> dict:
    with tempfile.TemporaryDirectory() as directory, s3_server(Path(directory)) as server:
        url = server.make_bucket("first-batch") + "/tokens"
        with ss.DatasetWriter(url, length_field="tokens", storage_options=server.storage_options) as writer:
            for document in token_documents(DOCUMENTS):
                writer.write(document)
        size = ss.open_manifest(url, storage_options=server.storage_options).total_bytes
        runs = [measure(url, server.storage_options) for _ in range(5)]
    result = {
        "megabytes": max(run["megabytes"] for run in runs),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "dataset_megabytes": size / 1e6,
        "runs": runs,
    }
    print(f"first batch of 32 from {size / 1e6:.0f} MB on S3: {result['megabytes']:.1f} MB requested, "
          f"{result['seconds']:.2f} s, {runs[0]['requests']} requests for data")  # fmt: skip
    return save("first_batch", result)


if __name__ == "__main__":
    main()
