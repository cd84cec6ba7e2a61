"""Ranks are killed at random moments, and what was committed in the end is what an undisturbed run trains on."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import pytest

import streamshard as ss
from tests.conftest import write_dataset
from tests.distributed.launch import start
from tests.distributed.scenarios_chaos import SIZE, last_checkpoint, loader_of

COUNT = 1152  # an epoch has 288 micro-batches, six of each partition: none lies in two epochs
TOPOLOGIES = [(1, 0), (1, 2), (2, 0), (2, 3), (3, 1), (4, 0), (4, 1), (4, 2)]  # ranks and workers that divide 48


def survive(folder, url, kills, seed):
    """Lives that are killed, every second one of four ranks, and one that is not; what counts for each slot in the end."""
    chance, slots = random.Random(seed), 320 + 24 * kills
    trained = {}
    for number in range(kills + 1):
        begin, _ = last_checkpoint(folder)
        ranks, workers = (4, chance.choice((0, 1, 2))) if number % 2 == 0 else chance.choice(TOPOLOGIES)
        killed = number < kills
        # Enough to do for every life; the last one goes on to the end.
        asked = [
            url,
            str(folder),
            str(number),
            str(workers),
            str(begin + 4800 if killed else max(slots, begin + ranks)),
        ]
        done = start("scenarios_chaos.life", ranks, folder, *asked, str(chance.randrange(ranks) if killed else -1),
                     str(chance.uniform(0.01, 0.6)))  # fmt: skip
        assert (done.returncode != 0) == killed, done.stderr[-3000:]
        trained.update(logged(folder, number))
        if killed:  # what comes after the last checkpoint is done again
            kept, _ = last_checkpoint(folder)
            trained = {slot: ids for slot, ids in trained.items() if slot < kept}
    return trained


def logged(folder, number):
    found = {}
    for path in folder.glob(f"log-{number}-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the kill may have cut the last one
                slot, ids = json.loads(line)
                found[slot] = ids
    return found


def check(folder, url, kills, seed):
    trained = survive(folder, url, kills, seed)
    with loader_of(url, ss.Topology(0, 1), 0) as alone:
        undisturbed = [batch["id"].tolist() for batch in itertools.islice(alone, max(trained) + 1)]
    assert [trained[slot] for slot in sorted(trained)] == undisturbed
    if ":" in url:
        return
    counts = Counter(i for slot in range(COUNT // SIZE) for i in trained[slot])
    assert len(counts) == COUNT
    assert set(counts.values()) == {1}


def test_five_kills_change_nothing(tmp_path):
    check(tmp_path, write_dataset(tmp_path / "ds", COUNT), kills=5, seed=1)


@pytest.mark.parametrize("kind", ["packed", "buckets"])
def test_two_kills_change_nothing_of_a_mixture(tmp_path, kind):
    check(tmp_path, f"{kind}:{write_dataset(tmp_path / 'ds', COUNT)}", kills=2, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "buckets"])
@pytest.mark.parametrize("seed", range(2, 5))
def test_more_kills_change_nothing_of_a_mixture(tmp_path, kind, seed):
    check(tmp_path, f"{kind}:{write_dataset(tmp_path / 'ds', COUNT)}", kills=5, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 11))
def test_fifty_kills_change_nothing(tmp_path, seed):
    """Five more for each of nine seeds."""
    check(tmp_path, write_dataset(tmp_path / "ds", COUNT), kills=5, seed=seed)
