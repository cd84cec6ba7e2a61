"""A mixture in plain values: what of it is kept in the state, and what may change from one life to the next.

A mixture is *resolved* once: weights as integers, each source's share of the shuffle buffer and its place in the order. These
are kept in the state and never computed again, so that a source's own order does not move when others change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamshard.errors import StateError
from streamshard.order.mixture import Plan, buffers
from streamshard.sources import Mixture, Source
from streamshard.steps.pipeline import batch_fingerprint, steps_fingerprint

Resolved = dict[str, Any]  # JSON-safe: what of a mixture is kept in the state


def resolve(
    mixture: Mixture, slots: int, sizes: Mapping[str, int], earlier: Resolved | None = None, prefix: str = ""
) -> Resolved:
    """A mixture in plain values. slots: of the shuffle buffer. sizes: samples of each dataset by path.

    earlier: what an earlier life resolved; its sources keep their order, their buffers and their places, new ones follow.
    """
    known = {} if earlier is None else {source["name"]: source for source in earlier["sources"]}
    names = [*known, *(name for name in mixture.sources if name not in known)]
    listed = [*mixture.sources]
    largest = [mixture.plan.largest[listed.index(name)] for name in names]
    sources = []
    for name, share in zip(names, buffers(slots, largest), strict=True):
        source, policy = mixture.sources[name], mixture.exhausted[name]
        old = known.get(name, {})
        found: Resolved = {
            "name": name, "exhausted": policy, "max_epochs": mixture.max_epochs[name],
            "buffer": old.get("buffer", share),
        }  # fmt: skip
        if isinstance(source, Mixture):
            found["mixture"] = resolve(source, found["buffer"], sizes, old.get("mixture"), f"{prefix}{name}/")
        else:
            found["steps"], found["batch"] = steps_fingerprint(source.steps), batch_fingerprint(source.steps)
            found["only"] = source.only
            if "offset" in old:
                found["offset"] = old["offset"]
        sources.append(found)
    resolved: Resolved = {
        "unit": mixture.unit,
        "length": mixture.length,
        "segments": [
            [start, [weights[listed.index(name)] for name in names]] for start, weights in mixture.plan.segments
        ],
        "sources": sources,
    }
    if not prefix:
        _place(resolved, sizes)
    return resolved


def _place(resolved: Resolved, sizes: Mapping[str, int]) -> None:
    """Offsets for datasets that have none: behind all that were there before, in the order of listing."""
    leaves = dict(resolved_leaves(resolved))
    end = sum(sizes[path] for path, leaf in leaves.items() if "offset" in leaf)
    for path, leaf in leaves.items():
        if "offset" not in leaf:
            leaf["offset"] = end
            end += sizes[path]


def resolved_leaves(resolved: Resolved, prefix: str = "") -> Iterator[tuple[str, Resolved]]:
    """(path, resolved source) of every dataset."""
    for source in resolved["sources"]:
        path = prefix + source["name"]
        if "mixture" in source:
            yield from resolved_leaves(source["mixture"], f"{path}/")
        else:
            yield path, source


def plan_of(resolved: Resolved) -> Plan:
    """Its weights."""
    segments = tuple((start, tuple(weights)) for start, weights in resolved["segments"])
    return Plan(segments, tokens=resolved["unit"] == "tokens")


def changes(earlier: Resolved, now: Mixture, prefix: str = "") -> list[str]:
    """What differs, in words. Raises `StateError` for what cannot be changed in a run."""
    found = []
    for name, was, asked in (("unit", earlier["unit"], now.unit), ("length", earlier["length"], now.length)):
        if was != asked:
            raise StateError(
                f"the state was saved with a Mixture of {name}={was!r}, and this one has {name}={asked!r}: pass the "
                f"first, or start a new run"
            )
    known = {source["name"]: source for source in earlier["sources"]}
    for name in known:
        if name not in now.sources:
            raise StateError(
                f"source {prefix + name!r} of the state is not in this Mixture: list it with weight 0, which parks it, so that "
                f"it keeps its place"
            )
    for name, source in now.sources.items():
        if name not in known:
            found.append(f"source {prefix + name!r} is new")
        else:
            found += _source_changes(known[name], source, now, prefix + name)
    found += _weight_changes(earlier, now, prefix)
    return found


def _source_changes(was: Resolved, source: Source | Mixture, now: Mixture, path: str) -> list[str]:
    if isinstance(source, Mixture) != ("mixture" in was):
        raise StateError(f"source {path!r} is a mixture on one side only: give it another name")
    found = []
    if isinstance(source, Mixture):
        found += changes(was["mixture"], source, f"{path}/")
    elif was["only"] != source.only:
        raise StateError(
            f"source {path!r} was saved with only={was['only']!r} and has only={source.only!r}: give it another name"
        )
    elif (was["steps"], was["batch"]) != (steps_fingerprint(source.steps), batch_fingerprint(source.steps)):
        raise StateError(f"source {path!r} has other steps than in the state: use the same, or give it another name")
    for name, asked in (("exhausted", now.exhausted), ("max_epochs", now.max_epochs)):
        if was[name] != asked[was["name"]]:
            found.append(f"{name} of source {path!r} was {was[name]!r} and is {asked[was['name']]!r}")
    return found


def _weight_changes(earlier: Resolved, now: Mixture, prefix: str) -> list[str]:
    def by_name(names: Sequence[str], segments: Any) -> list[tuple[int, dict[str, int]]]:
        return [(start, {n: w for n, w in zip(names, weights, strict=True) if w}) for start, weights in segments]

    was = by_name([source["name"] for source in earlier["sources"]], earlier["segments"])
    asked = by_name([*now.sources], now.plan.segments)
    where = f" of {prefix.rstrip('/')!r}" if prefix else ""
    return [] if _alike(was, asked) else [f"the weights{where} were {_said(was)} and are {_said(asked)}"]


def _alike(one: list[tuple[int, dict[str, int]]], other: list[tuple[int, dict[str, int]]]) -> bool:
    """Whether weights are the same but for the last digit, which depends on the order of listing."""
    return len(one) == len(other) and all(
        a == b and x.keys() == y.keys() and all(abs(x[name] - y[name]) <= 1 for name in x)
        for (a, x), (b, y) in zip(one, other, strict=True)
    )


def _said(segments: list[tuple[int, dict[str, int]]]) -> str:
    shares = [
        (f"from {start} tokens " if start else "")
        + str({n: float(f"{w / sum(ws.values()):.6g}") for n, w in ws.items()})
        for start, ws in segments
    ]
    return ", ".join(shares)
