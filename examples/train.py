"""Train a small GPT from a dataset in an object store. Kill it whenever you like and start it again: it goes on exactly.

    python examples/train.py s3://bucket/corpus --checkpoint run/checkpoint.pt --log run/log.jsonl

Credentials and endpoint come from the usual environment variables (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL ...).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import streamshard as ss

CONTEXT = 128  # a sample of the dataset is a window of CONTEXT + 1 tokens


def widen(window: dict[str, Any]) -> dict[str, Any]:
    """Tokens are stored as uint16 and looked up as int64."""
    return {"id": window["id"], "tokens": window["tokens"].astype("int64")}


class GPT(nn.Module):
    """A decoder-only transformer, as small as one can be and still learn."""

    def __init__(self, vocabulary: int, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.positions(torch.arange(length))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def save(path: Path, state: dict[str, Any]) -> None:
    """Whole or not at all: a kill in the middle leaves the checkpoint before."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", help="URL of a dataset with fields id and tokens (windows of 129)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=25)
    parser.add_argument("--log", type=Path, required=True, help="one JSON line a step: loss and ids")
    args = parser.parse_args()

    dataset = ss.StreamDataset(args.data, ss.Map(widen), ss.Batch(args.batch_size), seed=17, repeat=True)
    torch.manual_seed(0)
    model = GPT(dataset.manifest.metadata["vocabulary"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dataset.load_state_dict(saved["data"])
        step = saved["step"]
        print(f"resumed at step {step} from {args.checkpoint}", flush=True)

    with args.log.open("a") as log:
        for batch in dataset:
            tokens = batch["tokens"]
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            log.write(json.dumps({"step": step, "loss": loss.item(), "ids": batch["id"]}) + "\n")
            log.flush()
            if step % args.checkpoint_every == 0:
                save(
                    args.checkpoint,
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "data": dataset.state_dict(),
                        "step": step,
                    },
                )
            if step % 10 == 0:
                print(f"step {step}/{args.steps}  loss {loss.item():.3f}", flush=True)
            if step >= args.steps:
                break


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")  # the same sums in every life need the same number of threads
    main()
