"""Staging on a real CUDA device. Skipped where there is none; `pytest -s tests/gpu` prints the figures."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import streamshard as ss
from streamshard.testing.resume import digest
from tests.conftest import write_dataset

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch.cuda.is_available() is False: no CUDA device"
)

ROW = 1 << 20  # bytes: batches of 64 MiB, so that a copy takes milliseconds
BATCH = 64


def fixed(item):
    return {"id": item["id"], "pair": np.array([item["id"], item["id"] + 1], np.uint16)}


def large(item):
    return {"x": np.full(ROW, item["id"] % 251, np.uint8)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "ds", 200)


def loader(directory, function, **options):
    size = options.pop("batch_size", 8)
    return ss.StreamLoader(ss.StreamDataset(directory, ss.Map(function), repeat=True), batch_size=size, **options)


@pytest.mark.parametrize("options", [{}, {"static_buffers": True}, {"pin_memory": False}, {"slots": 3}])
def test_batches_on_the_device_are_those_of_the_host(directory, options):
    host = loader(directory, fixed)
    device = loader(directory, fixed, device="cuda", **options)
    for _, (expected, found) in zip(range(60), zip(host, device, strict=False), strict=False):
        assert found["pair"].is_cuda
        assert digest(found) == digest(expected)


def test_nothing_is_overwritten_while_a_slow_kernel_still_reads_it(directory):
    sums, expected = [], []
    for _, batch in zip(
        range(40), loader(directory, large, batch_size=4, device="cuda", static_buffers=True), strict=False
    ):
        torch.cuda._sleep(20_000_000)  # some 10 ms of the device's clock
        sums.append(batch["x"].sum(dtype=torch.int64))
    for _, batch in zip(range(40), loader(directory, large, batch_size=4), strict=False):
        expected.append(int(batch["x"].sum(dtype=torch.int64)))
    assert [int(s) for s in sums] == expected


def test_static_buffers_serve_a_captured_graph(directory):
    batches = iter(loader(directory, fixed, device="cuda", static_buffers=True, slots=1, dtypes={"pair": torch.int64}))
    first = next(batches)
    out = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(first["pair"].sum())
    for _ in range(20):
        batch = next(batches)
        graph.replay()
        assert int(out) == int(batch["pair"].sum())


def test_pinned_host_batches_when_asked(directory):
    assert next(iter(loader(directory, fixed, pin_memory=True)))["pair"].is_pinned()


def test_the_copy_is_hidden_behind_compute():
    """At least 90 % of the copy time, over host batches that are ready; idle time of the compute stream, off and on."""
    from streamshard.loading.handover import Handover
    from streamshard.staging.device import open_device
    from streamshard.staging.stager import Slot, Stager
    from tests.staging.test_stager import Waiting

    host = [torch.empty(BATCH * ROW, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    a = torch.randn(4096, 4096, device="cuda")

    def compute(x):
        b = a
        for _ in range(12):
            b = b @ a
        return b.sum() + x[:1024].sum()

    def timed(batches):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for x in batches:
            compute(x)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    steps = 60
    on_device = host[0].cuda()
    timed([on_device] * 5)
    bare = timed([on_device] * steps)
    off = timed(host[n % 4].cuda(non_blocking=True) for n in range(steps))
    source = iter([Waiting(host[n % 4]) for n in range(steps)])
    device = open_device(torch.device("cuda"), pin_memory=True)
    slots = [Slot(device, static=True) for _ in range(2)]
    stager = Stager(lambda: next(source, None), device, Handover(3), print, slots=slots, dtypes={})
    on = timed(staged.batch for staged in iter(stager.take, None))
    stager.stop()
    stager.join(5)
    hidden = 1 - (on - bare) / (off - bare)
    print(
        f"compute {bare / steps * 1e3:.2f} ms a step; copies add {(off - bare) / steps * 1e3:.2f} ms without staging (idle "
        f"{1 - bare / off:.1%}), {(on - bare) / steps * 1e3:.2f} ms with it (idle {1 - bare / on:.1%}): {hidden:.1%} hidden"
    )
    assert hidden >= 0.9
