"""Scenarios under torchrun: ``launch("meshes", 8, tmp_path, url)`` runs the function of that name on eight gloo processes and
returns what each of them returned.

A scenario is a function (url, folder) -> something for JSON in a module of this folder called scenarios_*. Several questions
share a launch, because starting torch on eight processes takes longer than answering them.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 240


def start(scenario: str, ranks: int, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``module.function`` on `ranks` processes; each writes its answer into `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "-m", "tests.distributed.launch", scenario, str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)


def launch(scenario: str, ranks: int, folder: Path, *arguments: str) -> list:
    """What each rank answered; fails with their output if one of them did."""
    folder.mkdir(parents=True, exist_ok=True)
    done = start(scenario, ranks, folder, *arguments)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"answer-{rank}.json").read_text()) for rank in range(ranks)]


def refusal(call, *errors: type[Exception]) -> str:
    """The message with which `call` refuses; "" if it does not."""
    try:
        call()
    except errors as error:
        return str(error)
    return ""


def main() -> None:
    import torch.distributed as dist

    scenario, folder, *arguments = sys.argv[1:]
    module, _, name = scenario.partition(".")
    dist.init_process_group("gloo")
    answer = getattr(importlib.import_module(f"tests.distributed.{module}"), name)(*arguments)
    (Path(folder) / f"answer-{dist.get_rank()}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
