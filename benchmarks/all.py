"""Every benchmark, one after the other: ``make bench``."""

from __future__ import annotations

from benchmarks import displacement, first_batch, loader, manifest, memory, speed, storage


def main() -> None:
    for benchmark in (displacement, manifest, speed, first_batch, memory, loader):
        print(f"\n== {benchmark.__name__}")
        benchmark.main()
    print("\n== benchmarks.storage")
    storage.main([])


if __name__ == "__main__":
    main()
