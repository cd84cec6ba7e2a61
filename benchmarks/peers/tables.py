"""From the raw figures to the tables and the chart of docs/benchmarks.md: ``python -m benchmarks.peers.tables``.

A library's rate in a round is its better one of the worker counts. Ratios are taken within a round, and of all rounds the
median is shown.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import matplotlib as mpl

from benchmarks.report import RESULTS

mpl.use("Agg")
from matplotlib import pyplot as plt

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
LABELS = {
    "ours": "**streamshard**", "ours_defaults": "streamshard, defaults", "reader": "30-line reader",
    "peer_litdata": "litdata", "peer_streaming": "streaming-community", "peer_webdataset": "webdataset",
    "peer_datasets": "datasets", "peer_grain": "grain", "peer_squirrel": "squirrel-core",
}  # fmt: skip
OURS, READER = "ours", "reader"
PLACES = {"local": "a local directory", "s3": "S3"}
NAMES = {"tokens": "Tokens", "records": "1 KB records", "images": "110 KB images"}


class Figures:
    """Rows of one run, by case. Failed ones are counted and left out."""

    def __init__(self, rows: list[dict]) -> None:
        self.failed = [row for row in rows if "error" in row]
        self._rows = [row for row in rows if "error" not in row]
        self.cases = list(dict.fromkeys((row["corpus"], row["place"]) for row in self._rows))

    def rows(self, corpus: str, place: str, contender: str, workers: int | None = None) -> list[dict]:
        """The rounds of one contender."""
        return [
            row for row in self._rows
            if (row["corpus"], row["place"], row["contender"]) == (corpus, place, contender)
            and workers in (None, row["workers"])
        ]  # fmt: skip

    def contenders(self, corpus: str, place: str) -> list[str]:
        """Those who read this, in the order of `LABELS`."""
        return [name for name in LABELS if self.rows(corpus, place, name)]

    def libraries(self, corpus: str, place: str) -> list[str]:
        """Other people's."""
        return [name for name in self.contenders(corpus, place) if name.startswith("peer_")]

    def rounds(self, corpus: str, place: str, contender: str, value: Callable[[dict], float], best: Callable) -> dict:
        """Round -> the best of `value` over the worker counts."""
        found: defaultdict[int, list[float]] = defaultdict(list)
        for row in self.rows(corpus, place, contender):
            found[row["round"]].append(value(row))
        return {number: best(values) for number, values in found.items()}

    def typical(self, corpus: str, place: str, contender: str, value: Callable[[dict], float], best: Callable) -> float:
        """The median over the rounds."""
        return median(self.rounds(corpus, place, contender, value, best).values())

    def best_workers(self, corpus: str, place: str, contender: str) -> int:
        """The worker count with the better median rate."""
        counts = {row["workers"] for row in self.rows(corpus, place, contender)}
        return max(counts, key=lambda w: median(map(rate, self.rows(corpus, place, contender, w))))

    def ratio(self, corpus: str, place: str, others: Iterable[str]) -> tuple[float, str]:
        """Our rate beside the best of `others`, and who that is most often."""
        mine = self.rounds(corpus, place, OURS, rate, max)
        theirs = {name: self.rounds(corpus, place, name, rate, max) for name in others}
        best = {n: max((found[n], name) for name, found in theirs.items() if n in found) for n in mine}
        names = [name for _, name in best.values()]
        return median(mine[n] / best[n][0] for n in mine), max(set(names), key=names.count)


def rate(row: dict) -> float:
    """Samples a second, over the whole epoch."""
    return row["samples"] / row["seconds"]


def first(row: dict) -> float:
    """Seconds to the first batch."""
    return row["first_batch"]


def _rate_text(figures: Figures, corpus: str, place: str, name: str, workers: int) -> str:
    rows = figures.rows(corpus, place, name, workers)
    return f"{median(map(rate, rows)):,.0f}" if rows else "failed"


def table(figures: Figures, corpus: str, place: str) -> list[str]:
    """One row a contender."""
    lines = [
        "| | samples/s, 0 workers | 2 workers | MB/s | CPU s/GB | first batch | peak memory | state | resume |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in figures.contenders(corpus, place):
        rows = figures.rows(corpus, place, name, figures.best_workers(corpus, place, name))
        speed = median(row["payload"] / row["seconds"] for row in rows) / 1e6
        cpu = median(row["cpu"] / row["payload"] for row in rows) * 1e9
        begin = figures.typical(corpus, place, name, first, min) * 1e3
        peak = median(row["peak_rss"] for row in rows) / 1e6
        resumed = [row for row in figures.rows(corpus, place, name) if "resume" in row]
        state = f"{resumed[0]['state_bytes']:,} B" if resumed else "none"
        resume = f"{median(row['resume'] for row in resumed) * 1e3:,.0f} ms" if resumed else "cannot"
        if not resumed and any("resume_error" in row for row in figures.rows(corpus, place, name)):
            state = resume = "failed"
        lines.append(
            f"| {LABELS[name]} | {_rate_text(figures, corpus, place, name, 0)} | "
            f"{_rate_text(figures, corpus, place, name, 2)} | {speed:,.0f} | {cpu:.1f} | {begin:,.0f} ms | "
            f"{peak:,.0f} MB | {state} | {resume} |"
        )
    return lines


def summary(figures: Figures) -> list[str]:
    """What is asked of us, case by case."""
    lines = [
        "| | beside the best library | beside the 30-line reader | first batch: ours, best library's | "
        "resume: ours, best library's |",
        "|---|---|---|---|---|",
    ]
    for corpus, place in figures.cases:
        libraries = figures.libraries(corpus, place)
        ratio, best = figures.ratio(corpus, place, libraries)
        plain, _ = figures.ratio(corpus, place, [READER])
        begins = {n: figures.typical(corpus, place, n, first, min) * 1e3 for n in (OURS, *libraries)}
        quick = min(libraries, key=begins.__getitem__)
        resumes = {
            n: median(found) * 1e3 for n in (OURS, *libraries)
            if (found := [row["resume"] for row in figures.rows(corpus, place, n) if "resume" in row])
        }  # fmt: skip
        again = min((n for n in resumes if n != OURS), key=resumes.__getitem__, default=None)
        text = f"{resumes[again]:.0f} ms ({LABELS[again]})" if again else "none can"
        lines.append(
            f"| {NAMES[corpus]}, {PLACES[place]} | **{ratio:.2f} x** ({LABELS[best]}) | {plain:.2f} x | "
            f"{begins[OURS]:.0f} ms, {begins[quick]:.0f} ms ({LABELS[quick]}) | {resumes.get(OURS, 0):.0f} ms, {text} |"
        )
    return lines


def chart(figures: Figures, path: Path) -> None:
    """Samples a second, the better worker count, one panel a case."""
    corpora = list(dict.fromkeys(corpus for corpus, _ in figures.cases))
    places = list(dict.fromkeys(place for _, place in figures.cases))
    fig, axes = plt.subplots(len(corpora), len(places), figsize=(11, 2.9 * len(corpora)), squeeze=False)
    for (corpus, place), axis in zip(figures.cases, axes.flat, strict=False):
        names = figures.contenders(corpus, place)[::-1]
        rates = [figures.typical(corpus, place, name, rate, max) for name in names]
        colors = ["#c2410c" if n == OURS else "#fdba74" if n == "ours_defaults" else "#94a3b8" for n in names]
        bars = axis.barh([LABELS[name].strip("*") for name in names], rates, color=colors)
        axis.bar_label(bars, labels=[f"{value:,.0f}" for value in rates], padding=3, fontsize=8)
        axis.set_title(f"{NAMES[corpus]}, {PLACES[place]}", fontsize=10)
        axis.set_xlim(0, max(rates) * 1.18)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    fig.supxlabel("samples/s, the better of 0 and 2 workers", fontsize=9)
    fig.tight_layout()
    fig.savefig(path, dpi=110)


def runs() -> list[str]:
    """All that are kept, the main one first."""
    return sorted(map(str, RESULTS.glob("peers*.json")), key=lambda path: (Path(path).stem != "peers", path))


def merged(results: list[dict]) -> dict:
    """The rows of several runs; what is in more than one counts in the first of them only."""
    first, *others = results
    for other in others:
        known = set(map(_case, first["rows"]))
        first["rows"] += [row for row in other["rows"] if _case(row) not in known]
        first["versions"] |= other["versions"]
    return first


def server(limits: list[dict], corpus: str) -> list[str]:
    """What the server could do, a sentence."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for row in limits:
        if row["corpus"] == corpus:
            size = row.get("range_mb")
            found["whole shards" if size is None else f"ranges of {size} MB"].append(row["bytes_a_second"] / 1e6)
    text = ", ".join(f"{name} {median(speeds):,.0f} MB/s" for name, speeds in found.items())
    return [f"The server's own limit, to `curl` at four requests at a time: {text}."] if text else []


def _case(row: dict) -> tuple:
    return row["contender"], row["corpus"], row["place"], row["workers"]


def page(result: dict, figures: Figures) -> str:
    """All that stands between the marks."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    machine = result["machine"]
    counted = Counter(map(_case, result["rows"])).values()
    counts = f"{max(counted)} rounds" + (f", some cases {min(counted)}" if min(counted) < max(counted) else "")
    lines = [
        f"Python {machine['python']}, {machine['cpus']} cores ({machine['machine']}), {counts}. {versions}.", "",
        *summary(figures), "",
        "![Samples a second of all contenders, corpus by corpus](benchmarks.png)", "",
    ]  # fmt: skip
    for corpus, place in figures.cases:
        lines += [f"### {NAMES[corpus]}, {PLACES[place]}", ""]
        if place == "s3":
            lines += [*server(result["server"], corpus), ""]
        lines += [*table(figures, corpus, place), ""]
    if figures.failed:
        told = sorted(
            {f"{LABELS[r['contender']]} ({r['corpus']}, {r['place']})".replace("*", "") for r in figures.failed}
        )
        lines += [f"Runs that failed and are left out: {len(figures.failed)}: {'; '.join(told)}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", default=runs(), help="one run or more")
    args = parser.parse_args()
    result = merged([json.loads(Path(path).read_text()) for path in args.input])
    figures = Figures(result["rows"])
    chart(figures, PAGE.with_suffix(".png"))
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{page(result, figures)}{END}{rest.partition(END)[2]}")
    print("\n".join(summary(figures)))


if __name__ == "__main__":
    main()
