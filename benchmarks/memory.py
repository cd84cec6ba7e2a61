"""Resident memory while 5 GB go through a default dataset. ``python -m benchmarks.memory``.

The data are a 1 GB token dataset on a local directory, read over and over (``repeat=True``), so that the figure does not
need 5 GB of disk. What is counted are uncompressed bytes of samples.
"""

from __future__ import annotations

import argparse

import streamshard as ss
from benchmarks.corpora import token_dataset
from benchmarks.report import save

PAGE = 4096


def resident() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--documents", type=int, default=625_000, help="1 GB of tokens")
    args = parser.parse_args()
    directory = token_dataset(args.documents)
    before = resident()
    dataset = ss.StreamDataset(directory, repeat=True)
    read, step, marks = 0, args.gigabytes * 1e9 / 20, []
    for sample in dataset:
        read += sample["tokens"].nbytes
        if read >= step * (len(marks) + 1):
            marks.append({"gigabytes": read / 1e9, "resident_mb": (resident() - before) / 1e6})
            print(f"{read / 1e9:5.2f} GB read: {marks[-1]['resident_mb']:6.0f} MB beyond the imports", flush=True)
            if len(marks) == 20:
                break
    late = [mark["resident_mb"] for mark in marks[5:]]
    print(f"from a quarter on: {min(late):.0f} to {max(late):.0f} MB")
    return save("memory", {"marks": marks, "late_min": min(late), "late_max": max(late)})


if __name__ == "__main__":
    main()
