"""`StreamLoader` with threads: the same items as the dataset, in batches, and the state of what was handed out."""

from __future__ import annotations

import functools
import gc
import logging
import threading

import numpy as np
import pytest
import torch

import streamshard as ss
from streamshard.testing import assert_exact_resume
from streamshard.testing.resume import digest
from tests.conftest import write_dataset


def fixed(item):
    return {"id": item["id"], "pair": np.array([item["id"], item["id"] + 1], np.uint16)}


def even(item):
    return item["id"] % 2 == 0


def none_to_two(item):
    return [{"id": item["id"], "part": part} for part in range(item["id"] % 3)]


def ids(batches):
    return [int(i) for batch in batches for i in batch["id"]]


@pytest.fixture(scope="module")
def dataset_47(tmp_path_factory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "ds47", 47, per_shard=11, block_bytes=200)


def loader_of(directory, *steps, batch_size=4, parts=4, loader=ss.StreamLoader, **options):
    split = {name: options.pop(name) for name in ("prefetch", "accumulation", "collate", "workers") if name in options}
    dataset = ss.StreamDataset(directory, *steps, partitions=parts, shuffle_buffer=7, seed=5, **options)
    return loader(dataset, batch_size=batch_size, **split)


PIPELINES = {
    "one to one": (ss.Map(fixed),),
    "filter": (ss.Filter(even), ss.Map(fixed)),
    "flat map": (ss.FlatMap(none_to_two),),
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("batch_size", [1, 3, 4, 11])
@pytest.mark.parametrize("parts", [1, 4, 16])
def test_batches_are_the_dataset_s_items_in_order(dataset_47, name, batch_size, parts):
    loader = loader_of(dataset_47, *PIPELINES[name], batch_size=batch_size, parts=parts)
    dataset = ss.StreamDataset(dataset_47, *PIPELINES[name], partitions=parts, shuffle_buffer=7, seed=5)
    for _ in range(2):  # and so in the next epoch
        batches = list(loader)
        assert all(len(batch["id"]) == batch_size for batch in batches[:-1])
        assert ids(batches) == [item["id"] for item in dataset]
    assert loader.dataset.epoch == 2


def test_without_a_batch_size_the_items_of_the_pipeline_come_as_they_are(dataset_47):
    dataset = ss.StreamDataset(dataset_47, ss.Map(fixed), ss.Batch(4), partitions=4, seed=5)
    expected = [
        digest(batch) for batch in ss.StreamDataset(dataset_47, ss.Map(fixed), ss.Batch(4), partitions=4, seed=5)
    ]
    assert [digest(batch) for batch in ss.StreamLoader(dataset)] == expected


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_loader_resumes_at_every_batch_whatever_is_prefetched(dataset_47, name, snapshot, prefetch):
    assert_exact_resume(lambda: loader_of(dataset_47, *PIPELINES[name], snapshot=snapshot, prefetch=prefetch))


def test_an_endless_loader_resumes_at_every_batch(dataset_47):
    assert_exact_resume(lambda: loader_of(dataset_47, ss.Map(fixed), repeat=True, batch_size=5), items=16)


def test_contents_are_those_of_the_batch_handed_out_and_resume_without_reading_old_blocks(dataset_47):
    loader = loader_of(dataset_47, ss.Map(fixed), snapshot="contents", prefetch=8)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    contents = ss.dataset.decode_contents(next(iter(loader.state_dict()["contents"].values())))
    state = loader.state_dict()
    resumed = loader_of(dataset_47, ss.Map(fixed), snapshot="contents")
    resumed.load_state_dict(state)
    for p, samples in contents.items():
        order = resumed.dataset.open_share(resumed.dataset.shares(0)[0]).runs[p].source._open(0, 3)
        held = {("", 0, read) for read in order._reads_held.tolist() if read >= 0}
        assert held <= set(samples)
    assert [digest(b) for b in resumed] == [digest(b) for b in batches]


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
def test_with_accumulation_the_state_is_that_of_the_last_complete_step(dataset_47, snapshot, caplog):
    whole = [digest(b) for b in loader_of(dataset_47, ss.Map(fixed), snapshot=snapshot)]
    for stop in range(len(whole)):
        loader = loader_of(dataset_47, ss.Map(fixed), snapshot=snapshot, accumulation=3)
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        with caplog.at_level(logging.WARNING, "streamshard"):
            caplog.clear()
            state = loader.state_dict()
            assert loader.state_dict()["partitions"] == state["partitions"]
        told = [r for r in caplog.records if "in the middle of an optimizer step of 3" in r.getMessage()]
        assert len(told) == (1 if stop % 3 else 0)
        resumed = loader_of(dataset_47, ss.Map(fixed), snapshot=snapshot, accumulation=3)
        resumed.load_state_dict(state)
        assert [digest(b) for b in resumed] == whole[stop - stop % 3 :], "whole steps are replayed"


def test_a_sample_that_is_emitted_while_it_is_packed_is_kept_as_it_was_before(dataset_47, monkeypatch):
    loader = loader_of(dataset_47, ss.Map(fixed), snapshot="contents")
    source = loader.dataset.open_share(loader.dataset.shares(0)[0], lent=True).runs[0].source
    place = (0, 3)
    source._retained[place] = sample = {"id": 3}

    def pack(changed):
        source._retained[place] = b"before"  # by the reading thread, which then lets a step change the sample
        return b"after"

    monkeypatch.setattr("streamshard.prefetch.source.pack_sample", pack)
    assert source._packed(place, sample) == b"before"


def test_asking_for_counters_neither_tells_of_a_boundary_nor_keeps_state_dict_from_telling(dataset_47, caplog):
    loader = loader_of(dataset_47, ss.Map(fixed), accumulation=3)
    batches = iter(loader)
    next(batches)
    with caplog.at_level(logging.WARNING, "streamshard"):
        loader.counters()
        assert "optimizer step" not in caplog.text
        loader.state_dict()
        assert "in the middle of an optimizer step of 3" in caplog.text
    batches.close()


def test_the_end_of_a_pass_completes_the_optimizer_step_begun_and_resumes_to_the_next_epoch(dataset_47):
    loader = loader_of(dataset_47, ss.Map(fixed), accumulation=5)  # 12 batches
    list(loader)
    resumed = loader_of(dataset_47, ss.Map(fixed), accumulation=5)
    resumed.load_state_dict(loader.state_dict())
    assert ids(resumed) == ids(loader)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_global_batch_t_is_the_same_slots_for_every_number_of_ranks(dataset_47, ranks):
    reference = loader_of(dataset_47, ss.Map(fixed), batch_size=8, repeat=True)
    whole = [sorted(int(i) for i in batch["id"]) for batch, _ in zip(reference, range(20), strict=False)]
    loaders = [
        iter(
            loader_of(dataset_47, ss.Map(fixed), batch_size=8 // ranks, repeat=True, topology=ss.Topology(rank, ranks))
        )
        for rank in range(ranks)
    ]
    for expected in whole:
        assert sorted(int(i) for loader in loaders for i in next(loader)["id"]) == expected


def test_states_of_loaders_on_four_ranks_merge_and_resume_on_two(dataset_47):
    def loaders(ranks):
        return [
            loader_of(dataset_47, ss.Map(fixed), batch_size=8 // ranks, topology=ss.Topology(r, ranks))
            for r in range(ranks)
        ]

    four = loaders(4)
    running = [iter(loader) for loader in four]
    seen = [int(i) for _ in range(3) for loader in running for i in next(loader)["id"]]
    merged = ss.merge_states([loader.state_dict() for loader in four])
    for loader in loaders(2):
        loader.load_state_dict(merged)
        seen += ids(loader)
    assert sorted(seen) == list(range(47))


def test_the_dataset_refuses_to_describe_what_a_loader_has_read_ahead(dataset_47):
    loader = loader_of(dataset_47, ss.Map(fixed))
    next(iter(loader))
    with pytest.raises(ss.UsageError, match="save the loader's state_dict"):
        loader.dataset.state_dict()
    loader.load_state_dict(loader.state_dict())
    assert loader.dataset.state_dict() == loader.state_dict()


def boom(item):
    if item["id"] == 31:
        raise KeyError("thirty-one")
    return fixed(item)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exception_in_a_step_comes_out_with_its_traceback_and_the_sample_named(dataset_47, prefetch):
    loader = loader_of(dataset_47, ss.Map(boom), prefetch=prefetch)
    seen = []
    with pytest.raises(KeyError, match="thirty-one") as caught:
        for batch in loader:
            seen += ids([batch])
    assert "boom" in [entry.name for entry in caught.traceback]
    assert "shard 2, row 9" in caught.value.__notes__[0]
    mended = loader_of(dataset_47, ss.Map(fixed))
    state = loader.state_dict()
    mended.load_state_dict(state, allow={"steps"})
    assert sorted(seen + ids(mended)) == list(range(47))


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "streamshard-loader"]


def test_a_loop_that_breaks_off_leaves_no_thread(dataset_47):
    loader = loader_of(dataset_47, ss.Map(fixed))
    for _ in loader:
        break
    gc.collect()
    assert not loader_threads()
    assert len(ids(loader)) == 47, "and the next loop begins again"


def test_close_and_the_context_manager_end_the_thread_and_keep_the_state(dataset_47):
    with loader_of(dataset_47, ss.Map(fixed)) as loader:
        batches = iter(loader)
        first = next(batches)
        assert loader_threads()
    assert not loader_threads()
    with pytest.raises(ss.UsageError, match="ended by a newer one, or by close"):
        next(batches)
    resumed = loader_of(dataset_47, ss.Map(fixed))
    resumed.load_state_dict(loader.state_dict())
    assert sorted(ids([first]) + ids(resumed)) == list(range(47))


def test_without_prefetch_batches_are_formed_by_the_loop_itself_one_when_it_asks(dataset_47):
    formed = []

    def note(item):
        formed.append((item["id"], threading.current_thread()))
        return fixed(item)

    with loader_of(dataset_47, ss.Map(note), prefetch=0) as loader:
        batches = iter(loader)
        first = next(batches)
        assert sorted(i for i, _ in formed) == sorted(ids([first]))
        assert {thread for _, thread in formed} == {threading.current_thread()}
        assert loader.counters().waits == 1
    with pytest.raises(ss.UsageError, match="ended by a newer one, or by close"):
        next(batches)
    resumed = loader_of(dataset_47, ss.Map(fixed), prefetch=0)
    resumed.load_state_dict(loader.state_dict(), allow={"steps"})
    assert sorted(ids([first]) + ids(resumed)) == list(range(47))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_new_iterator_ends_the_one_before_and_says_so(dataset_47, caplog, prefetch):
    loader = loader_of(dataset_47, ss.Map(fixed), prefetch=prefetch)
    old = iter(loader)
    next(old)
    with caplog.at_level(logging.WARNING, "streamshard"):
        new = iter(loader)
        next(new)
    assert "left in the middle" in caplog.text
    with pytest.raises(ss.UsageError, match="ended by a newer one"):
        next(old)
    assert len(ids(new)) == 43


@pytest.mark.parametrize("prefetch", [0, 2])
def test_closing_does_not_wait_for_a_store_that_does_not_answer(tmp_path, monkeypatch, prefetch):
    directory = write_dataset(tmp_path / "ds", 47)
    loader = loader_of(directory, ss.Map(fixed), prefetch=prefetch)
    asked = threading.Event()

    def never(*args, **kwargs):
        asked.set()
        return ss.prefetch.scheduler.Future()  # nobody answers

    monkeypatch.setattr("streamshard.prefetch.access.ShardAccess.send", never)
    failed = []

    def read():
        try:
            next(iter(loader))
        except ss.UsageError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert asked.wait(5)
    loader.close()
    reader.join(5)
    assert not reader.is_alive()
    assert failed


def test_counters_say_what_was_handed_out_and_dropped(dataset_47):
    loader = loader_of(dataset_47, ss.Filter(even), ss.Map(fixed), batch_size=8)
    batches = iter(loader)
    next(batches)
    assert loader.counters().batches == 1
    list(batches)
    counters = loader.counters()
    assert counters.batches == 3
    assert counters.dropped == {"Filter(even) dropped": 23}
    assert counters.waiting_s > 0


def test_fixed_arrays_keep_their_dtype_and_ragged_ones_are_refused_with_the_cure(dataset_47):
    batch = next(iter(loader_of(dataset_47, ss.Map(fixed))))
    assert batch["pair"].dtype == torch.uint16
    with pytest.raises(ss.DataError, match=r"field 'tokens' has shapes .*collate=functools.partial"):
        next(iter(loader_of(dataset_47, ss.Map(dict))))


def test_a_collate_of_the_user_s_gets_the_list_of_items(dataset_47):
    loader = loader_of(dataset_47, collate=lambda items: [item["id"] for item in items])
    assert sorted(i for batch in loader for i in batch) == list(range(47))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size=0\): it must be an int >= 1"),
        ({"prefetch": -1}, r"prefetch=-1\): it must be an int >= 0"),
        (
            {"prefetch": 0, "workers": 2},
            r"prefetch=0\) forms batches only when asked, but workers=2 is there to be ahead",
        ),
        ({"batch_size": "8"}, "batch_size='8'"),
        ({"prefetch": True}, "prefetch=True"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"collate": list}, "pass batch_size= too"),
        ({"batch_size": 2, "collate": 3}, "collate=3"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_construction(dataset_47, options, message):
    with pytest.raises(ss.UsageError, match=message):
        ss.StreamLoader(ss.StreamDataset(dataset_47), **options)


@pytest.mark.parametrize("shape", ["equal", "different", "different over shards only"])
def test_ragged_arrays_without_a_collate_are_refused_at_construction(tmp_path, shape):
    lengths = {"equal": [4, 4, 4, 4], "different": [4, 5, 3, 4], "different over shards only": [4, 4, 6, 6]}[shape]
    with ss.DatasetWriter(str(tmp_path), length_field="tokens") as writer:
        for number, length in enumerate(lengths):
            writer.write({"tokens": np.zeros(length, np.int32)})
            if number == 1:
                writer._finish_shard()
    dataset = ss.StreamDataset(str(tmp_path), partitions=1)
    pad = functools.partial(ss.collate, ragged="pad")
    assert len(list(ss.StreamLoader(dataset, batch_size=2, collate=pad))) == 2
    if shape == "equal":
        assert len(list(ss.StreamLoader(dataset, batch_size=2))) == 2
    else:
        with pytest.raises(ss.UsageError, match=r"field 'tokens' have different lengths.*collate=functools.partial"):
            ss.StreamLoader(dataset, batch_size=2)


def test_batching_batches_is_refused_with_the_cure(dataset_47):
    with pytest.raises(ss.UsageError, match=r"batches of Batch\(4\); leave batch_size out"):
        ss.StreamLoader(ss.StreamDataset(dataset_47, ss.Batch(4)), batch_size=2)
    with pytest.raises(ss.UsageError, match="not a list"):
        ss.StreamLoader([1, 2])
