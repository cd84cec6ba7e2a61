"""Every benchmark but the one beside other libraries, one after the other: ``make figures``."""

from __future__ import annotations

from benchmarks import displacement, equal_steps, first_batch, loader, manifest, memory, speed, storage, tracking


def main() -> None:
    for benchmark in (displacement, manifest, speed, first_batch, memory, loader, tracking, equal_steps):
        print(f"\n== {benchmark.__name__}")
        benchmark.main()
    print("\n== benchmarks.storage")
    storage.main([])


if __name__ == "__main__":
    main()
