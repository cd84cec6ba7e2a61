"""Results of the benchmarks as JSON, with the machine and the versions they were measured with."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("streamshard", "torch", "numpy", "msgpack", "zstandard", "fsspec", "s3fs")


def save(name: str, result: dict) -> dict:
    """Keep `result` as ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    versions = {package: metadata.version(package) for package in PACKAGES}
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
    text = json.dumps({"versions": versions, "machine": machine, "result": result}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    return result
