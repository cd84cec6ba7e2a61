"""How full rows get and what a document costs: `python -m benchmarks.packing`.

Efficiency is real tokens / tokens of rows, of one partition, the last rows included: the median of several orders of the same
lengths. The lengths are drawn here, or come from files:

    --lengths FILE     a JSON list of lengths, packed as they are
    --histogram FILE   JSON {name: {"counts": [how many of length 1, of length 2, ...]}}; 100,000 are drawn
    --size N           rows of N tokens for these; may be repeated
    --balance K        also: by how much the dearest of eight ranks is above the mean, in steps of K rows, with and without
                       Pack(balance=K); 100,000 draws, cost is the sum of squared document lengths, which attention costs

The cost is that of planning (microseconds a document) and of making rows (nanoseconds a token), on this machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import streamshard as ss
from streamshard.order.balance import next_step
from streamshard.order.cursor import Ref
from streamshard.steps.step import StepContext

DRAWS = 100_000
Lengths = np.ndarray


class Documents:
    """A first stage over documents in memory."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths.tolist()
        self._tokens = np.zeros(max(self._lengths), np.uint16)
        self._k = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for length in self._lengths:
            self._k += 1
            yield {"tokens": self._tokens[:length]}

    def cursor(self) -> tuple[int, int]:
        return 0, self._k

    def identity(self) -> tuple[str, int, int]:
        return "", 0, self._k

    def ref(self) -> Ref:
        return Ref("", 0, self._k)

    def counters(self) -> Iterator[tuple[str, int]]:
        return iter(())

    def items(self, identities: Any) -> Iterator[Any]:  # noqa: ARG002  (nothing is resumed here)
        return iter(())


def pack(lengths: Lengths, size: int, *, make: bool, **options: Any) -> tuple[float, float]:
    """(efficiency, seconds); without `make` rows are planned and not made."""
    step, documents = ss.Pack(size, **options), Documents(lengths)
    stage: Any = step.open(documents, step.start((0, 0)), StepContext(0, 1, past=documents))
    if not make:
        stage._planner.make = len  # noqa: SLF001  (what rows cost is measured apart)
    began = time.perf_counter()
    for _ in stage:
        pass
    seconds = time.perf_counter() - began
    return 1 - step.counts(stage.cursor()).padding, seconds


def imbalance(lengths: Lengths, size: int, rows: int, *, balance: bool) -> float:
    """Mean over steps of (dearest rank's cost / mean cost), of 100,000 draws over eight partitions."""
    ranks = []
    for part in np.array_split(np.random.default_rng(0).choice(lengths, DRAWS), 8):
        step, documents = ss.Pack(size, balance=rows if balance else None), Documents(part)
        stage: Any = step.open(documents, step.start((0, 0)), StepContext(0, 1, past=documents))
        stage._planner.make = lambda row: sum(piece.length**2 for piece in row)  # noqa: SLF001
        ranks.append(np.array(list(stage)))
    steps = min(map(len, ranks)) // rows
    costs = np.stack([rank[: steps * rows].reshape(steps, rows).sum(1) for rank in ranks])
    return float((costs.max(0) / costs.mean(0)).mean())


def planned(lengths: Lengths, ranks: int, room: int) -> tuple[float, float, float]:
    """(mean max / mean cost, efficiency, utilisation) of steps planned over all ranks, of 100,000 draws."""
    left = np.random.default_rng(0).choice(lengths[lengths <= room], DRAWS).tolist()
    worst, tokens = [], 0
    ahead = 2 * ranks * room // int(np.mean(lengths))
    while len(left) > ahead:
        step = next_step(left[:ahead], ranks, room)
        costs = [sum(left[place] ** 2 for place in places) for places in step]
        worst.append(max(costs) / (sum(costs) / ranks))
        taken = sum(map(len, step))
        tokens += sum(left[:taken])
        left = left[taken:]
    return float(np.mean(worst)), tokens / (len(worst) * ranks * room), float(np.mean([1 / one for one in worst]))


def lognormal(seed: int) -> Lengths:
    """Mean 800, sigma 1."""
    drawn = np.random.default_rng(seed).lognormal(np.log(800) - 0.5, 1, DRAWS)
    return np.maximum(1, drawn.astype(np.int64))


def normal(seed: int) -> Lengths:
    return np.maximum(1, np.random.default_rng(seed).normal(4096, 512, DRAWS).astype(np.int64))


def of_histogram(counts: list[int], seed: int) -> Lengths:
    weights = np.array(counts, dtype=np.float64)
    return np.random.default_rng(seed).choice(np.arange(1, len(counts) + 1), DRAWS, p=weights / weights.sum())


def corpora(args: argparse.Namespace) -> Iterator[tuple[str, int, list[Lengths]]]:
    """(name, tokens of a row, lengths in several orders)."""
    orders = range(args.orders)
    for size in (2048, 8192):
        yield "lognormal(mean 800, sigma 1)", size, [lognormal(seed) for seed in orders]
    for path in args.lengths:
        lengths = np.array(json.loads(path.read_text()))
        for size in args.size or [2048]:
            yield path.stem, size, [np.random.default_rng(seed).permutation(lengths) for seed in orders]
    for path in args.histogram:
        for name, histogram in json.loads(path.read_text()).items():
            for size in args.size or [len(histogram["counts"])]:
                yield f"{path.stem} {name}", size, [of_histogram(histogram["counts"], seed) for seed in orders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, action="append", default=[])
    parser.add_argument("--histogram", type=Path, action="append", default=[])
    parser.add_argument("--size", type=int, action="append")
    parser.add_argument("--orders", type=int, default=5)
    parser.add_argument("--balance", type=int)
    args = parser.parse_args()
    print(f"{'corpus':<36} {'row':>6} {'efficiency':>11} {'us a document':>14} {'ns a token':>11}")
    for name, size, orders in corpora(args):
        efficiencies, seconds = zip(*(pack(lengths, size, make=False) for lengths in orders), strict=True)
        made = pack(orders[0], size, make=True)[1] - seconds[0]
        print(
            f"{name:<36} {size:>6} {100 * statistics.median(efficiencies):>10.3f}% "
            f"{1e6 * statistics.median(seconds) / len(orders[0]):>14.1f} {1e9 * made / int(orders[0].sum()):>11.1f}"
        )
        if args.balance:
            found = [imbalance(orders[0], size, args.balance, balance=balance) for balance in (False, True)]
            print(f"    steps of {args.balance} rows on 8 ranks, max / mean: {found[0]:.4f}, balanced {found[1]:.4f}")
            worst, efficiency, utilisation = planned(orders[0], 8, args.balance * size)
            print(
                f"    planned over 8 ranks, {args.balance} x {size} tokens each, not packed: max / mean {worst:.4f}, "
                f"efficiency {efficiency:.2%}, utilisation {utilisation:.2%}"
            )
    rows = [len_rows(normal(0), size) for size in (8192, 8193)]
    print(
        f"normal(4096, 512): {rows[0]} rows of 8192, {rows[1]} of 8193: {100 * abs(rows[0] - rows[1]) / rows[0]:.3f} %"
    )


def len_rows(lengths: Lengths, size: int) -> int:
    efficiency, _ = pack(lengths, size, make=False)
    return round(int(lengths.sum()) / (efficiency * size))


if __name__ == "__main__":
    main()
