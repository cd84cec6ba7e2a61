"""What the README and the examples show works as shown, in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(
            f"docs/{name}.md"
            for name in (
                "steps",
                "state",
                "writing",
                "storage",
                "loader",
                "distributed",
                "batch",
                "packing",
                "mixture",
                "batching",
            )
        ),
        *(
            f"docs/frameworks/{name}.md"
            for name in ("dataloader", "stateful_dataloader", "lightning", "accelerate", "trainer", "nodes")
        ),
    ],
)
def test_the_code_of_a_page_runs_in_an_empty_folder(page, tmp_path):
    """The blocks of a page, one after the other, as a reader would paste them."""
    blocks = code_blocks(ROOT / page)
    assert blocks
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def torchrun(processes: int, example: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(ROOT / "examples" / example), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_data_parallel_training_goes_on_with_another_number_of_processes(tmp_path):
    assert "step 10 on 2 processes" in torchrun(2, "ddp.py", tmp_path, "--steps", "10")
    assert "step 20 on 4 processes" in torchrun(4, "ddp.py", tmp_path, "--steps", "10")


@pytest.mark.slow
def test_a_run_that_is_killed_twice_and_changes_its_size_proves_itself(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "elastic.py"), "--folder", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 of 40 steps trained on the same 48 samples" in done.stdout
    assert "960 of 960 samples, each once" in done.stdout


def test_tensor_parallel_peers_train_on_the_same_batches(tmp_path):
    lines = torchrun(4, "mesh.py", tmp_path).splitlines()
    (first, second, third, fourth) = (line.partition(": ")[2] for line in lines)
    assert first == second != third == fourth


def test_a_short_demo_proves_itself(tmp_path):
    """Kill -9 in the middle, resume, equal ids and losses; the long version is ``make demo``."""
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--output", str(tmp_path / "out"), "--steps", "60",
               "--kill-at", "40", "--megabytes", "1"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout
    assert "480 samples: ids and order equal; steps lost with the kill replayed equally" in done.stdout
    assert (tmp_path / "out" / "proof.png").stat().st_size > 10_000


def test_a_small_model_trains_on_a_packed_mixture_and_a_picture_is_saved(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "mixture.py"), "--folder", str(tmp_path), "--steps", "60"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = map(
        float, re.findall(r"stories: ([0-9.]+)% of the tokens before the switch, ([0-9.]+)%", done.stdout)[0]
    )
    assert abs(before - 80) < 8
    assert abs(after - 20) < 8
    assert (tmp_path / "mixture.png").stat().st_size > 10_000
