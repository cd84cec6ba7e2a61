"""``streamshard order URL``: which samples are in a step, and in which step a sample is. No sample is read."""

from __future__ import annotations

import argparse
import json
from typing import Any

from streamshard.catalog import load_manifest
from streamshard.cli.state_files import read_states
from streamshard.errors import UsageError
from streamshard.order.partition import ALGORITHM, OrderSpec
from streamshard.storage.open import open_store
from streamshard.whereabouts import Whereabouts, book_of


def add_to(commands: Any) -> None:
    """The command's own arguments."""
    parser = commands.add_parser("order", help="which samples are in a step, and in which step a sample is")
    parser.add_argument("url", metavar="URL")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", type=int, metavar="N", help="the refs of step N, from 0; of one rank with --rank")
    asked.add_argument("--tokens", type=int, metavar="T", help="the first step before which T tokens were consumed")
    asked.add_argument("--find", metavar="SHARD:ROW", help="in which step, and on which rank, a sample comes")
    parser.add_argument("--rank", type=int, metavar="R")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument(
        "--batch-size", type=int, default=1, help="items a rank takes a step: StreamLoader(batch_size=)"
    )
    parser.add_argument("--state", metavar="FILE", help="take the settings below from a checkpoint of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--shuffle-buffer", type=int, default=512)
    parser.add_argument("--interleave", type=int, default=2)
    parser.add_argument("--no-shuffle", action="store_true")
    parser.add_argument("--batch", type=int, metavar="N", help="the size of a Batch step")
    parser.add_argument("--repeat", action="store_true")
    parser.add_argument("--epoch", type=int, default=0, help="of a finite run; with --find, the one to look in")
    parser.add_argument("--storage-options", type=json.loads, metavar="JSON", help="credentials and endpoint")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    store = open_store(args.url, args.storage_options)
    manifest = load_manifest(store)
    fingerprint, first = _of_state(args.state) if args.state else (_of_flags(args, manifest.version), 0)
    if not fingerprint["repeat"]:
        first = args.epoch
    book = book_of(fingerprint, store)
    where = Whereabouts(book, fingerprint, ranks=args.ranks, items=args.batch_size, epoch=first)
    if args.rank is not None and not 0 <= args.rank < args.ranks:
        raise UsageError(f"--rank {args.rank}: there are ranks 0 to {args.ranks - 1} (--ranks {args.ranks})")
    if args.step is not None:
        for rank, ref in where.step(args.step, args.rank):
            print(f"rank {rank}  {ref.shard}:{ref.row}  {manifest.key(ref.shard)}")
    elif args.tokens is not None:
        step = where.step_at(args.tokens)
        print(f"step {step}, before which {where.tokens_before(where.slots(step))} tokens are consumed")
    else:
        print(_found(where, args.find, args.epoch))
    return 0


def _found(where: Whereabouts, text: str, epoch: int) -> str:
    shard, _, row = text.partition(":")
    if not (shard.isdigit() and row.isdigit()):
        raise UsageError(f"--find {text}: pass the numbers of shard and row, as in 12:345")
    place = where.find(int(shard), int(row), epoch)
    if place is None:
        return f"sample {text} is in a short batch that drop_last leaves out of epoch {epoch}"
    return (
        f"sample {text} is in step {place.step} of rank {place.rank} (partition {place.partition}, epoch {place.epoch})"
    )


def _of_state(file: str) -> tuple[dict[str, Any], int]:
    """The settings of a run, and the epoch with which it began if it repeats."""
    _, state = read_states(file)[0]
    return dict(json.loads(state["fingerprint"])), int(state["epoch"])


def _of_flags(args: argparse.Namespace, version: str) -> dict[str, Any]:
    shuffle, default = not args.no_shuffle, OrderSpec(1)
    return {
        "algorithm": ALGORITHM, "dataset": version, "seed": args.seed, "shuffle": shuffle, "partitions": args.partitions,
        "shuffle_buffer": args.shuffle_buffer if shuffle else 1, "initial": default.initial, "run": default.run,
        "interleave": args.interleave if shuffle else 1, "repeat": args.repeat, "steps": [],
        "batch": [args.batch] if args.batch else [],
    }  # fmt: skip
