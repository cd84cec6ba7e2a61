"""What a saved cursor says about a step that holds items back, without the step: from the fingerprint alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamshard.order.cursor import Cursor
from streamshard.steps.carried import decode
from streamshard.steps.counts import Counts, thaw


class Held(NamedTuple):
    """At a cursor: what had left, documents (or rests of them) that wait, and rows of an unfinished window that had left."""

    step: str
    counted: Cursor  # see `Tally`
    waiting: int
    rows: int

    @property
    def counts(self) -> Counts:
        return thaw(self.counted)


def held_in(fingerprints: Sequence[Mapping[str, Any]], cursor: Cursor) -> Held | None:
    """Of the last step that counts, among steps with these fingerprints; None if there is none."""
    for found in reversed(fingerprints):
        if found["step"] == "Pack" and found["algorithm"] == "concat":
            return Held("Pack", cursor[-1], len(decode(cursor[1])), 0)
        if found["step"] in ("Pack", "BucketBatch"):
            return Held(found["step"], cursor[-1], len(decode(cursor[0][1])), cursor[1])
        if found["step"] == "TokenBatch":
            return Held("Batch", cursor[-1], 0, 0)
        if found["step"] != "Map" or found["batch"] is not None:
            cursor = cursor[0]
    return None
