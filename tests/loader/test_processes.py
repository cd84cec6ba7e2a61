"""`StreamLoader` with worker processes: the same batches as with none, and nothing left behind however things end."""

from __future__ import annotations

import collections
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import streamshard as ss
from streamshard.testing import assert_exact_resume
from streamshard.testing.resume import digest
from tests.conftest import sample, write_dataset


def fixed(item):
    return {
        "id": item["id"],
        "pair": np.array([item["id"], item["id"] + 1], np.uint16),
        "text": item["text"],
        "m": item["maybe"],
    }


def mixed(item):
    return {"n": item["id"] if item["id"] % 5 else "five", "half": torch.tensor(item["id"] / 2, dtype=torch.bfloat16)}


def half_none(item):
    number = item["id"]
    return {
        "float": number / 3 if number % 4 else None,
        "array": np.full(3, number, np.int16) if number % 5 else None,
        "kind": number < 24 or 7,
        "nothing": np.zeros((2, 0), np.float32),
        "order": collections.OrderedDict(a=torch.tensor([number]), b="text"),
    }


def low(item):
    return item["id"] < 20


def nested(item):
    return {"deep": {"x": np.full((2, 3), item["id"], np.float32)}, "id": item["id"]}


def even(item):
    return item["id"] % 2 == 0


def high(item):
    return item["id"] > 30


def none_to_two(item):
    return [{"id": item["id"], "part": part} for part in range(item["id"] % 3)]


def boom(item):
    if item["id"] == 31:
        raise KeyError("thirty-one")
    return fixed(item)


class StubbornError(Exception):
    def __init__(self, one, two):
        super().__init__(f"stubborn {one} {two}"[:8])


def stubborn(item):
    raise StubbornError(1, 2)


def die(item):
    if item["id"] == 31:
        os.kill(os.getpid(), signal.SIGKILL)
    return fixed(item)


def as_list(items):
    return [item["id"] for item in items]


def sample_only(item):
    return {"id": item["id"], "tokens": item["tokens"]}


@pytest.fixture(scope="module")
def dataset_47(tmp_path_factory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "ds47", 47, per_shard=11, block_bytes=200)


def loader_of(directory, *steps, workers=2, parts=8, batch_size=4, method="fork", **options):
    split = {name: options.pop(name) for name in ("prefetch", "accumulation", "collate", "device") if name in options}
    dataset = ss.StreamDataset(directory, *steps, partitions=parts, shuffle_buffer=7, seed=5, **options)
    return ss.StreamLoader(dataset, batch_size=batch_size, workers=workers, start_method=method, **split)


def read(loader, count=None):
    with loader:
        return [digest(batch) for _, batch in zip(range(count or 10**9), loader, strict=False)]


PIPELINES = {
    "one to one": (ss.Map(fixed),),
    "mixed types": (ss.Map(mixed),),
    "types that come and go": (ss.Map(half_none),),
    "nested": (ss.Map(nested),),
    "filter": (ss.Filter(even), ss.Map(fixed)),
    "uneven filter": (ss.Filter(high), ss.Map(fixed)),
    "flat map": (ss.FlatMap(none_to_two),),
    "Batch": (ss.Map(fixed), ss.Batch(3)),
    "Batch of ragged": (ss.Map(sample_only), ss.Batch(3, ragged="pad")),
    "samples": (),
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", PIPELINES)
def test_the_batches_are_those_of_no_workers(dataset_47, name, workers):
    size = None if name in ("Batch", "Batch of ragged", "samples") else 5
    expected = read(loader_of(dataset_47, *PIPELINES[name], workers=0, batch_size=size))
    assert read(loader_of(dataset_47, *PIPELINES[name], workers=workers, batch_size=size)) == expected


@pytest.mark.parametrize("batch_size", [1, 4, 7, 16, 60])
def test_batches_may_be_of_any_size_and_go_on_over_epochs(dataset_47, batch_size):
    expected = read(loader_of(dataset_47, ss.Map(fixed), workers=0, batch_size=batch_size, repeat=True), 30)
    assert read(loader_of(dataset_47, ss.Map(fixed), workers=4, batch_size=batch_size, repeat=True), 30) == expected


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("workers", [2, 4])
def test_a_whole_batch_may_have_to_come_from_one_worker(dataset_47, workers, prefetch):
    options = {"parts": 4, "batch_size": 16, "shuffle": False, "prefetch": prefetch}
    steps = ss.Filter(low), ss.Map(fixed)
    expected = read(loader_of(dataset_47, *steps, workers=0, **options))
    assert read(loader_of(dataset_47, *steps, workers=workers, **options)) == expected


@pytest.mark.parametrize("batch_size", [2, 4])  # 2: parts of one row, so that ends come by themselves
@pytest.mark.parametrize("name", ["filter", "uneven filter", "flat map"])
def test_the_state_after_each_batch_says_the_same_as_without_workers(dataset_47, name, batch_size):
    steps = PIPELINES[name]
    with (
        loader_of(dataset_47, *steps, batch_size=batch_size) as loader,
        loader_of(dataset_47, *steps, batch_size=batch_size, workers=0) as plain,
    ):
        for _ in zip(loader, plain, strict=True):
            assert loader.counters().dropped.keys() == plain.counters().dropped.keys()
            ours, theirs = loader.state_dict()["partitions"], plain.state_dict()["partitions"]
            assert [json.loads(s)[0] for s in ours.values()] == [json.loads(s)[0] for s in theirs.values()]
        assert loader.state_dict() == plain.state_dict()


def test_a_commit_after_the_start_changes_neither_what_workers_read_nor_what_the_state_says(tmp_path):
    directory = write_dataset(tmp_path / "ds", 47, per_shard=11)
    version = ss.open_manifest(directory).version
    with loader_of(directory, ss.Map(fixed), repeat=True) as loader:
        batches = iter(loader)
        next(batches)
        with ss.DatasetWriter(directory, append=True) as writer:
            writer.write(sample(47))
        for _ in range(30):
            next(batches)
        assert json.loads(loader.state_dict()["fingerprint"])["dataset"] == version


def unstorable(item):
    item["image"] = object()
    return {"id": item["id"]}


@pytest.mark.parametrize("workers", [0, 2])
def test_contents_are_what_was_stored_whatever_steps_do_to_it(dataset_47, workers):
    expected = read(loader_of(dataset_47, ss.Map(unstorable), workers=0))
    with loader_of(dataset_47, ss.Map(unstorable), workers=workers, snapshot="contents") as loader:
        seen = []
        for batch in loader:
            seen.append(digest(batch))
            state = loader.state_dict()
            if len(seen) == 5:
                break
    resumed = loader_of(dataset_47, ss.Map(unstorable), workers=workers, snapshot="contents")
    resumed.load_state_dict(state)
    assert seen + read(resumed) == expected


def test_the_same_processes_read_the_next_epoch(dataset_47):
    plain, loader = loader_of(dataset_47, ss.Map(fixed), workers=0), loader_of(dataset_47, ss.Map(fixed))
    for _ in range(3):
        assert [digest(b) for b in loader] == [digest(b) for b in plain]
        pids = [worker.process.pid for worker in loader._group.workers]
    assert [worker.process.pid for worker in loader._group.workers] == pids
    loader.close()


@pytest.mark.parametrize("snapshot", ["cursor", "contents"])
@pytest.mark.parametrize("name", ["one to one", "uneven filter", "flat map", "Batch"])
def test_a_loader_with_workers_resumes_at_every_third_batch(dataset_47, name, snapshot):
    size = None if name == "Batch" else 5
    stops = range(0, 12, 3)
    made = []

    def factory():
        if made:
            made.pop().close()
        made.append(loader_of(dataset_47, *PIPELINES[name], batch_size=size, snapshot=snapshot))
        return made[-1]

    assert_exact_resume(factory, stops=stops, chain=1)
    made.pop().close()


def test_a_state_with_workers_resumes_without_and_with_others(dataset_47):
    expected = read(loader_of(dataset_47, ss.Map(fixed), workers=0, batch_size=5))
    for before, after in [(2, 0), (0, 4), (4, 2)]:
        with loader_of(dataset_47, ss.Map(fixed), workers=before, batch_size=5) as loader:
            batches = iter(loader)
            seen = [digest(next(batches)) for _ in range(4)]
            state = loader.state_dict()
        resumed = loader_of(dataset_47, ss.Map(fixed), workers=after, batch_size=5)
        resumed.load_state_dict(state)
        assert seen + read(resumed) == expected


def test_contents_come_from_the_workers_and_save_reading(dataset_47):
    with loader_of(dataset_47, ss.Map(fixed), snapshot="contents") as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        rest = [digest(b) for b in batches]
    assert sorted(map(int, ",".join(state["contents"]).split(","))) == list(range(8))
    resumed = loader_of(dataset_47, ss.Map(fixed), workers=0, snapshot="contents")
    resumed.load_state_dict(state)
    assert read(resumed) == rest


def test_a_collate_of_the_user_s_runs_in_the_workers_on_whole_batches(dataset_47):
    with loader_of(dataset_47, collate=as_list, batch_size=4) as loader:
        batches = list(loader)
    assert sorted(i for batch in batches for i in batch) == list(range(47))
    assert {len(batch) for batch in batches[:-2]} == {4}


def test_batches_from_workers_are_staged(dataset_47):
    expected = read(loader_of(dataset_47, ss.Map(fixed), workers=0))
    assert read(loader_of(dataset_47, ss.Map(fixed), device="cpu")) == expected


def test_what_goes_beside_a_batch_is_small(dataset_203, monkeypatch):
    sizes = []
    original = ss.loading.processes.multiprocessing.connection._ForkingPickler.loads

    def loads(data, *args, **kwargs):
        sizes.append(len(bytes(data)))
        return original(data, *args, **kwargs)

    monkeypatch.setattr(ss.loading.processes.multiprocessing.connection._ForkingPickler, "loads", loads)
    with loader_of(dataset_203, ss.Map(sample_only), ss.Filter(even), parts=16, batch_size=None) as loader:
        next(iter(loader))
    with loader_of(dataset_203, ss.Map(nested), parts=16, batch_size=32, workers=1) as loader:
        list(loader)
    assert sizes
    assert max(sizes) < 2048


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_exception_in_a_worker_comes_out_as_itself_with_its_traceback_and_the_sample_named(dataset_47, method):
    with loader_of(dataset_47, ss.Map(boom), method=method) as loader:
        seen = []
        with pytest.raises(KeyError, match="thirty-one") as caught:
            for batch in loader:
                seen += batch["id"].tolist()
        assert "shard 2, row 9" in caught.value.__notes__[0]
        assert "in worker" in caught.value.__notes__[1]
        assert "in boom" in str(caught.value.__cause__)
        mended = loader_of(dataset_47, ss.Map(fixed), workers=0)
        mended.load_state_dict(loader.state_dict(), allow={"steps"})
        assert sorted(seen + [i for batch in mended for i in batch["id"].tolist()]) == list(range(47))


def test_an_exception_that_cannot_be_sent_is_told(dataset_47):
    with (
        loader_of(dataset_47, ss.Map(stubborn)) as loader,
        pytest.raises(ss.WorkerError, match="failed with StubbornError"),
    ):
        next(iter(loader))


def test_a_killed_worker_is_an_error_within_five_seconds_and_nothing_is_lost(dataset_47):
    expected = read(loader_of(dataset_47, ss.Map(fixed), workers=0))
    with loader_of(dataset_47, ss.Map(die)) as loader:
        seen = []
        began = time.monotonic()
        with pytest.raises(ss.WorkerError, match=r"was killed by SIGKILL.*memory"):
            for batch in loader:
                seen.append(digest(batch))
        assert time.monotonic() - began < 5
        mended = loader_of(dataset_47, ss.Map(fixed), workers=0)
        mended.load_state_dict(loader.state_dict(), allow={"steps"})
        assert seen + read(mended) == expected


def test_a_worker_killed_while_the_loop_computes_is_an_error_too_and_the_loader_starts_again(dataset_47):
    with loader_of(dataset_47, ss.Map(fixed), repeat=True) as loader:
        batches = iter(loader)
        next(batches)
        os.kill(loader._group.workers[1].process.pid, signal.SIGKILL)
        with pytest.raises(ss.WorkerError, match="worker 1 of 2"):
            for _ in range(100):
                next(batches)
        state = loader.state_dict()
        loader.load_state_dict(state)
        next(iter(loader))


def test_contents_of_a_dead_worker_are_an_error(dataset_47):
    with loader_of(dataset_47, ss.Map(fixed), repeat=True, snapshot="contents") as loader:
        next(iter(loader))
        os.kill(loader._group.workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(ss.WorkerError, match="worker 0 of 2"):
            loader.state_dict()


def test_a_loop_that_breaks_off_and_a_loader_that_is_forgotten_leave_no_process(dataset_47):
    loader = loader_of(dataset_47, ss.Map(fixed), repeat=True)
    for _ in loader:
        break
    pids = [worker.process.pid for worker in loader._group.workers]
    assert all(psutil.pid_exists(pid) for pid in pids), "they wait for the next iteration"
    assert len(next(iter(loader))["id"]) == 4
    del loader
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers=-1.: pass 0 for threads"),
        ({"workers": 3}, r"partitions=8 cannot be divided among 1 ranks x 3 workers = 3 readers; .*partitions=24"),
        ({"method": "thread"}, "start_method='thread'"),
    ],
)
def test_workers_that_cannot_be_are_refused_at_construction(dataset_47, options, message):
    with pytest.raises(ss.UsageError, match=message):
        loader_of(dataset_47, **options)


def test_steps_that_cannot_be_sent_are_refused_with_the_cure(dataset_47):
    loader = loader_of(dataset_47, ss.Map(lambda item: item), method="forkserver")
    with pytest.raises(
        ss.UsageError, match=r"cannot be sent to worker processes.*Define their functions at the top of a module"
    ):
        next(iter(loader))


PREFIXES = ("pymp-", "psm_", "sem.", "torch_", "streamshard-worker", "listener-")

SCRIPT = """
import os, signal, sys, time
import streamshard as ss
from tests.loader.test_processes import fixed

def main():
    dataset = ss.StreamDataset(sys.argv[1], ss.Map(fixed), partitions=8, repeat=True)
    loader = ss.StreamLoader(dataset, batch_size=4, workers=2)
    for number, batch in enumerate(loader):
        if number == 3:
            print(*[worker.process.pid for worker in loader._group.workers], flush=True)
            if sys.argv[2] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[2] == "interrupt":
                os.killpg(0, signal.SIGINT)
            if sys.argv[2] == "raise":
                raise ValueError("stop")
            if sys.argv[2] == "exit":
                return

if __name__ == "__main__":
    main()
"""


def start(tmp_path, directory, how):
    (tmp_path / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), directory, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip


def wait_gone(pids, seconds=5):
    """Their processes end by themselves; zombies of a killed parent count as gone."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def left_behind():
    """Names in the places where shared memory and multiprocessing leave files."""
    places = [Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108  (to look, not to write)
    return {path for place in places if place.exists() for path in place.iterdir() if path.name.startswith(PREFIXES)}


@pytest.mark.parametrize("how", ["exit", "raise", "interrupt", "kill"])
def test_however_the_program_ends_no_process_and_no_file_is_left(tmp_path, dataset_47, how):
    before = left_behind()
    program = start(tmp_path, dataset_47, how)
    out, errors = program.communicate(timeout=60)
    assert {"exit": 0, "raise": 1, "interrupt": -2, "kill": -9}[how] == program.returncode, errors
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 2
    assert wait_gone(pids)
    assert not left_behind() - before
    expected = {"exit": "", "kill": ""}.get(how)
    if expected is not None:
        assert errors.strip() == expected


def test_closing_is_prompt_although_other_workers_hold_copies_of_the_pipes(dataset_47):
    first = loader_of(dataset_47, ss.Map(fixed), repeat=True)
    next(iter(first))
    second = loader_of(dataset_47, ss.Map(fixed), repeat=True)
    next(iter(second))
    began = time.monotonic()
    first.close()
    assert time.monotonic() - began < 1.5
    second.close()


def test_a_forked_child_that_exits_leaves_the_loader_alone(dataset_47):
    with loader_of(dataset_47, ss.Map(fixed), repeat=True) as loader:
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if child == 0:
            loader.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        next(batches)
        assert loader._group.alive


def test_iterations_leave_no_descriptor_behind(dataset_47):
    with loader_of(dataset_47, ss.Map(fixed)) as loader:
        list(loader)
        before = psutil.Process().num_fds()
        for _ in range(10):
            list(loader)
        assert psutil.Process().num_fds() <= before + 1
    gc.collect()


@pytest.mark.slow
def test_it_starts_twenty_times_out_of_twenty_after_sigkill(tmp_path, dataset_47):
    for _ in range(20):
        program = start(tmp_path, dataset_47, "kill")
        out, _ = program.communicate(timeout=60)
        assert program.returncode == -9
        assert wait_gone([int(pid) for pid in out.split()])
