"""Train a small GPT on two sources, packed, and save a picture of shares, padding and loss.

    python examples/mixture.py

Half-way the mixture changes from mostly stories to mostly sums; the picture shows that the shares follow at once, that hardly
anything of a row is padding, and how well the model does on each source. The training is stopped in the middle and resumed, so
that half of the picture is from a run that knows the first half from a checkpoint only.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from torch import nn

import streamshard as ss
from streamshard.attention import block_mask

mpl.use("Agg")
import matplotlib.pyplot as plt

VOCABULARY, ROW, BATCH, WIDTH, HEADS = 128, 256, 8, 64, 4
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve")
THINGS = ("a cat", "the moon", "a red boat", "some bread", "a song")


def story(rng: np.random.Generator) -> str:
    """A few sentences of a small language."""
    return " ".join(
        f"{rng.choice(NAMES)} saw {rng.choice(THINGS)} and gave it to {rng.choice(NAMES)}."
        for _ in range(rng.integers(1, 9))
    )


def sums(rng: np.random.Generator) -> str:
    """Additions, with their results."""
    pairs = rng.integers(0, 50, (rng.integers(1, 6), 2)).tolist()
    return "; ".join(f"{a}+{b}={a + b}" for a, b in pairs)


def write_corpora(folder: Path) -> None:
    """Two datasets of documents as character codes."""
    rng = np.random.default_rng(0)
    for name, make, count in (("stories", story, 3000), ("sums", sums, 4000)):
        if (folder / name / "manifest.json").exists():
            continue
        with ss.DatasetWriter(str(folder / name), length_field="tokens") as writer:
            for _ in range(count):
                writer.write({"tokens": np.frombuffer(make(rng).encode(), np.uint8)})


def open_loader(folder: Path, switch: int) -> ss.StreamLoader:
    """Packed rows of both sources, with other weights after `switch` tokens."""
    mixture = ss.Mixture(
        {"stories": str(folder / "stories"), "sums": str(folder / "sums")},
        weights={"stories": 0.8, "sums": 0.2},
        schedule=[(switch, {"stories": 0.2, "sums": 0.8})],
    )
    pack = ss.Pack(ROW, window=64)
    dataset = ss.StreamDataset(mixture, pack, repeat=True, seed=1, partitions=8, shuffle_buffer=256, provenance=True)
    return ss.StreamLoader(dataset, batch_size=BATCH)


class Gpt(nn.Module):
    """Two layers; every document of a row sees itself only."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(ROW, WIDTH)
        layer = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**layer, norm_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        hidden = ~block_mask(batch).expand(-1, HEADS, -1, -1).flatten(0, 1)  # this module wants what may not be seen
        for layer in self.layers:
            x = layer(x, src_mask=hidden)
        return self.head(x)


def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of every token; 0 where it is not in the loss."""
    flat = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return flat.view(len(labels), -1)


def by_source(batch: dict[str, Any], loss: torch.Tensor) -> dict[str, float]:
    """Mean loss of each source's tokens in a batch."""
    found: dict[str, list[torch.Tensor]] = {}
    for row, segments in enumerate(batch["__segments__"]):
        for number, segment in enumerate(segments):
            mine = (batch["segment_ids"][row, 1:] == number) & batch["loss_mask"][row, 1:]
            found.setdefault(segment.ref.source, []).append(loss[row][mine])
    return {name: torch.cat(parts).mean().item() for name, parts in found.items()}


def train(folder: Path, steps: range, checkpoint: Path, switch: int) -> list[dict[str, Any]]:
    """Some steps, from the checkpoint if they are not the first; what happened in each."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    log = []
    with open_loader(folder, switch) as loader:
        if steps.start:
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["data"])
        before = loader.counts()
        for step, batch in zip(steps, loader, strict=False):
            each = losses(model(batch), batch["labels"])
            optimizer.zero_grad()
            (each.sum() / batch["loss_mask"].sum()).backward()
            optimizer.step()
            counts = loader.counts()
            real = {
                name: n.real - before.sources.get(name, ss.SourceCounts()).real for name, n in counts.sources.items()
            }
            log.append(
                {
                    "step": step,
                    "real": real,
                    "tokens": counts.real,
                    "padding": counts.padding,
                    "loss": by_source(batch, each.detach()),
                }
            )
            before = counts
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}, checkpoint
        )
    return log


def draw(log: list[dict[str, Any]], stop: int, path: Path) -> None:
    """Shares of tokens, loss and padding over the steps."""
    figure, (shares, loss, padding) = plt.subplots(3, 1, figsize=(8, 8), sharex=True)
    steps = [entry["step"] for entry in log]
    for name, color in (("stories", "#4c78a8"), ("sums", "#f58518")):
        part = [entry["real"].get(name, 0) / sum(entry["real"].values()) for entry in log]
        shares.plot(steps, part, color=color, label=name, linewidth=1)
        known = [(entry["step"], entry["loss"][name]) for entry in log if name in entry["loss"]]
        loss.plot(*zip(*known, strict=True), color=color, label=name, linewidth=1)
    for wanted in (0.8, 0.2):
        shares.axhline(wanted, color="#999999", linewidth=0.5)
    padding.plot(steps, [100 * entry["padding"] for entry in log], color="#54a24b")
    for axis, title in (
        (shares, "share of a batch's tokens"),
        (loss, "loss"),
        (padding, "% of all tokens so far that are padding"),
    ):
        axis.set_ylabel(title, fontsize=9)
        axis.axvline(stop, color="#222222", linewidth=0.8, linestyle=":")
        axis.grid(alpha=0.3)
    shares.legend(loc="center right")
    shares.set_title("dotted: stopped and resumed from a checkpoint", fontsize=9)
    padding.set_xlabel("step")
    padding.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def share(log: list[dict[str, Any]], name: str) -> float:
    """Of a source in the tokens of some steps."""
    return sum(entry["real"].get(name, 0) for entry in log) / sum(sum(entry["real"].values()) for entry in log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where everything goes; default a temporary directory")
    parser.add_argument("--steps", type=int, default=240)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="mixture-"))
    write_corpora(folder)
    checkpoint, switch, stop = folder / "checkpoint.pt", args.steps * BATCH * ROW // 2, args.steps // 3
    log = train(folder, range(stop), checkpoint, switch)
    log += train(folder, range(stop, args.steps), checkpoint, switch)
    draw(log, stop, folder / "mixture.png")
    for name in ("stories", "sums"):
        before, after = share(log[: len(log) // 2 - 8], name), share(log[len(log) // 2 + 8 :], name)
        loss = next(entry["loss"][name] for entry in reversed(log) if name in entry["loss"])
        print(f"{name}: {before:.1%} of the tokens before the switch, {after:.1%} after it; loss {loss:.2f}")
    print(f"{log[-1]['padding']:.2%} padding; the picture is {folder / 'mixture.png'}")


if __name__ == "__main__":
    main()
