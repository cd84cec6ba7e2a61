"""A mixture gives its sources in their shares, each in its own order, and goes on exactly whatever happens."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import streamshard as ss
from streamshard.catalog import publish
from streamshard.cli.main import main
from streamshard.errors import DataError, StateError, UsageError
from streamshard.shard.manifest import column
from streamshard.steps.contract import Length
from streamshard.storage.open import open_store
from streamshard.testing import assert_exact_resume
from tests import naive

SIZES = {"web": 120, "code": 50, "math": 3}


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Three corpora: many short documents, fewer long ones, three."""
    folder, rng, found = tmp_path_factory.mktemp("mixture"), np.random.default_rng(0), {}
    for (name, count), mean in zip(SIZES.items(), (8, 30, 15), strict=True):
        found[name] = str(folder / name)
        with ss.DatasetWriter(found[name], shard_bytes=1 << 12, block_bytes=400, length_field="tokens") as writer:
            for number in range(count):
                tokens = np.full(1 + int(rng.exponential(mean)), number, np.uint16)
                writer.write({"id": f"{name}-{number}", "tokens": tokens})
    return found


def noisy(item, rng):
    return {**item, "tokens": item["tokens"] + rng.integers(0, 5, len(item["tokens"]), dtype=np.uint16)}


def twice(item):
    return [{**item, "half": half} for half in range(2)]


def only_id(item):
    return {"id": item["id"]}


def never(item):
    return False


def of(name):
    return lambda item: item["id"].startswith(name)


def flat(urls, weights=(0.6, 0.3, 0.1), **options):
    return ss.Mixture(urls, weights, **options)


def nested(urls, inner="repeat", outer="repeat"):
    text = ss.Mixture(
        {"web": ss.Source(urls["web"], ss.Map(noisy, rng=True)), "math": urls["math"]}, (0.7, 0.3), exhausted=inner
    )
    code = ss.Source(urls["code"], ss.FlatMap(twice))
    return ss.Mixture({"text": text, "code": code}, {"text": 2, "code": 1}, exhausted=outer)


def read(mixture, *steps, **options):
    options = {"partitions": 4, "shuffle_buffer": 16, "repeat": True, "provenance": True, "seed": 3, **options}
    return ss.StreamDataset(mixture, *steps, **options)


def take(dataset, count):
    return list(itertools.islice(iter(dataset), count))


def shares(items):
    tokens = Counter()
    for item in items:
        tokens[item["__ref__"].source] += len(item["tokens"])
    return {name: count / tokens.total() for name, count in tokens.items()}


# ----------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("unit", ["tokens", "samples"])
@pytest.mark.parametrize("parts", [1, 4, 7])
def test_the_sequence_is_that_of_the_naive_model(urls, unit, parts):
    schedule = [(900, (1, 0, 1)), (2500, (1, 3, 4))]
    mixture = flat(urls, (5, 4, 1), unit=unit, schedule=schedule)
    got = [item["__ref__"] for item in take(read(mixture, partitions=parts, shuffle_buffer=40), 60 * parts)]
    manifests = [ss.open_manifest(url) for url in urls.values()]
    mean = sum(m.total_length for m in manifests) // sum(m.total_samples for m in manifests)
    lengths = [
        {tuple(item["__ref__"][1:]): len(item["tokens"]) for item in ss.StreamDataset(url, provenance=True)}
        for url in urls.values()
    ]
    largest = [Fraction(1, 2), Fraction(2, 5), Fraction(1, 2)]
    buffers = [int(40 * weight / sum(largest)) for weight in largest]
    expected = []
    for p in range(parts):
        logs, offset = [], 0
        for name, manifest, buffer in zip(urls, manifests, buffers, strict=True):
            counts = manifest.sample_counts.tolist()
            epochs = 2 + 60 * parts // sum(counts)
            logs.append(
                naive.source_log(counts, name, offset, p, seed=3, parts=parts, buffer=buffer, epochs=epochs + 60)
            )
            offset += sum(counts)
        weights = [(start, [Fraction(w, sum(ws)) for w in ws]) for start, ws in [(0, (5, 4, 1)), *schedule]]
        drawn = naive.mixed(
            logs, lengths, weights[0][1], p, parts, tokens=unit == "tokens", mean=mean, draws=60, schedule=weights[1:]
        )
        expected.append([([*urls][source], *ref) for source, ref in drawn])
    assert [tuple(ref) for ref in got] == naive.in_slot_order(expected)


def test_rows_of_a_packed_mixture_are_those_of_the_naive_models_together(urls):
    """Mixture and packing simulated one after the other, from their definitions."""
    dataset = read(flat(urls, (5, 4, 1)), ss.Pack(48, window=11), partitions=1, shuffle_buffer=40)
    rows = take(dataset, 120)
    lengths, logs, places, offset = [], [], [], 0
    manifests = {name: ss.open_manifest(url) for name, url in urls.items()}
    mean = sum(m.total_length for m in manifests.values()) // sum(m.total_samples for m in manifests.values())
    for (name, manifest), buffer in zip(manifests.items(), (20, 16, 4), strict=True):
        counts = manifest.sample_counts.tolist()
        logs.append(naive.source_log(counts, name, offset, 0, seed=3, parts=1, buffer=buffer, epochs=60))
        places.append([(name, number // sum(counts), number % sum(counts) + 1) for number in range(len(logs[-1]))])
        stored = ss.StreamDataset(urls[name], provenance=True)
        lengths.append({tuple(item["__ref__"][1:]): len(item["tokens"]) for item in stored})
        offset += sum(counts)
    weights = [Fraction(w, 10) for w in (5, 4, 1)]
    drawn = naive.mixed(logs, lengths, weights, 0, 1, tokens=True, mean=mean, draws=330)
    used, keys = Counter(), []
    for source, _ in drawn:
        keys.append(places[source][used[source]])
        used[source] += 1
    rounds = naive.best_fit_rounds([lengths[source][ref] for source, ref in drawn], 48, 11, keys=keys)
    names = [*urls]
    found = [sorted((segment.ref, segment.offset, segment.length) for segment in row["__segments__"]) for row in rows]
    for expected in rounds[:-1]:  # the last one empties what the dataset carries on
        got, found = found[: len(expected)], found[len(expected) :]
        wanted = [
            sorted(((names[drawn[d][0]], *drawn[d][1]), start, length) for d, start, length in row) for row in expected
        ]
        assert sorted(got) == sorted(wanted)
    assert len(rounds) == 31


def test_every_source_has_its_share_of_tokens(urls):
    found = shares(take(read(flat(urls)), 5000))
    assert found == pytest.approx({"web": 0.6, "code": 0.3, "math": 0.1}, abs=0.003)


def test_a_mixture_in_a_mixture_has_a_share_that_it_divides(urls):
    found = shares(take(read(nested(urls)), 5000))
    assert found == pytest.approx({"text/web": 2 / 3 * 0.7, "text/math": 2 / 3 * 0.3, "code": 1 / 3}, abs=0.004)


def test_a_tiny_source_is_read_again_and_again_each_sample_as_often(urls):
    items = take(read(flat({n: urls[n] for n in ("web", "math")}, (1, 1), unit="samples")), 2400)
    assert Counter(item["__ref__"].source for item in items) == {"web": 1200, "math": 1200}
    often = Counter(item["id"] for item in items if item["id"].startswith("math")).values()
    assert max(often) - min(often) <= 1


def test_a_small_weight_is_served(urls):
    items = take(read(flat(urls, (0.998, 0.001, 0.001), unit="samples")), 8000)
    assert abs(Counter(item["__ref__"].source for item in items)["math"] - 8) <= 2


def test_a_parked_source_gives_nothing(urls):
    assert {item["__ref__"].source for item in take(read(flat(urls, (1, 0, 1))), 500)} == {"web", "math"}


def test_weights_as_names_or_in_order_are_the_same(urls):
    one, other = flat(urls, (6, 3, 1)), flat(urls, {"math": 1, "web": 6, "code": 3})
    assert [item["id"] for item in take(read(one), 50)] == [item["id"] for item in take(read(other), 50)]


def test_tokens_are_counted_where_they_are_said_to_be(urls):
    def counted(item):
        return {"id": item["id"], "__ref__": item["__ref__"], "n": len(item["tokens"])}

    sources = {name: ss.Source(url, ss.Map(counted)) for name, url in urls.items()}
    tokens = Counter()
    for item in take(read(ss.Mixture(sources, (6, 3, 1), length="n")), 3000):
        tokens[item["__ref__"].source] += item["n"]
    found = {name: count / tokens.total() for name, count in tokens.items()}
    assert found == pytest.approx({"web": 0.6, "code": 0.3, "math": 0.1}, abs=0.005)
    with pytest.raises(DataError, match="none in 'input_ids' or 'tokens'") as caught:
        take(read(ss.Mixture(sources, (6, 3, 1))), 1)
    assert "in a Mixture at source" in str(caught.value.__notes__)
    assert take(read(ss.Mixture(sources, (6, 3, 1), unit="samples")), 10)


# -------------------------------------------------------------------------------------------------------------- policies


def test_sources_that_drop_out_are_read_once_and_all(urls):
    items = [item["id"] for item in read(flat(urls, exhausted="drop"), repeat=False)]
    assert sorted(items) == sorted(f"{name}-{i}" for name, size in SIZES.items() for i in range(size))


def test_sources_are_read_as_often_as_they_may_be(urls):
    epochs = {"web": 1, "code": 2, "math": 7}
    dataset = read(flat(urls, max_epochs=epochs), repeat=False)
    often = Counter(item["id"] for item in dataset)
    assert often == {f"{name}-{i}": epochs[name] for name, size in SIZES.items() for i in range(size)}
    progress = dataset.sources()
    assert {name: (one.epochs, one.repeats) for name, one in progress.items()} == {
        "web": (1, 0), "code": (2, 50), "math": (7, 18),
    }  # fmt: skip
    second = Counter(item["id"] for item in dataset)
    assert second == often


def test_a_source_that_stops_ends_each_partition_and_what_is_left_is_counted(urls):
    dataset = read(flat(urls, exhausted={"code": "stop"}), repeat=False)
    items = list(dataset)
    often = Counter(item["__ref__"].source for item in items)
    assert often["code"] == SIZES["code"]
    left = dataset.counters()["web: samples left when the mixture stopped"]
    assert left == SIZES["web"] * -(-often["web"] // SIZES["web"]) - often["web"] or left < SIZES["web"]
    assert dataset.counters()["code: samples left when the mixture stopped"] == 0
    resumed = read(flat(urls, exhausted={"code": "stop"}), repeat=False)
    resumed.load_state_dict(dataset.state_dict())
    assert dataset.counters() == _counters_of(resumed, dataset.state_dict())


def _counters_of(dataset, state):
    return dataset.dropped(ss.state.decode_state(state).partitions)


def test_a_source_with_fewer_samples_than_partitions_cannot_stop_a_mixture(urls):
    with pytest.raises(UsageError, match="'math' has 3 samples for 4 partitions and exhausted='stop'"):
        take(read(flat(urls, exhausted={"math": "stop"}), repeat=False), 1)


def test_very_unequal_sources_are_read_as_they_were_asked_for(urls):
    items = take(read(flat({n: urls[n] for n in ("web", "math")}, (1e-9, 1), unit="samples")), 4000)
    assert Counter(item["__ref__"].source for item in items)["math"] >= 3998
    dataset = read(flat({n: urls[n] for n in ("web", "math")}, (1e-9, 1), exhausted="drop"), repeat=False)
    assert len(list(dataset)) == SIZES["web"] + SIZES["math"]


def test_a_dataset_of_mostly_empty_shards_finishes(tmp_path, urls):
    """1024 shards in the manifest, 25 of them with samples."""
    with ss.DatasetWriter(str(tmp_path)) as writer:
        for number in range(25):
            writer.write({"id": f"few-{number}", "tokens": np.arange(4, dtype=np.uint16)})
            writer._finish_shard()
    manifest = ss.open_manifest(str(tmp_path))
    assert len(manifest) == 25
    columns = {
        name: column([*getattr(manifest, name).tolist(), *[0] * 999])
        for name in ("samples", "bytes", "index_bytes", "index_digests", "lengths")
    }
    groups = (*manifest.groups, replace(manifest.groups[0], first=25, count=999))
    store = open_store(str(tmp_path))
    publish(store, replace(manifest, groups=groups, **columns), tag=store.stat("manifest.json").tag)
    mixture = ss.Mixture({"few": str(tmp_path), "web": urls["web"]}, (1, 0), exhausted="drop")
    assert len(list(read(mixture, repeat=False, partitions=16))) == 25


def test_a_search_that_finds_nothing_ends_with_an_error(urls):
    sources = {name: ss.Source(url, ss.Filter(never)) for name, url in urls.items()}
    with pytest.raises(DataError, match="dropped all|gave nothing"):
        take(read(ss.Mixture(sources, (1, 1, 1))), 1)
    with pytest.raises(DataError, match="gave nothing"):
        take(read(ss.Mixture(sources, (1, 1, 1), exhausted="drop")), 1)
    with pytest.raises(DataError, match="dropped all"):
        take(read(flat(urls), ss.Filter(never)), 1)


def test_a_filter_behind_a_mixture_waits_for_rare_sources(urls):
    """The tiny source has a hundred epochs before the other one has its turn."""
    mixture = flat({n: urls[n] for n in ("web", "math")}, (0.005, 0.995), unit="samples")
    items = take(read(mixture, ss.Filter(of("web")), partitions=2), 20)
    assert len(items) == 20


# ---------------------------------------------------------------------------------------------------------------- resume


MIXTURES = {
    "tokens": (flat, {}, {}),
    "samples": (flat, {"unit": "samples"}, {}),
    "schedule": (flat, {"schedule": [(300, (1, 1, 8)), (700, (0, 1, 0))]}, {}),
    "drop": (flat, {"exhausted": "drop"}, {"repeat": False}),
    "drop, repeated": (flat, {"exhausted": "drop"}, {}),
    "stop": (flat, {"exhausted": {"code": "stop"}}, {"repeat": False}),
    "stop, repeated": (flat, {"exhausted": {"code": "stop", "web": "drop"}}, {}),
    "two epochs": (flat, {"max_epochs": 2}, {"repeat": False}),
    "nested": (nested, {}, {}),
    "nested, drop": (nested, {"inner": "drop", "outer": "drop"}, {"repeat": False}),
    "nested, inner stop": (nested, {"inner": "stop", "outer": "drop"}, {"repeat": False, "partitions": 3}),
    "nested, inner drop, repeated": (nested, {"inner": "drop"}, {}),
}  # fmt: skip
STEPS = {
    "plain": (),
    "pack": (ss.Pack(48, window=9),),
    "buckets": (ss.BucketBatch([8, 16], 48, window=9, overflow="alone"),),
    "flat map, concat": (ss.FlatMap(twice), ss.Pack(48, algorithm="concat")),
    "filter, threads, pack": (ss.Filter(lambda item: len(item["tokens"]) > 3), ss.Map(noisy, rng=True, threads=2), ss.Pack(48, window=9)),
}  # fmt: skip


RESUMED = [(name, steps) for name in MIXTURES for steps in ("plain", "pack")]
RESUMED += [(name, steps) for name in ("tokens", "nested", "stop") for steps in STEPS if steps not in ("plain", "pack")]


@pytest.mark.parametrize(("name", "steps"), RESUMED)
def test_every_mixture_resumes_at_every_item(urls, name, steps):
    make, settings, options = MIXTURES[name]
    snapshot = "contents" if len(name) % 2 else "cursor"
    assert_exact_resume(
        lambda: read(make(urls, **settings), *STEPS[steps], snapshot=snapshot, **options),
        items=60 if options.get("repeat", True) else None,
        stops=None if (name, steps) == ("tokens", "plain") else range(0, 300, 7),
        chain=1,
    )


@pytest.mark.parametrize("steps", ["plain", "pack", "buckets"])
@pytest.mark.parametrize("name", ["tokens", "nested", "schedule"])
def test_random_lives_on_random_ranks_give_what_one_undisturbed_run_gives(urls, name, steps):
    """Kills at random moments, random numbers of ranks and workers, states through a full merge."""
    make, settings, _ = MIXTURES[name]
    draw = random.Random(f"{name} {steps}")

    def loader(rank, ranks, workers):
        made = STEPS[steps] if steps != "plain" else (ss.Map(only_id),)
        dataset = read(make(urls, **settings), *made, partitions=12, topology=ss.Topology(rank, ranks))
        size = (
            12 // ranks if steps != "buckets" else None
        )  # then batches are taken singly, twelve by all ranks together
        return ss.StreamLoader(dataset, batch_size=size, workers=workers, start_method="fork")

    def items(batch):
        if steps == "buckets":
            return [str(batch["input_ids"].tolist())]
        return batch["id"] if "id" in batch else [str(row) for row in batch["input_ids"].tolist()]

    alone = loader(0, 1, 0)
    got, state, counted = [], None, []
    for life in range(5):
        ranks = draw.choice([1, 2, 3, 4, 6])
        workers = draw.choice([0, 0, 2]) if life == 2 and 12 % (2 * ranks) == 0 else 0
        loaders = [loader(rank, ranks, workers) for rank in range(ranks)]
        for one in loaders if state else ():
            one.load_state_dict(state)
        steps_taken, saved_after = (draw.randint(1, 6) * (12 // ranks if steps == "buckets" else 1) for _ in range(2))
        batches, states = [], []
        for one in loaders:
            mine = []
            for number, batch in enumerate(itertools.islice(one, max(steps_taken, saved_after)), 1):
                mine.append(items(batch))
                if number == saved_after:
                    saved = one.state_dict()  # what comes after this is lost in the kill
                    progress = one.sources()
            batches.append(mine[:saved_after])
            states.append(saved)
            counted.append((life, progress))
            one.close()
        for step in zip(*batches, strict=True):
            got += (
                [[item] for item in itertools.chain(*step)] if steps == "buckets" else [sorted(itertools.chain(*step))]
            )
        state = ss.merge_states(states)
    expected = [sorted(items(batch)) for batch in itertools.islice(alone, len(got))]
    assert got == expected
    last = [progress for life, progress in counted if life == 4]
    total = {name: sum(one[name].samples for one in last) for name in last[0]}
    assert total == {name: one.samples for name, one in alone.sources().items()}
    alone.close()


# --------------------------------------------------------------------------------------------------------------- changes


def resumed_with(urls, state, mixture, *steps, **options):
    dataset = read(mixture, *steps, **options)
    dataset.load_state_dict(state, allow={"mixture"})
    return dataset


def state_after(urls, count, *steps, **settings):
    dataset = read(flat({n: urls[n] for n in ("web", "code")}, (2, 1), **settings), *steps)
    items = take(dataset, count)
    return items, dataset.state_dict()


def test_a_change_is_refused_by_name_unless_it_is_asked_for(urls):
    _, state = state_after(urls, 30)
    with pytest.raises(
        StateError, match=r"source 'math' is new; the weights were .*web.*0.666667.* and are .*allow={'mixture'}"
    ):
        read(flat(urls)).load_state_dict(state)
    with pytest.raises(StateError, match="the weights were"):
        read(flat({n: urls[n] for n in ("web", "code")}, (1, 1))).load_state_dict(state)
    with pytest.raises(StateError, match="exhausted of source 'web' was 'repeat' and is 'drop'"):
        read(flat({n: urls[n] for n in ("web", "code")}, (2, 1), exhausted={"web": "drop"})).load_state_dict(state)


def test_what_cannot_change_is_refused_even_then(urls):
    _, state = state_after(urls, 30)
    for mixture, message in [
        (flat({"web": urls["web"]}, (1,)), "source 'code' of the state is not in this Mixture: list it with weight 0"),
        (flat(urls, unit="samples"), "unit='tokens'"),
        (
            ss.Mixture({**urls, "web": ss.Source(urls["web"], ss.Filter(never))}, (1, 1, 1)),
            "source 'web' has other steps",
        ),
        (ss.Mixture({"web": urls["web"], "code": urls["math"]}, (2, 1)), "source 'code' was saved with version"),
        (ss.Mixture({"web": flat(urls), "code": urls["code"]}, (2, 1)), "'web' is a mixture on one side only"),
    ]:
        with pytest.raises(StateError) as caught:
            read(mixture).load_state_dict(state, allow={"mixture"})
        assert message in str(caught.value)
    with pytest.raises(StateError, match="saved with a Mixture, and this dataset reads one dataset"):
        ss.StreamDataset(urls["web"], partitions=4).load_state_dict(state)


def by_source(items):
    found = {}
    for item in items:
        found.setdefault(item["__ref__"].source, []).append(item["id"])
    return found


def test_sources_can_be_added_parked_and_weighted_anew_while_the_others_go_on(urls):
    _, state = state_after(urls, 60)
    for weights in ((1, 1, 2), (1, 0, 1), (0, 3, 1)):
        dataset = resumed_with(urls, state, flat(urls, weights))
        after = take(dataset, 900)
        found = shares(after)
        wanted = {name: w / sum(weights) for name, w in zip(urls, weights, strict=True) if w}
        assert found == pytest.approx(wanted, abs=0.02)


def test_in_one_partition_the_other_sources_go_on_at_their_own_cursors(urls):
    def open_dataset(mixture):
        return read(mixture, partitions=1)

    first = open_dataset(flat({n: urls[n] for n in ("web", "code")}, (2, 1)))
    before, state = take(first, 50), first.state_dict()
    undisturbed = by_source(take(open_dataset(flat({n: urls[n] for n in ("web", "code")}, (2, 1))), 2000))
    changed = open_dataset(flat({"math": urls["math"], "code": urls["code"], "web": urls["web"]}, (1, 1, 1)))
    changed.load_state_dict(state, allow={"mixture"})
    own = by_source([*before, *take(changed, 300)])
    for name in ("web", "code"):
        assert own[name] == undisturbed[name][: len(own[name])]


def test_removing_is_parking_and_a_parked_source_comes_back_where_it_was(urls):
    def open_dataset(weights):
        return read(flat(urls, weights), partitions=1)

    lives = [((1, 1, 1), 60), ((1, 0, 1), 60), ((1, 1, 1), 60)]
    items, state = [], None
    for weights, count in lives:
        dataset = open_dataset(weights)
        if state:
            dataset.load_state_dict(state, allow={"mixture"})
        items += take(dataset, count)
        state = dataset.state_dict()
    own, alone = by_source(items), by_source(take(open_dataset((1, 1, 1)), 400))
    for name in urls:
        assert own[name] == alone[name][: len(own[name])]
    assert len(json.loads(state["fingerprint"])["mixture"]) == 3


@pytest.mark.parametrize("steps", ["plain", "pack", "flat map, concat", "filter, threads, pack"])
def test_a_change_takes_effect_at_the_first_border_and_resumes_before_and_after_it(urls, steps):
    _, state = state_after(urls, 7, *STEPS[steps])

    def changed():
        return resumed_with(urls, state, flat(urls, (1, 1, 2)), *STEPS[steps])

    def key(item):
        return str(item.get("id", item.get("input_ids")))

    whole = [key(item) for item in take(changed(), 60)]
    for stop in range(1, 40):
        dataset = changed()
        got = [key(item) for item in take(dataset, stop)]
        resumed = read(flat(urls, (1, 1, 2)), *STEPS[steps])
        resumed.load_state_dict(dataset.state_dict())  # no change any more
        got += [key(item) for item in take(resumed, 60 - stop)]
        assert got == whole


def test_a_window_that_was_begun_is_finished_as_it_was_planned(urls):
    items, state = state_after(urls, 9, ss.Pack(48, window=20))
    undisturbed = [
        row["input_ids"].tolist()
        for row in take(read(flat({n: urls[n] for n in ("web", "code")}, (2, 1)), ss.Pack(48, window=20)), 60)
    ]
    changed = take(resumed_with(urls, state, flat(urls, (0, 0, 1)), ss.Pack(48, window=20)), 51)
    found = [row["input_ids"].tolist() for row in [*items, *changed]]
    same = sum(one == other for one, other in zip(found, undisturbed, strict=True))
    assert 9 < same < 60
    sources = [{segment.ref.source for segment in row["__segments__"]} for row in changed]
    assert sources[-1] == {"math"}


# ------------------------------------------------------------------------------------------------------------- and so on


def test_the_state_of_a_mixture_is_small_and_has_its_counters(urls):
    dataset = read(flat(urls), partitions=16)
    take(dataset, 500)
    state = dataset.state_dict()
    assert len(json.dumps(state)) < 8192
    progress = dataset.sources()
    resumed = read(flat(urls), partitions=16)
    resumed.load_state_dict(state)
    assert resumed.sources() == progress
    assert sum(one.samples for one in progress.values()) == 500


def test_a_loader_hands_a_mixture_out_and_counts_it(urls):
    with ss.StreamLoader(read(flat(urls), ss.Pack(48, window=9)), batch_size=4) as loader:
        for batch in itertools.islice(loader, 20):
            assert batch["input_ids"].shape == (4, 48)
        counts, progress = loader.counts(), loader.sources()
    assert set(counts.sources) == set(urls)
    assert counts.rows == 80
    assert set(progress) == set(urls)
    with pytest.raises(TypeError, match="repeat=True has no end"):
        len(loader)


def test_random_numbers_in_a_source_are_not_those_behind_the_mixture(urls):
    sources = {name: ss.Source(url, ss.Map(draw_into("inner"), rng=True)) for name, url in urls.items()}
    items = take(read(ss.Mixture(sources, (6, 3, 1)), ss.Map(draw_into("outer"), rng=True)), 50)
    assert all(item["inner"] != item["outer"] for item in items)


def draw_into(field):
    def draw(item, rng):
        return {**item, field: int(rng.integers(1 << 60))}

    return draw


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "pass a mapping of names"),
        ((["a"],), "pass a mapping of names"),
        (({"a/b": "x"}, (1,)), "called 'a/b'"),
        (({"a": 3}, (1,)), "source 'a' is a int"),
        (({"a": "x"},), "pass weights="),
        (({"a": "x", "b": "y"}, (1,)), "pass one for each of ['a', 'b']"),
        (({"a": "x", "b": "y"}, (1, -1)), "-1 for source 'b'; pass a number >= 0"),
        (({"a": "x", "b": "y"}, (1, float("nan"))), "nan for source 'b'"),
        (({"a": "x", "b": "y"}, (0, 0)), "all are 0"),
        (({"a": "x", "b": "y"}, {"a": 1}), "source 'b' has none; pass 0 to park it"),
        (({"a": "x", "b": "y"}, {"a": 1, "b": 1, "c": 1}), "no source is called 'c'"),
    ],
)
def test_mixtures_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(UsageError) as caught:
        ss.Mixture(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "bytes"}, "'tokens', 'samples'"),
        ({"exhausted": "end"}, "'end' for source 'a'"),
        ({"exhausted": {"c": "drop"}}, "no source is called 'c'"),
        ({"max_epochs": 0}, "0 for source 'a'"),
        ({"max_epochs": 2, "exhausted": "drop"}, "which reads it once"),
        ({"schedule": [(10, (1, 1)), (5, (1, 1))]}, "[0, 10, 5] must rise"),
        ({"schedule": [(-1, (1, 1))]}, "tokens an int >= 0"),
        ({"schedule": [10]}, "(tokens, weights) pairs"),
        ({"length": 3}, "the name of a field"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(UsageError) as caught:
        ss.Mixture({"a": "x", "b": "y"}, (1, 1), **options)
    assert message in str(caught.value)


def test_datasets_refuse_mixtures_that_cannot_work_with_them(urls):
    with pytest.raises(UsageError, match=r"Mixture\(web, code, math\) never ends.*pass repeat=True"):
        ss.StreamDataset(flat(urls))
    with pytest.raises(UsageError, match="a Source belongs into a Mixture"):
        ss.StreamDataset(ss.Source(urls["web"]))
    with pytest.raises(UsageError, match="a StreamDataset has an order of its own"):
        ss.Mixture({"a": ss.StreamDataset(urls["web"])}, (1,))
    with pytest.raises(UsageError, match="several manifests"):
        read(flat(urls)).manifest  # noqa: B018
    with pytest.raises(UsageError, match="who gives the next sample"):
        read(flat(urls)).skip(3)
    with pytest.raises(UsageError, match="is about a Mixture"):
        ss.StreamDataset(urls["web"]).sources()


def test_the_command_line_shows_what_a_mixture_has_had(urls, tmp_path, capsys):
    dataset = read(nested(urls), ss.Pack(48, window=9))
    take(dataset, 30)
    (tmp_path / "state.json").write_text(json.dumps(dataset.state_dict()))
    assert main(["state", "show", str(tmp_path / "state.json")]) == 0
    shown = capsys.readouterr().out
    for name, progress in dataset.sources().items():
        assert f"{name}: {progress.samples} samples, {progress.tokens} tokens" in shown
    assert main(["state", "show", str(tmp_path / "state.json"), "--data", urls["web"], "--buffers"]) == 2
    assert "buffers of a Mixture" in capsys.readouterr().err


def test_the_values_of_a_field_can_be_the_sources(tmp_path):
    """In one dataset, whose shards were split by the field while it was written."""
    url, rng = str(tmp_path / "all"), np.random.default_rng(0)
    with ss.DatasetWriter(url, length_field="tokens", split_by="lang", shard_bytes=1 << 12, block_bytes=400) as writer:
        for number in range(300):
            lang = ("en", "de", "fr")[min(2, int(rng.exponential(0.7)))]
            writer.write({"id": number, "lang": lang, "tokens": rng.integers(0, 9, 1 + number % 30, dtype=np.uint16)})
    mixture = ss.Mixture({lang: ss.Source(url, only=lang) for lang in ("de", "en")}, {"en": 1, "de": 1})
    items = take(read(mixture), 600)
    assert all(item["lang"] == item["__ref__"].source for item in items)
    assert shares(items) == pytest.approx({"de": 0.5, "en": 0.5}, abs=0.01)
    assert_exact_resume(lambda: read(mixture, ss.Pack(48, window=9)), items=40, chain=1)
    ended = [
        item["lang"]
        for item in read(ss.Mixture({"en": ss.Source(url, only="en")}, (1,), exhausted="drop"), repeat=False)
    ]
    assert ended == ["en"] * len(ended)
    assert len(ended) == read(mixture).manifests["en"].total_samples
    with pytest.raises(UsageError, match=r"'it' has only='it', and .* has lang in \['de', 'en', 'fr'\]"):
        take(read(ss.Mixture({"it": ss.Source(url, only="it")}, (1,))), 1)
    with pytest.raises(StateError, match="source 'en' was saved with only='en' and has only='fr'"):
        changed = ss.Mixture({"de": ss.Source(url, only="de"), "en": ss.Source(url, only="fr")}, (1, 1))
        read(changed).load_state_dict(read(mixture).state_dict())


def test_a_source_that_was_not_split_cannot_be_read_in_part(urls):
    with pytest.raises(UsageError, match="was not written with split_by="):
        take(read(ss.Mixture({"web": ss.Source(urls["web"], only="en")}, (1,))), 1)


# ------------------------------------------------------------------------------ what a review found, and stays mended


def test_phases_do_not_depend_on_bytes_where_lengths_are_not_known(tmp_path):
    """Few tokens and many bytes a sample, and no length_field: batches are mixed from the first one on."""
    urls = {name: str(tmp_path / name) for name in "ab"}
    for url in urls.values():
        with ss.DatasetWriter(url) as writer:
            for number in range(200):
                pixels = np.random.default_rng(number).integers(0, 255, 5000, dtype=np.uint8)
                writer.write({"id": number, "tokens": np.zeros(20, np.uint16), "pixels": pixels})
    items = take(read(ss.Mixture(urls, (1, 1)), partitions=16), 16 * 20)
    for at in range(0, len(items), 16):
        assert abs(Counter(item["__ref__"].source for item in items[at : at + 16])["a"] - 8) <= 4
    alone = [item["__ref__"].source for item in items[3::16]]
    assert abs(alone.count("a") - 10) <= 1


def test_rules_that_change_hold_from_the_border_on_and_a_source_that_left_comes_back(urls):
    def of_code(**settings):
        return flat({n: urls[n] for n in ("web", "code")}, (1, 1), **settings)

    before = read(of_code(exhausted={"code": "drop"}), partitions=2)
    items = take(before, 400)
    assert Counter(item["__ref__"].source for item in items)["code"] == SIZES["code"]
    after = resumed_with(urls, before.state_dict(), of_code(), partitions=2)
    assert shares(take(after, 600)) == pytest.approx({"web": 0.5, "code": 0.5}, abs=0.06)
    for stop in range(1, 24):
        before = read(of_code(), ss.Pack(48, window=9), partitions=1)
        take(before, stop)
        state = before.state_dict()
        take(resumed_with(urls, state, of_code(exhausted="drop"), ss.Pack(48, window=9), partitions=1), 30)


def test_epochs_are_counted_from_where_a_run_begins(urls):
    for first in (1, 2, 5):
        mixture = flat({n: urls[n] for n in ("math", "web")}, (1, 0.001), unit="samples", max_epochs={"math": 3})
        dataset = read(mixture, partitions=1)
        dataset.set_epoch(first)
        often = Counter(item["id"] for item in take(dataset, 60))
        assert [often[f"math-{n}"] for n in range(3)] == [3, 3, 3]


def test_worker_processes_hear_of_a_changed_mixture(urls):
    names = ("web", "code")
    first = read(flat({n: urls[n] for n in names}, (2, 1)), ss.Pack(48, window=9))
    take(first, 12)
    state = first.state_dict()
    found = []
    for workers in (0, 2):
        dataset = read(flat(urls, (1, 1, 1)), ss.Pack(48, window=9))
        with ss.StreamLoader(dataset, batch_size=4, workers=workers, start_method="fork") as loader:
            for _ in itertools.islice(loader, 2):
                pass
            loader.load_state_dict(state, allow={"mixture"})
            found.append([batch["input_ids"].tolist() for batch in itertools.islice(loader, 6)])
    assert found[0] == found[1]


def test_mixtures_that_never_end_are_seen_through(urls):
    inner = ss.Mixture({"web": urls["web"]}, (1,))
    for mixture in (
        ss.Mixture({"text": inner, "code": urls["code"]}, (1, 1), exhausted="drop"),
        ss.Mixture({"web": urls["web"], "code": urls["code"]}, (1, 0), exhausted={"code": "stop"}),
        ss.Mixture({"text": inner, "code": urls["code"]}, (1, 1), exhausted={"text": "stop"}),
    ):
        with pytest.raises(UsageError, match="never ends"):
            ss.StreamDataset(mixture)


def test_searches_of_every_policy_end(urls):
    web = ss.Source(urls["web"], ss.Filter(never))
    with pytest.raises(DataError, match="gave nothing"):
        take(read(ss.Mixture({"web": web}, (1,), exhausted="stop")), 1)
    for settings in ({"exhausted": {"code": "drop"}}, {"max_epochs": {"code": 1}}, {"schedule": [(10, (1, 0, 0))]}):
        with pytest.raises(DataError, match="dropped all"):
            take(read(flat(urls, **settings), ss.Filter(never)), 1)


def test_steps_of_sources_and_of_the_dataset_have_to_fit_together(urls):
    packed = {"web": ss.Source(urls["web"], ss.Pack(48, window=9))}
    with pytest.raises(UsageError, match=r"Pack\(48\) comes before Pack\(96\)"):
        read(ss.Mixture(packed, (1,)), ss.Pack(96))
    with pytest.raises(UsageError, match=r"gives batches, by Batch\(4\).*unit='samples'"):
        ss.Mixture({"web": ss.Source(urls["web"], ss.Batch(4))}, (1,))
    dataset = read(ss.Mixture(packed, (1,)), partitions=1, provenance=False)
    rows = take(dataset, 20)
    assert dataset.sources()["web"].tokens == sum(int((row["segment_ids"] >= 0).sum()) for row in rows)


def test_a_load_that_is_refused_leaves_nothing_behind(urls):
    _, state = state_after(urls, 20)
    refused = read(flat(urls), seed=4)
    with pytest.raises(StateError, match="seed"):
        refused.load_state_dict(state, allow={"mixture"})
    assert [item["id"] for item in take(refused, 30)] == [item["id"] for item in take(read(flat(urls), seed=4), 30)]


def test_reading_anew_gives_its_memory_back(urls):
    inner = ss.Mixture({"web": urls["web"], "code": urls["code"]}, (1, 3), exhausted={"code": "stop"})
    mixture = ss.Mixture({"inner": inner, "math": urls["math"]}, (5, 1))
    dataset = read(mixture, partitions=2)
    waiting = []
    for number, _ in enumerate(itertools.islice(iter(dataset), 3000)):
        if number % 300 == 0:
            waiting.append(dataset.storage_counters().lookahead_bytes)
    assert max(waiting[3:]) <= 2 * max(waiting[:3])


def test_a_nested_mixture_that_is_added_has_phases(urls):
    first = read(ss.Mixture({"web": urls["web"]}, (1,)), partitions=8)
    take(first, 16)
    text = ss.Mixture({"code": urls["code"], "again": urls["web"]}, (1, 1), unit="samples")
    mixture = ss.Mixture({"web": urls["web"], "text": text}, (0, 1))
    items = take(resumed_with(urls, first.state_dict(), mixture, partitions=8), 80)
    for at in range(0, 80, 8):
        assert 2 <= Counter(item["__ref__"].source for item in items[at : at + 8])["text/code"] <= 6


def test_the_order_of_listing_is_no_change(urls):
    dataset = read(ss.Mixture(urls, (1, 1, 1)))
    take(dataset, 9)
    relisted = ss.Mixture({name: urls[name] for name in ("math", "web", "code")}, (1, 1, 1))
    read(relisted).load_state_dict(dataset.state_dict())


@pytest.mark.parametrize("length", [np.int64(5), np.int32(5)])
def test_lengths_may_be_of_any_kind_of_int(length):
    assert Length("n", needed=True)({"n": length}) == 5
    with pytest.raises(DataError, match="'n' is a float; the length of a sample is an int"):
        Length("n", needed=True)({"n": 5.0})
    with pytest.raises(UsageError, match="a URL or a Mixture, not a dict"):
        ss.StreamDataset({"web": "x"})


def test_a_change_that_finds_no_border_is_told(urls, caplog):
    """A filter that drops the last output of every sample: the source is never between two."""
    steps = (ss.FlatMap(twice), ss.Filter(lambda item: item["half"] == 0))
    names = ("web", "code")
    before = read(flat({n: urls[n] for n in names}, (1, 1)), *steps, partitions=1)
    take(before, 3)
    after = resumed_with(urls, before.state_dict(), flat({n: urls[n] for n in names}, (1, 3)), *steps, partitions=1)
    with caplog.at_level("WARNING", logger="streamshard"):
        take(after, 1200)
    assert caplog.text.count("has not taken effect in partition 0 after 1000 items") == 1


def test_a_source_that_is_closed_gives_its_look_ahead_back(urls):
    dataset = read(flat(urls), partitions=2)
    iteration = dataset.open_share(dataset.shares(0)[0])
    items = iter(iteration.open())
    next(items)
    iteration.begin_speculation()
    next(items)
    assert iteration._ahead.outstanding > 0
    for run in iteration.runs:
        run.source.close()
    assert iteration._ahead.outstanding == 0
    iteration.close()


@pytest.mark.parametrize("pack", [ss.Pack(48, window=9), ss.Pack(48, algorithm="concat"), ss.Batch(max_tokens=400)])
def test_a_sample_counts_once_however_many_documents_come_of_it_between_those_of_others(urls, pack):
    def open_dataset():
        return read(nested(urls, inner="drop", outer="drop"), pack, repeat=False)

    whole = open_dataset()
    list(whole)
    for counts in (whole.counts(), _counted_in_lives(open_dataset, 11)):
        found = {path: (one.samples, one.documents) for path, one in counts.sources.items()}
        assert found == {"text/web": (120, 120), "text/math": (3, 3), "code": (50, 100)}


def _counted_in_lives(open_dataset, items):
    """Of an epoch in lives of so many items."""
    dataset = open_dataset()
    while len(take(dataset, items)) == items:
        state = dataset.state_dict()
        dataset = open_dataset()
        dataset.load_state_dict(state)
    return dataset.counts()
