"""The whole claim in one run: write a dataset to S3, train from it, kill -9, resume, and prove that nothing changed.

    make demo

Real parts throughout: text is the Python source of the installed packages, the tokenizer a BPE trained on it, the store
an S3 server process, the training a GPT in a process of its own that is killed with SIGKILL. The proof (printed, and as a
picture) compares the interrupted run with an uninterrupted one: same ids in the same order, same losses.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import streamshard as ss
from streamshard.testing.servers import S3Server, s3_server

VOCABULARY = 2048
WINDOW = 129  # a context of 128 and the token after it
TRAIN = Path(__file__).with_name("train.py")
_started = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _started:5.1f} s] {text}", flush=True)


def sources(limit_bytes: int) -> Iterator[tuple[str, str]]:
    """(name, text) of Python files of the installed packages, in a fixed order."""
    root = Path(sysconfig.get_path("purelib"))
    total = 0
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(errors="ignore")
        if len(text) > 500:
            total += len(text)
            yield path.relative_to(root).as_posix(), text
        if total > limit_bytes:
            return


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_dataset(server: S3Server, megabytes: float) -> str:
    """Tokenize and write to S3."""
    documents = list(sources(int(megabytes * 1e6)))
    say(f"training a BPE on {len(documents)} Python files")
    tokenizer = train_tokenizer([text for _, text in documents[::4]])
    url = server.make_bucket("corpus") + "/python-sources"
    with ss.DatasetWriter(
        url,
        metadata={"vocabulary": VOCABULARY, "tokenizer": "byte-level BPE trained on the data"},
        shard_bytes=1 << 20,
        block_bytes=64 << 10,
        storage_options=server.storage_options,
        on_progress=lambda p: say(
            f"  {p.samples} windows, {p.stored_shards} shards, {p.stored_bytes / 1e6:.1f} MB on S3"
        ),
    ) as writer:
        for name, text in documents:
            encoded = np.array(tokenizer.encode(text).ids, dtype=np.uint16)
            for start in range(0, len(encoded) - WINDOW + 1, WINDOW - 1):
                writer.write({"id": f"{name}:{start}", "tokens": encoded[start : start + WINDOW]})
    say(f"wrote {writer.progress.samples} windows of {WINDOW} tokens to {url}")
    return url


def train(url: str, server: S3Server, where: Path, life: str, args: argparse.Namespace, *, kill_at: int | None) -> None:
    """One life of the training process; killed with SIGKILL once it has reported step `kill_at`."""
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "OMP_NUM_THREADS": "2",
    }
    where.mkdir(exist_ok=True)
    command = [sys.executable, str(TRAIN), url, "--steps", str(args.steps), "--checkpoint", str(where / "checkpoint.pt"),
               "--log", str(where / f"{life}.jsonl")]  # fmt: skip
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(f"  {where.name}, {life}: {line.rstrip()}")
            if kill_at is not None and line.startswith(f"step {kill_at}/"):
                process.send_signal(signal.SIGKILL)
                say(f"  kill -9 {process.pid}")
                break
    expected = -signal.SIGKILL if kill_at is not None else 0
    if process.returncode != expected:
        raise SystemExit(f"the training process ended with {process.returncode} where {expected} was expected")


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare(output: Path) -> dict[str, Any]:
    """The interrupted run as the model saw it, beside the uninterrupted one."""
    whole = read_log(output / "uninterrupted" / "life-1.jsonl")
    first = read_log(output / "interrupted" / "life-1.jsonl")
    second = read_log(output / "interrupted" / "life-2.jsonl")
    resumed_at = second[0]["step"] - 1
    lives = first[:resumed_at] + second
    ids = [[i for step in run for i in step["ids"]] for run in (whole, lives)]
    losses = [np.array([step["loss"] for step in run]) for run in (whole, lives)]
    return {
        "whole": whole, "first": first, "second": second, "resumed_at": resumed_at, "killed_at": first[-1]["step"],
        "samples": len(ids[0]), "ids_equal": ids[0] == ids[1],
        "replayed_equal": [s["ids"] for s in first[resumed_at:]] == [s["ids"] for s in whole[resumed_at : len(first)]],
        "loss_difference": float(np.abs(losses[0] - losses[1]).max()) if len(losses[0]) == len(losses[1]) else np.inf,
    }  # fmt: skip


def draw(proof: dict[str, Any], path: Path) -> None:
    """Both loss curves, and for every position the id consumed there in both runs."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  (after the backend has been chosen)

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7), height_ratios=[3, 2], layout="constrained")
    steps = lambda run: [step["step"] for step in run]  # noqa: E731
    losses = lambda run: [step["loss"] for step in run]  # noqa: E731
    top.plot(steps(proof["whole"]), losses(proof["whole"]), color="0.75", linewidth=6, label="uninterrupted")
    first = proof["first"][: proof["resumed_at"]]
    top.plot(steps(first), losses(first), color="C0", linewidth=1.5, label="interrupted, first life")
    top.plot(steps(proof["second"]), losses(proof["second"]), color="C3", linewidth=1.5, label="second life, resumed")
    top.axvline(proof["killed_at"], color="k", linestyle=":", label=f"kill -9 after step {proof['killed_at']}")
    top.axvline(proof["resumed_at"], color="C3", linestyle=":", label=f"checkpoint of step {proof['resumed_at']}")
    top.set(ylabel="loss", title=f"largest difference of the losses: {proof['loss_difference']:.1e}")
    top.legend()
    names = sorted({i.partition(":")[0] for step in proof["whole"] for i in step["ids"]})
    number = {name: place for place, name in enumerate(names)}
    for run, style in ((proof["whole"], {"color": "0.75", "s": 18}), (first, {"color": "C0", "s": 2}),
                       (proof["second"], {"color": "C3", "s": 2})):  # fmt: skip
        points = [(step["step"], number[i.partition(":")[0]]) for step in run for i in step["ids"]]
        bottom.scatter(*zip(*points, strict=True), **style)
    bottom.set(xlabel="step", ylabel="file consumed",
               title=f"{proof['samples']} samples, ids and order {'equal' if proof['ids_equal'] else 'DIFFERENT'}")  # fmt: skip
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kill-at", type=int, default=110, help="a multiple of 10")
    parser.add_argument("--megabytes", type=float, default=8.0, help="text to tokenize")
    args = parser.parse_args()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch, s3_server(Path(scratch)) as server:
        say(f"an S3 server listens on {server.endpoint}")
        url = write_dataset(server, args.megabytes)
        say("training without interruption")
        train(url, server, args.output / "uninterrupted", "life-1", args, kill_at=None)
        say(f"training again, killed after step {args.kill_at}")
        train(url, server, args.output / "interrupted", "life-1", args, kill_at=args.kill_at)
        say("starting the same command again")
        train(url, server, args.output / "interrupted", "life-2", args, kill_at=None)
    proof = compare(args.output)
    draw(proof, args.output / "proof.png")
    say(f"killed after step {proof['killed_at']}, resumed from the checkpoint of step {proof['resumed_at']}")
    say(f"{proof['samples']} samples: ids and order {'equal' if proof['ids_equal'] else 'DIFFERENT'}; "
        f"steps lost with the kill replayed {'equally' if proof['replayed_equal'] else 'DIFFERENTLY'}; "
        f"largest difference of the losses {proof['loss_difference']:.1e}")  # fmt: skip
    say(f"the picture: {args.output / 'proof.png'}")
    if not (proof["ids_equal"] and proof["replayed_equal"] and proof["loss_difference"] < 1e-6):
        raise SystemExit("the two runs differ: this is a defect, please report it")


if __name__ == "__main__":
    main()
