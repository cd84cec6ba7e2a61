"""Starts trainings in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def launch(module: str, ranks: int, directory: str, folder: Path, **options) -> subprocess.CompletedProcess:
    """`module` under torchrun on `ranks` gloo processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "-m", f"tests.frameworks.{module}", directory, str(folder)]
    return subprocess.run([*command, json.dumps(options)], capture_output=True, text=True, timeout=120, check=False)
