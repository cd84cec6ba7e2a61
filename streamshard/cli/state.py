"""``streamshard state show | diff | merge FILE...``: what checkpoints say about the data."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from streamshard.cli.state_files import read_states
from streamshard.errors import UsageError
from streamshard.inspection import Inspected, first_difference
from streamshard.state import State, merge_states
from streamshard.steps.counts import SourceCounts
from streamshard.storage.open import open_store
from streamshard.storage.store import Store


def add_to(commands: Any) -> None:
    """The command's own arguments."""
    parser = commands.add_parser("state", help="what a checkpoint says about the data: show, diff, merge")
    verbs = parser.add_subparsers(title="verbs", required=True)
    show = verbs.add_parser("show", help="where a run stands, and with --data what it has consumed")
    show.add_argument("files", nargs="+", metavar="FILE", help="of torch.save, JSON, or a folder of dcp.save")
    show.add_argument("--data", metavar="URL", help="the dataset: then samples, tokens and refs are known too")
    show.add_argument("--storage-options", type=json.loads, metavar="JSON", help="credentials and endpoint of --data")
    show.add_argument("--buffers", action="store_true", help="the refs in each shuffle buffer, as shard:row")
    show.set_defaults(run=_show)
    diff = verbs.add_parser("diff", help="the first difference that matters; exit code 1 if there is one")
    diff.add_argument("files", nargs=2, metavar="FILE")
    diff.set_defaults(run=_diff)
    merge = verbs.add_parser("merge", help="one full state out of those of all ranks")
    merge.add_argument("files", nargs="+", metavar="FILE")
    merge.add_argument("--output", "-o", required=True, metavar="FILE", help="written with torch.save")
    merge.add_argument("--allow", action="append", default=[], metavar="ragged", help="states from different steps")
    merge.set_defaults(run=_merge)


def _show(args: argparse.Namespace) -> int:
    if args.buffers and not args.data:
        raise UsageError("--buffers needs the dataset: pass --data URL")
    store = open_store(args.data, args.storage_options) if args.data else None
    for file in args.files:
        for where, state in read_states(file):
            print(_described(where, state, store))
            if args.buffers:
                for p, refs in Inspected(state, store).buffered():
                    print(f"  buffer of partition {p} ({len(refs)}): {' '.join(f'{r.shard}:{r.row}' for r in refs)}")
    return 0


def _described(where: str, state: State, store: Store | None) -> str:
    inspected = Inspected(state, store)
    snapshot, found, spread = inspected.snapshot, inspected.fingerprint, inspected.spread()
    low, high = inspected.epochs
    datasets = {"": found["dataset"]} if isinstance(found["dataset"], str) else found["dataset"]
    rows = [
        ("scope", snapshot.scope),
        *((f"dataset {name}".rstrip(), version) for name, version in datasets.items()),
        ("epoch", str(low) if low == high else f"{low} to {high}"),
    ]
    if snapshot.batches is not None:
        rows.append(("steps", f"{snapshot.batches} batches of a rank{_span(found)}"))
    items = f"{inspected.items} items{_span(found)}" if spread.held else "not begun"
    rows.append(("items", items))
    if (store is not None or inspected.mixes) and spread.held:
        for source, consumed in inspected.consumed().items():
            tokens = "" if consumed.tokens is None else f", {consumed.tokens} tokens"
            rows.append(("consumed", f"{source or 'dataset'}: {consumed.samples} samples{tokens}{_span(found)}"))
    counts = inspected.counts()
    if counts is not None:
        rows.append(
            ("counted", f"{counts.rows} rows of {counts.physical} tokens, {100 * counts.padding:.2f} % padding")
        )
        rows += [(f"  {name or 'dataset'}", _counted(source)) for name, source in counts.sources.items()]
    rows.append(
        (
            "partitions",
            f"{spread.held} of {found['partitions']} held, {spread.done} done, {spread.least} to {spread.most} items each"
            + (f", ragged by {spread.ahead} items" if spread.ahead else ""),
        )
    )
    rows += [(name, _plain(found[name])) for name in sorted(found) if name not in ("dataset", "partitions")]
    if snapshot.contents:
        rows.append(("contents", f"{sum(map(len, snapshot.contents.values()))} bytes of samples"))
    return "\n".join([where, *(f"  {name:<15} {text}" for name, text in rows)])


def _counted(source: SourceCounts) -> str:
    found = f"{source.samples} samples, {source.documents} documents, {source.real} tokens, {source.loss} in the loss"
    if source.split:
        found += f", {source.split} documents split"
    if source.truncated or source.dropped:
        lost = source.truncated_tokens + source.dropped_tokens
        found += f", {source.truncated} truncated and {source.dropped} dropped ({lost} tokens)"
    return found


def _span(fingerprint: dict[str, Any]) -> str:
    return " since the run began" if fingerprint["repeat"] else " in this epoch"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _diff(args: argparse.Namespace) -> int:
    (first, one), (second, other) = (_single(file) for file in args.files)
    difference = first_difference(one, other)
    print(f"{first} and {second}: {difference or 'the same'}")
    return int(difference is not None)


def _single(file: str) -> tuple[str, State]:
    found = read_states(file)
    if len(found) > 1:
        raise UsageError(
            f"{file} has {len(found)} states: {[where for where, _ in found]}; save the one that is meant apart"
        )
    return found[0]


def _merge(args: argparse.Namespace) -> int:
    states = [state for file in args.files for _, state in read_states(file)]
    torch.save(merge_states(states, allow=args.allow), args.output)
    print(f"{args.output}: the full state of {len(states)}, which resumes on any number of ranks")
    return 0
