"""Alternates the runs of all contenders and keeps the raw figures: ``python -m benchmarks.peers``, in the environment
of ``make bench``.

Every round runs each contender once in each case (corpus, place, workers), each time in a process of its own; the
order of the contenders turns from round to round. Figures and ratios are medians over rounds. Cold means: nothing in
a cache directory, a new process, new connections; the operating system's page cache is warm for all alike. Resuming is
timed without workers, from states saved in the middle of the epoch before the first round.

``--check`` reads everything once and compares each sample with what was written, instead of timing.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import psutil

from benchmarks.corpora import SCRATCH
from benchmarks.peers.contender import BATCH
from benchmarks.peers.corpora import CORPORA
from benchmarks.peers.place import BUCKET, Place
from benchmarks.report import RESULTS
from streamshard.testing.servers import S3Server, s3_server

CONTENDERS = (
    "ours",
    "ours_defaults",
    "reader",
    "peer_litdata",
    "peer_streaming",
    "peer_webdataset",
    "peer_datasets",
    "peer_grain",
    "peer_squirrel",
)
TIMEOUT_S = 600
SERVER_RANGES = (None, 8, 1)  # MB; None: whole objects


def run(**asked: object) -> dict:
    """One measurement; {"error": ...} if it fails."""
    command = [sys.executable, "-m", "benchmarks.peers.measure", json.dumps(asked)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = [0]
    watch = threading.Thread(target=_watch, args=(process.pid, peak))
    watch.start()
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return {"error": f"not done in {TIMEOUT_S} s: {err[-300:]}"}
    finally:
        watch.join()
    answer = out.rpartition("\n{")[1:]  # the last line; a library that crashes at exit, with it given, has answered
    if not answer[0]:
        return {"error": err[-600:]}
    return {**json.loads("".join(answer)), "peak_rss": peak[0]}


def _watch(pid: int, peak: list[int]) -> None:
    """The largest sum of resident memory of a process and its descendants; pages that forks share count in each."""
    while True:
        try:
            parent = psutil.Process(pid)
            if parent.status() == psutil.STATUS_ZOMBIE:
                return
            rss = sum(_rss(process) for process in (parent, *parent.children(recursive=True)))
        except psutil.NoSuchProcess:
            return
        peak[0] = max(peak[0], rss)
        time.sleep(0.05)


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


class Bench:
    """The places of every contender's corpora, and the runs over them."""

    def __init__(self, args: argparse.Namespace, server: S3Server, folder: Path) -> None:
        self.args = args
        self.server = server
        self.folder = folder
        self.states: dict[tuple[str, str, str], dict] = {}
        self.contenders = {name: importlib.import_module(f"benchmarks.peers.{name}") for name in args.contenders}

    def count(self, corpus: str) -> int:
        return max(64, int(CORPORA[corpus].count * self.args.scale))

    def directory(self, contender: str, corpus: str) -> Path:
        data = self.contenders[contender].DATA
        return SCRATCH / "peers" / f"{data}-{corpus}-{self.count(corpus)}"

    def place(self, contender: str, corpus: str, where: str, cache: str = "") -> Place:
        if where == "local":
            return Place(str(self.directory(contender, corpus)), cache)
        url = f"s3://{BUCKET}/{self.contenders[contender].DATA}/{corpus}"
        return Place(url, cache, self.server.endpoint, self.server.access_key, self.server.secret_key)

    def prepare(self) -> None:
        """Write what is not there, and upload all of it."""
        owners = [name for name, module in self.contenders.items() if name == module.DATA]
        for contender, corpus in itertools.product(owners, self.args.corpora):
            directory = self.directory(contender, corpus)
            done = directory.with_suffix(".done")
            if not done.exists():
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(parents=True)
                place = asdict(self.place(contender, corpus, "local"))
                found = run(kind="write", contender=contender, corpus=corpus, place=place, count=self.count(corpus))
                if "error" in found:
                    raise SystemExit(f"{contender} could not write {corpus}: {found['error']}")
                done.touch()
            if "s3" in self.args.places and self.contenders[contender].REMOTE:
                self.place(contender, corpus, "s3").upload(directory)

    @contextmanager
    def cold(self, contender: str, corpus: str, where: str) -> Iterator[Place]:
        """The place with an empty cache, always at the same path: litdata's state resumes only there."""
        cache = SCRATCH / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()
        try:
            yield self.place(contender, corpus, where, str(cache))
        finally:
            shutil.rmtree(cache, ignore_errors=True)

    def cases(self) -> list[tuple[str, str, int]]:
        return list(itertools.product(self.args.corpora, self.args.places, self.args.workers))

    def able(self, contender: str, where: str) -> bool:
        return where == "local" or bool(self.contenders[contender].REMOTE)

    def round(self, number: int) -> list[dict]:
        """Every contender once in every case."""
        names = list(self.contenders)
        turned = names[number % len(names) :] + names[: number % len(names)]
        rows = []
        for corpus, where, workers in self.cases():
            for name in (name for name in turned if self.able(name, where)):
                asked = {"contender": name, "corpus": corpus, "workers": workers}
                with self.cold(name, corpus, where) as place:
                    row = run(kind="epoch", place=asdict(place), seed=number, **asked)
                if workers == 0 and self.contenders[name].RESUMES:
                    row |= self.resume(name, corpus, where)
                rows.append({**asked, "place": where, "round": number, **row})
                print(json.dumps(rows[-1])[:300], flush=True)
        return rows

    def save(self, name: str, corpus: str, where: str) -> dict:
        """Size in bytes, and name of the file, of a state in the middle of the epoch; saved once."""
        if (name, corpus, where) not in self.states:
            state = str(self.folder / f"state-{name}-{corpus}-{where}")
            batches = self.count(corpus) // BATCH // 2
            with self.cold(name, corpus, where) as place:
                asked = {"contender": name, "corpus": corpus, "place": asdict(place)}
                self.states[name, corpus, where] = run(kind="save", batches=batches, state=state, **asked)
            self.states[name, corpus, where]["state"] = state
        return self.states[name, corpus, where]

    def resume(self, name: str, corpus: str, where: str) -> dict:
        """State size, and seconds from it to the next batch, in a new process with a cold cache."""
        saved = self.save(name, corpus, where)
        if "error" in saved:
            return {"resume_error": saved["error"]}
        with self.cold(name, corpus, where) as place:
            found = run(kind="resume", contender=name, corpus=corpus, place=asdict(place), state=saved["state"])
        if "error" in found:
            return {"resume_error": found["error"]}
        return {"state_bytes": saved["state_bytes"], "resume": found["resume"]}

    def server_limit(self, corpus: str, range_mb: int | None, parallel: int = 4) -> dict:
        """What the server gives to curl, which does nothing with it: bytes of our shards a second, whole or in ranges."""
        place = self.place("ours", corpus, "s3")
        client, prefix = place.client(), place.url.removeprefix(f"s3://{BUCKET}/")
        found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/shards/")["Contents"]
        asked = []
        for key, size in ((shard["Key"], shard["Size"]) for shard in found):
            url = client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": key})
            step = size if range_mb is None else range_mb << 20
            asked += [
                f'url = "{url}"\noutput = "/dev/null"\nrange = "{a}-{min(a + step, size) - 1}"\n'
                for a in range(0, size, step)
            ]
        config = self.folder / "curl"
        config.write_text("next\n".join(asked))
        began = time.perf_counter()
        command = ["curl", "--parallel", "--parallel-max", str(parallel), "--config", str(config)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        speed = sum(shard["Size"] for shard in found) / (time.perf_counter() - began)
        return {"corpus": corpus, "range_mb": range_mb, "bytes_a_second": speed, "parallel": parallel}

    def check(self) -> list[dict]:
        """Whether each contender delivers each sample once, in every case."""
        rows = []
        for (corpus, where, workers), name in itertools.product(self.cases(), self.contenders):
            if self.able(name, where):
                asked = {"contender": name, "corpus": corpus, "workers": workers}
                with self.cold(name, corpus, where) as place:
                    found = run(kind="check", place=asdict(place), count=self.count(corpus), **asked)
                rows.append({**asked, "place": where, **found})
                print(json.dumps(rows[-1])[:300], flush=True)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--corpora", nargs="+", default=list(CORPORA))
    parser.add_argument("--places", nargs="+", default=["local", "s3"])
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the corpora; 0.05 to try it out")
    parser.add_argument("--check", action="store_true", help="compare every sample with what was written instead")
    parser.add_argument("--output", default=str(RESULTS / "peers.json"))
    args = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as directory, s3_server(Path(directory)) as server:
        server.make_bucket(BUCKET)
        bench = Bench(args, server, Path(directory))
        bench.prepare()
        if args.check:
            bench.check()
            return
        result: dict = {
            "versions": {module.PACKAGE: metadata.version(module.PACKAGE) for module in bench.contenders.values()},
            "machine": {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()},
            "scale": args.scale,
            "server": [],
            "rows": [],
        }
        for number in range(args.rounds):
            if "s3" in args.places and "ours" in bench.contenders:
                cases = itertools.product(args.corpora, SERVER_RANGES)
                result["server"] += [bench.server_limit(corpus, megabytes) for corpus, megabytes in cases]
            result["rows"] += bench.round(number)
            Path(args.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
