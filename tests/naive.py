"""An independent, slow model of the order: plain loops and lists, written from the definition and not from the code.

It shares with the package only the raw random words. Where the package computes, this simulates.
"""

from __future__ import annotations

from fractions import Fraction

from streamshard.order.random import bounded, permutation, raw_words, stream_key


def epoch_slots(total: int, epoch: int, parts: int, repeat: bool, offset: int = 0) -> list[int]:
    """How many slots of each residue there are in the epoch, by counting them."""
    first = offset + epoch * total if repeat else 0
    counts = [0] * parts
    for slot in range(first, first + total):
        counts[slot % parts] += 1
    return counts


def partition_reads(
    samples: list[int], *, seed: int, epoch: int, parts: int, interleave: int, run: int, shuffle: bool, repeat: bool,
    path: str = "", offset: int = 0,
) -> list[list[tuple[int, int]]]:  # fmt: skip
    """(shard, row) in reading order, for each partition."""
    shards = list(range(len(samples)))
    if shuffle:
        shards = permutation(stream_key(seed, epoch, "shards", path), len(samples)).tolist()
    sequence = [(shard, row) for shard in shards for row in range(samples[shard])]
    reads = []
    for count in epoch_slots(len(sequence), epoch, parts, repeat, offset):
        mine, sequence = sequence[:count], sequence[count:]
        stripes = []
        for i in range(interleave):
            length = count // interleave + (1 if i < count % interleave else 0)
            stripes.append(mine[:length])
            mine = mine[length:]
        order: list[tuple[int, int]] = []
        while min(len(stripe) for stripe in stripes) >= run:
            for i, stripe in enumerate(stripes):
                order += stripe[:run]
                stripes[i] = stripe[run:]
        for stripe in stripes:
            order += stripe
        reads.append(order)
    assert not sequence
    return reads


def shuffled(reads: list, *, seed: int, epoch: int, p: int, buffer: int, initial: int = 32, path: str = "") -> list:
    """What leaves the shuffle buffer, by holding one."""
    waiting = list(reads)
    held = [waiting.pop(0) for _ in range(min(buffer, initial, len(waiting)))]
    out: list = []
    draw_key = stream_key(seed, epoch, "slot", path, p)
    while waiting:
        word = raw_words(draw_key, len(out), 1)
        slot = int(bounded(word, len(held))[0])
        out.append(held[slot])
        held[slot] = waiting.pop(0)
        if len(held) < buffer and waiting:
            held.append(waiting.pop(0))
    for slot in permutation(stream_key(seed, epoch, "drain", path, p), len(held)).tolist():
        out.append(held[slot])
    return out


def partition_orders(samples: list[int], *, seed: int = 0, epoch: int = 0, parts: int = 4, interleave: int = 2,
                     run: int = 16, buffer: int = 512, shuffle: bool = True, repeat: bool = False,
                     ) -> list[list[tuple[int, int]]]:  # fmt: skip
    """(shard, row) in the order in which each partition emits them."""
    interleave, buffer = (interleave, buffer) if shuffle else (1, 1)
    reads = partition_reads(samples, seed=seed, epoch=epoch, parts=parts, interleave=interleave, run=run,
                            shuffle=shuffle, repeat=repeat)  # fmt: skip
    return [shuffled(order, seed=seed, epoch=epoch, p=p, buffer=buffer) for p, order in enumerate(reads)]


def in_slot_order(items: list[list], turns: list[int] | None = None) -> list:
    """The items of all partitions by (turn, partition)."""
    turns = turns or [0] * len(items)
    slots = [(turn + i, p, item) for p, (turn, row) in enumerate(zip(turns, items, strict=True))
             for i, item in enumerate(row)]  # fmt: skip
    return [item for _, _, item in sorted(slots, key=lambda slot: slot[:2])]


def best_fit_rounds(
    lengths: list[int], size: int, window: int, overflow: str = "split", keys: list | None = None
) -> list[list[list[tuple]]]:
    """Rounds of rows of (document, start, length), by trying every row: what `Pack` has to do but for the order in a round.

    keys: what documents of one length are ordered by; default the order in which they come.
    """
    keys = keys if keys is not None else list(range(len(lengths)))
    waiting = list(enumerate(lengths))
    carried: list[tuple[int, int, int, int]] = []  # document, start, length, rounds waited
    rounds = []
    ended = False
    while not ended:
        read, waiting = waiting[:window], waiting[window:]
        ended = len(read) < window
        pieces, leaving = list(carried), []
        for document, length in read:
            if length <= size:
                pieces.append((document, 0, length, 0))
            elif overflow == "truncate":
                pieces.append((document, 0, size, 0))
            elif overflow == "split":
                pieces += [(document, start, min(size, length - start), 0) for start in range(0, length, size)]
        rows: list[list[tuple[int, int, int, int]]] = []
        for piece in sorted(pieces, key=lambda piece: (piece[3] < 2, -piece[2], keys[piece[0]], piece[1])):
            if piece[2] == size:
                leaving.append([piece])
                continue
            fits = [row for row in rows if sum(p[2] for p in row) + piece[2] <= size]
            if fits:
                max(fits, key=lambda row: sum(p[2] for p in row)).append(piece)
            else:
                rows.append([piece])
        rows.sort(key=lambda row: -sum(p[2] for p in row))
        keep = len(rows) if ended else max(1, len(rows) * 9 // 10)
        stay = [row for place, row in enumerate(rows) if place >= keep and all(p[3] < 2 for p in row)]
        leaving += [row for row in rows if row not in stay]
        carried = [(d, start, length, waited + 1) for row in stay for d, start, length, waited in row]
        carried.sort(key=lambda piece: (keys[piece[0]], piece[1]))
        rounds.append([sorted(piece[:3] for piece in row) for row in leaving])
    return rounds


def source_log(
    samples: list[int], path: str, offset: int, p: int, *, seed: int, parts: int, buffer: int, epochs: int
) -> list:
    """(shard, row) of a mixture's source in one partition, epoch after epoch."""
    log = []
    for epoch in range(epochs):
        reads = partition_reads(samples, seed=seed, epoch=epoch, parts=parts, interleave=2, run=16, shuffle=True,
                                repeat=True, path=path, offset=offset)[p]  # fmt: skip
        log += shuffled(reads, seed=seed, epoch=epoch, p=p, buffer=buffer, path=path) if reads else []
    return log


def mixed(logs: list[list], lengths: list[dict], weights: list, p: int, parts: int, *, tokens: bool, mean: int, draws: int,
          schedule: list = ()) -> list[tuple[int, tuple[int, int]]]:  # fmt: skip
    """(source, (shard, row)) of a partition, each weight an exact fraction of one. Sources never end."""
    segments = [(0, weights), *schedule]

    def draw(credit: list, weights: list, longest: int, by_tokens: bool) -> int:
        due = {}
        for j, weight in enumerate(weights):
            if weight and (credit[j] >= 0 if by_tokens else credit[j] + weight > 0):
                due[j] = (longest - credit[j]) / weight
        return min(due, key=lambda j: (due[j], j))

    step = max(n for n in range(2, max(2, 1000 // parts) + 1) if all(n % d for d in range(2, n)))
    credit = [Fraction(0)] * len(weights)
    for _ in range(p * step):
        j = draw(credit, weights, 1, False)
        credit = [c + w - (i == j) for i, (c, w) in enumerate(zip(credit, weights, strict=True))]
    credit = [c * (mean if tokens else 1) for c in credit]
    out, used, total, longest = [], [0] * len(weights), 0, 0
    for _ in range(draws):
        now = [w for start, w in segments if parts * total >= start][-1]
        orphaned = sum(c for c, w in zip(credit, now, strict=True) if not w)
        credit = [c + orphaned * w if w else Fraction(0) for c, w in zip(credit, now, strict=True)]
        j = draw(credit, now, longest if tokens else 1, tokens)
        ref = logs[j][used[j]]
        used[j] += 1
        length = lengths[j][ref]
        amount = max(1, length) if tokens else 1
        longest, total = max(longest, amount), total + length
        credit = [c + w * amount - (amount if i == j else 0) for i, (c, w) in enumerate(zip(credit, now, strict=True))]
        out.append((j, ref))
    return out
