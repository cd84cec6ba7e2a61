"""Which source gives the next sample, in exact integers. Pure: no data, no clock, no floats.

Every source has a *credit*: what it is owed, in units of 1 / W of a draw. A draw of length L (1 if samples are counted, the
sample's tokens if tokens are) raises source j's credit by weight_j * L and lowers that of the source that gave it by W * L, so
that credits always add up to 0. Among the sources that are owed enough, the next is the one that would be overdue first; so no
credit ever exceeds one draw, the longest one if tokens are counted: shares are right at every moment and not on average.

All partitions follow the same rule from different *phases*. Without them every partition would draw the same source at the same
turn, and a global batch would be all of one source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

UNSCALED = -1  # as longest draw: none yet, and credits are in draws, because how long one is was not known
SCALE = 10**9  # W: what the weights of a segment add up to

Weights = tuple[int, ...]


def shared(total: int, weights: Sequence[Fraction | int]) -> list[int]:
    """`total` divided in proportion to `weights`, in integers by largest remainder, ties by order. Exact for either sign."""
    whole = sum(weights)
    exact = [abs(total) * Fraction(weight) / whole for weight in weights]
    parts = [int(part) for part in exact]
    order = sorted(range(len(parts)), key=lambda j: (parts[j] - exact[j], j))
    for j in order[: abs(total) - sum(parts)]:
        parts[j] += 1
    return parts if total >= 0 else [-part for part in parts]


def integer_weights(weights: Sequence[float]) -> Weights:
    """Weights as integers that add up to `SCALE`; a positive one stays positive."""
    found = shared(SCALE, [Fraction(weight) for weight in weights])
    return tuple(max(found[j], 1) if weights[j] > 0 else 0 for j in range(len(weights)))


@dataclass(frozen=True)
class Plan:
    """What a mixture was asked for: (from how many tokens on, weights), the first from 0; and whether tokens are counted."""

    segments: tuple[tuple[int, Weights], ...]
    tokens: bool

    @property
    def sources(self) -> int:
        return len(self.segments[0][1])

    @property
    def largest(self) -> Weights:
        """Each source's largest weight."""
        return tuple(map(max, zip(*(weights for _, weights in self.segments), strict=True)))


class Mixer:
    """One partition's draws. `choose`, then `drew` or `leave`; what it has to remember is in its fields.

    owed: credits at the start. parts: P; a segment begins in a partition when the partition's own tokens reach its share of the
    mixture's. done: sources that have left. tokens: given by this partition so far. longest: the longest draw so far.
    """

    def __init__(
        self, plan: Plan, parts: int, owed: Sequence[int], done: Sequence[bool], *, tokens: int = 0, longest: int = 0
    ) -> None:
        self._parts = parts
        self.credits = list(owed)
        self.done = list(done)
        self.tokens = tokens
        self.longest = longest
        self._plan = plan
        self._segment = -1  # to be found
        self._total = 1

    def choose(self) -> int | None:
        """The source of the next draw; None when no source that has a weight is left."""
        if self._segment < 0 or self._next_begins():
            self._enter()
        owed, weights, best = self.credits, self._weights, -1
        tokens = self._plan.tokens
        reach = self._total * max(0, self.longest) if tokens else self._total
        for j in self._weighted:
            credit = owed[j]
            if credit < 0 if tokens else credit + weights[j] <= 0:
                continue
            # Least (W * longest - credit) / weight, in integers.
            if best < 0 or (reach - credit) * weights[best] < (reach - owed[best]) * weights[j]:
                best = j
        return best if best >= 0 else None

    def drew(self, source: int, length: int) -> None:
        """`source` gave a sample of `length` tokens (of 0: counts as one)."""
        self.tokens += length
        amount = max(1, length) if self._plan.tokens else 1
        if self.longest == UNSCALED and self._plan.tokens:
            self.credits = [credit * amount for credit in self.credits]
        self.longest = max(self.longest, amount)
        for j in self._weighted:
            self.credits[j] += self._weights[j] * amount
        self.credits[source] -= self._total * amount

    def may_give(self, source: int) -> bool:
        """Whether `source` can be drawn some time."""
        return not self.done[source] and self._plan.largest[source] > 0

    def leave(self, source: int) -> None:
        """`source` has nothing more to give."""
        self.done[source] = True
        self._segment = -1

    def back(self, source: int) -> None:
        """`source` can give again."""
        self.done[source] = False
        self._segment = -1

    def _next_begins(self) -> bool:
        following = self._segment + 1
        return following < len(self._plan.segments) and self._parts * self.tokens >= self._plan.segments[following][0]

    def _enter(self) -> None:
        """The segment of this moment, a function of tokens and of who has left: the last that has begun, or the next one in
        which somebody has a weight. Those who have none hand what they are owed, or owe, to the others.
        """
        segments = self._plan.segments
        begun = max(i for i, (start, _) in enumerate(segments) if self._parts * self.tokens >= start)
        for i in range(begun, len(segments)):
            weights = [0 if done else weight for weight, done in zip(segments[i][1], self.done, strict=True)]
            if any(weights):
                break
        self._segment, self._weights, self._total = i, weights, sum(weights)
        self._weighted = [j for j, weight in enumerate(weights) if weight]
        orphaned = sum(credit for credit, weight in zip(self.credits, weights, strict=True) if not weight)
        if self._weighted and any(credit for credit, weight in zip(self.credits, weights, strict=True) if not weight):
            gained = shared(orphaned, [weights[j] for j in self._weighted])
            self.credits = [credit if weight else 0 for credit, weight in zip(self.credits, weights, strict=True)]
            for j, gain in zip(self._weighted, gained, strict=True):
                self.credits[j] += gain


def phases(plan: Plan, parts: int, mean_length: int) -> list[list[int]]:
    """The credits with which each partition begins: those of the pure schedule of samples after p * K draws, K a prime.

    mean_length: of a sample, where tokens are counted.
    """
    step = _largest_prime(max(2, 1000 // parts))
    weights = plan.segments[0][1]
    mixer = Mixer(Plan(((0, weights),), tokens=False), 1, [0] * plan.sources, [False] * plan.sources)
    found = []
    for _ in range(parts):
        found.append([credit * mean_length if plan.tokens else credit for credit in mixer.credits])
        for _ in range(step):
            source = mixer.choose()
            assert source is not None  # weights are checked
            mixer.drew(source, 1)
    return found


def _largest_prime(most: int) -> int:
    return next(n for n in range(most, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1)))


def buffers(slots: int, largest: Sequence[int]) -> list[int]:
    """How many slots of a shuffle buffer of `slots` each source gets, by its largest weight."""
    return [max(1, slots * weight // sum(largest)) for weight in largest]
