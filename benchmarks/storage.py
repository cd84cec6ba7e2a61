"""The storage engine against bare requests: ``python -m benchmarks.storage`` and any of the parts below, or all of them.

throughput: end-to-end bytes/s from the embedded S3 server beside bare ranged GETs with the same library, range size (8 MiB)
    and concurrency (8), which for tokens also decompress and unpack every block as it arrives. Both transports. CPU time is
    that of this process.
latency: the same with 50 ms added to every request, beside none. shards: 12 shards behind 0.3 s each, four in flight.
memory: peak resident memory beyond budget and samples. requests: ranged GETs per GB.

Sides alternate in one run; medians. The last three use the scripted server of `streamshard.testing`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import msgpack
import obstore
import s3fs
import zstandard
from obstore.store import S3Store

import streamshard as ss
from benchmarks.corpora import images, token_dataset, token_documents
from benchmarks.report import save
from streamshard.catalog import load_manifest
from streamshard.prefetch.access import ShardAccess
from streamshard.storage.open import open_store
from streamshard.testing.faults import FaultServer, fault_server
from streamshard.testing.servers import S3Server, s3_server

RANGE, CONCURRENT = 8 << 20, 8
FIXED = ss.StoragePolicy(limit_start=CONCURRENT, limit_max=CONCURRENT)
TRANSPORTS = ("obstore", "fsspec")


def bare_get(transport: str, server: S3Server) -> Callable[[str, int, int], memoryview]:
    """One ranged GET by the library itself."""
    if transport == "fsspec":
        filesystem = s3fs.S3FileSystem(
            **server.storage_options, config_kwargs={"max_pool_connections": CONCURRENT}, skip_instance_cache=True
        )
        return lambda path, start, stop: memoryview(filesystem.cat_file(path, start=start, end=stop))
    store = S3Store(
        "bench", endpoint=server.endpoint, access_key_id=server.access_key, secret_access_key=server.secret_key,
        region="us-east-1", virtual_hosted_style_request=False, client_options={"allow_http": True},
    )  # fmt: skip
    return lambda path, start, stop: memoryview(
        obstore.get_range(store, path.removeprefix("bench/"), start=start, end=stop)
    )


def bare(get: Callable[[str, int, int], memoryview], access: ShardAccess, prefix: str, *, decode: bool) -> int:
    """Every block of a dataset through bare GETs, in order, `CONCURRENT` at a time; returns bytes."""
    manifest, total = access.manifest, 0
    parts: deque = deque()
    decompressor = zstandard.ZstdDecompressor()

    def consume() -> int:
        shard, start, future = parts.popleft()
        data = future.result()
        if decode:
            index = access.known_index(shard)
            for block, offset in enumerate(index.offsets[:-1].tolist()):
                end = int(index.offsets[block + 1])
                if start <= offset and end <= start + len(data):
                    plain = decompressor.decompress(data[offset - start : end - start])
                    prefix = b"\xdd" + int(index.samples[block]).to_bytes(4, "big")
                    msgpack.unpackb(prefix + plain, strict_map_key=False)
        return len(data)

    with ThreadPoolExecutor(CONCURRENT) as pool:
        for shard in range(len(manifest)):
            path, size = f"{prefix}/{manifest.key(shard)}", int(manifest.bytes[shard])
            for start, stop in ranges(access, shard, size):
                parts.append((shard, start, pool.submit(get, path, start, stop)))
                if len(parts) > 2 * CONCURRENT:
                    total += consume()
        while parts:
            total += consume()
    return total


def ranges(access: ShardAccess, shard: int, size: int) -> Iterator[tuple[int, int]]:
    """A shard cut into ranges of whole blocks, 8 MiB at most."""
    start, end = 0, 0
    for offset in [*access.index(shard).offsets.tolist(), size]:
        if offset - start > RANGE:
            yield start, end
            start = end
        end = offset
    yield start, size


def timed(work: Callable[[], int]) -> dict:
    wall, cpu = time.perf_counter(), time.process_time()
    count = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"mb_per_s": count / wall / 1e6, "cpu_s_per_gb": cpu / count * 1e9}


def opened(url: str, options: dict, transport: str, **settings: object) -> ss.StreamDataset:
    """A dataset whose client is connected and whose manifest is read: that is not what is measured."""
    dataset = ss.StreamDataset(
        url, storage_options=options, transport=transport, **{"partitions": 1, "storage_policy": FIXED, **settings}
    )
    assert dataset.manifest
    return dataset


def epoch(dataset: ss.StreamDataset) -> int:
    """A whole epoch; returns the bytes of its shards."""
    for _ in dataset:
        pass
    return dataset.manifest.total_bytes


@contextmanager
def corpora_on_s3() -> Iterator[tuple[S3Server, dict[str, str]]]:
    with tempfile.TemporaryDirectory() as directory, s3_server(Path(directory)) as server:
        url = server.make_bucket("bench")
        options = server.storage_options
        with ss.DatasetWriter(f"{url}/tokens", storage_options=options) as writer:
            for document in token_documents(300_000):
                writer.write(document)
        with ss.DatasetWriter(f"{url}/images", storage_options=options) as writer:
            for image in images(5000):
                writer.write(image)
        yield server, {"tokens": f"{url}/tokens", "images": f"{url}/images"}


def throughput(rounds: int) -> dict:
    result: dict = {}
    with corpora_on_s3() as (server, urls):
        for corpus, url in urls.items():
            store = open_store(url, server.storage_options)
            access = ShardAccess(store, load_manifest(store))
            for transport in TRANSPORTS:
                get, where = bare_get(transport, server), f"bench/{corpus}"
                dataset = opened(url, server.storage_options, transport)
                sides = {
                    "bare": lambda get=get, access=access, where=where, corpus=corpus: bare(
                        get, access, where, decode=corpus == "tokens"
                    ),
                    "streamed": lambda dataset=dataset: epoch(dataset),
                }
                runs = [{name: timed(work) for name, work in sides.items()} for _ in range(rounds + 1)][1:]
                ratio = statistics.median(run["streamed"]["mb_per_s"] / run["bare"]["mb_per_s"] for run in runs)
                cpu = {side: statistics.median(run[side]["cpu_s_per_gb"] for run in runs) for side in sides}
                speed = {side: statistics.median(run[side]["mb_per_s"] for run in runs) for side in sides}
                result[f"{corpus}, {transport}"] = {
                    "ratio": ratio,
                    "cpu_s_per_gb": cpu,
                    "mb_per_s": speed,
                    "runs": runs,
                }
                print(
                    f"{corpus}, {transport}: {speed['streamed']:.0f} MB/s, {ratio:.2f} x bare ({speed['bare']:.0f} MB/s); "
                    f"CPU s/GB {cpu['streamed']:.2f}, bare {cpu['bare']:.2f}",
                    flush=True,
                )
    return result


def upload(server: FaultServer, directory: str, name: str) -> None:
    """A dataset of a directory onto the scripted server."""
    for path in Path(directory).rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            server.put(f"bench/{name}/{path.relative_to(directory)}", path.read_bytes())


def latency(rounds: int) -> dict:
    directory, result = token_dataset(100_000), {}
    with fault_server() as server:
        upload(server, directory, "tokens")
        for transport in TRANSPORTS:
            for partitions in (1, 16):
                dataset = opened(
                    "s3://bench/tokens", server.storage_options, transport, partitions=partitions, storage_policy=None
                )
                runs = []
                for _ in range(rounds + 1):
                    run = {}
                    for name, delay in (("none", 0.0), ("50 ms", 0.05)):
                        server.rules(delay=delay)
                        run[name] = timed(lambda dataset=dataset: epoch(dataset))
                    runs.append(run)
                ratio = statistics.median(run["50 ms"]["mb_per_s"] / run["none"]["mb_per_s"] for run in runs[1:])
                result[f"{transport}, P={partitions}"] = {"ratio": ratio, "runs": runs[1:]}
                print(f"50 ms more a request, {transport}, P={partitions}: {ratio:.2f} x the throughput", flush=True)
    return result


def shards(rounds: int) -> dict:
    """The manifest is open when the clock starts."""
    result = {}
    with tempfile.TemporaryDirectory() as directory, fault_server() as server:
        with ss.DatasetWriter(directory, shard_bytes=300_000) as writer:
            for document in islice(token_documents(4000), 3700):
                writer.write(document)
        count = len(ss.open_manifest(directory))
        upload(server, directory, "twelve")
        for transport in TRANSPORTS:
            policy, times = ss.StoragePolicy(limit_start=4, limit_max=4), []
            for _ in range(rounds):
                server.rules()
                dataset = opened("s3://bench/twelve", server.storage_options, transport, storage_policy=policy)
                server.rules(delay=0.3)
                began = time.perf_counter()
                assert sum(1 for _ in dataset)
                times.append(time.perf_counter() - began)
            result[transport] = {"seconds": statistics.median(times), "shards": count, "runs": times}
            print(f"{count} shards behind 0.3 s each, 4 in flight, {transport}: {result[transport]['seconds']:.2f} s")
    return result


MEASURE = """
import json, sys, threading, time
import streamshard as ss, zstandard, s3fs, obstore
url, options, transport, budget, partitions = json.loads(sys.argv[1])
page = 4096
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * page
before = resident()
dataset = ss.StreamDataset(url, storage_options=options, transport=transport, prefetch_bytes=budget,
                           partitions=partitions, shuffle_buffer=8192 // partitions)
peak, over = 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.002):
        peak = max(peak, resident())
thread = threading.Thread(target=watch, daemon=True)
thread.start()
rows = 0
for sample in dataset:
    rows += 1
lookahead = dataset.storage_counters().lookahead_peak
over.set()
print(json.dumps({"peak": peak - before, "lookahead": lookahead, "rows": rows}))
"""


def memory(rounds: int) -> dict:
    """A process for each measurement. Resident samples by their bound: P x (buffer + 2 x interleave x rows of a block)."""
    directory, result = token_dataset(200_000), {}
    manifest = ss.open_manifest(directory)
    index = ShardAccess(open_store(directory), manifest).index(0)
    plain = int(index.uncompressed.sum()) / index.rows
    with fault_server() as server:
        upload(server, directory, "tokens")
        for transport in TRANSPORTS:
            for budget in (64, 128, 512):
                for partitions in (1, 16):
                    bound = partitions * (8192 // partitions + 2 * 2 * int(index.samples.max()))
                    resident = bound * (plain + 350)  # a dict, a str and an array header in Python beside the data
                    peaks = [measured(server, transport, budget << 20, partitions) for _ in range(max(1, rounds // 2))]
                    peak = max(run["peak"] for run in peaks)
                    beyond = (peak - (budget << 20) - resident) / 1e6
                    name = f"{transport}, budget {budget} MB, P={partitions}"
                    result[name] = {"beyond_mb": beyond, "resident_bound_mb": resident / 1e6, "runs": peaks}
                    print(
                        f"{name}: peak {peak / 1e6:.0f} MB, look-ahead {peaks[0]['lookahead'] / 1e6:.0f} MB, samples at "
                        f"most {resident / 1e6:.0f} MB, beyond both {beyond:.0f} MB",
                        flush=True,
                    )
    return result


def measured(server: FaultServer, transport: str, budget: int, partitions: int) -> dict:
    arguments = json.dumps(["s3://bench/tokens", server.storage_options, transport, budget, partitions])
    command = [sys.executable, "-c", MEASURE, arguments]
    found: dict = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def requests(rounds: int) -> dict:  # noqa: ARG001  (counted, not timed)
    directory, result = token_dataset(200_000), {}
    size = ss.open_manifest(directory).total_bytes
    with fault_server() as server:
        upload(server, directory, "tokens")
        for name, settings in {
            "one partition, interleave 1, 512 MB": {"interleave": 1, "prefetch_bytes": 512 << 20},
            "defaults": {"partitions": None},
        }.items():
            server.clear()
            epoch(opened("s3://bench/tokens", server.storage_options, "obstore", storage_policy=None, **settings))
            count = sum("shards/" in entry["key"] for entry in server.gets())
            per_gb = count / size * 1e9
            result[name] = {"requests_per_gb": per_gb, "of_ideal": per_gb / (1e9 / RANGE)}
            print(f"requests per GB, {name}: {per_gb:.0f}, {per_gb / (1e9 / RANGE):.2f} x (1 GB / 8 MiB)")
    return result


PARTS = {"throughput": throughput, "latency": latency, "shards": shards, "memory": memory, "requests": requests}


def main(names: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(names)
    results = {}
    for name in args.parts or PARTS:
        results[name] = save(f"storage-{name}", PARTS[name](args.rounds))
    return results


if __name__ == "__main__":
    main()
