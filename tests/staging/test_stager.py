"""Staging on a device whose streams lag behind: nothing is overwritten while in use, nothing is read before it is there."""

from __future__ import annotations

import random
import resource
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import streamshard as ss
from streamshard.loading.handover import Handover
from streamshard.staging.buffers import Buffers
from streamshard.staging.device import CpuDevice
from streamshard.staging.stager import Slot, Stager
from streamshard.staging.tree import map_tensors
from streamshard.testing.resume import digest
from tests.conftest import write_dataset
from tests.staging.delayed import DelayedDevice

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Waiting:
    batch: Any
    buffers: Buffers | None = None


def batch(number, rng):
    """Nested, with shapes that grow and shrink and leaves that are no tensors."""
    rows = rng.randrange(0, 6)
    return {
        "number": number,
        "tokens": torch.full((rows, 3), number, dtype=torch.int32),
        "nested": (torch.full((2,), number % 251, dtype=torch.uint8), [torch.full((rows,), float(number))], "text"),
        "pair": Pair(torch.tensor(number), None),
    }


def stage(batches, device, *, pooled=False, slots=2, static=False, dtypes=None):
    """Digests of `batches` as the consumer's stream sees them, each taken when that stream comes to it."""
    pool = [Buffers(device.host) for _ in range(4)]
    free, handed = Handover(4), []
    for buffers in pool:
        free.put(buffers)
    source = iter(batches)

    def take():
        found = next(source, None)
        if found is None or not pooled:
            return None if found is None else Waiting(found)
        buffers = free.take()
        buffers.begin()
        return Waiting(map_tensors(found, lambda _, t: buffers.empty(tuple(t.shape), t.dtype).copy_(t)), buffers)

    places = [Slot(device, static=static) for _ in range(slots)]
    stager = Stager(take, device, Handover(slots + 1), free.put, slots=places, dtypes=dtypes or {})
    while (staged := stager.take()) is not None:
        device.compute(lambda staged=staged: handed.append(digest(staged.batch)))
    device.finish()
    stager.stop()
    stager.join(5)
    return handed


@pytest.fixture
def device():
    found = DelayedDevice(seed=3)
    yield found
    found.stop()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_the_consumer_s_stream_sees_every_batch_whole_and_in_order(device, slots, static, pooled):
    rng = random.Random(1)
    batches = [batch(n, rng) for n in range(300)]
    if static:  # the largest first
        batches[:slots] = [
            batch(n, random.Random(2)) | {"tokens": torch.full((6, 3), n, dtype=torch.int32)} for n in range(slots)
        ]
        for first in batches[:slots]:
            first["nested"] = (first["nested"][0], [torch.zeros(6)], "text")
    assert stage(batches, device, slots=slots, static=static, pooled=pooled) == [digest(b) for b in batches]


@pytest.mark.parametrize(
    ("verb", "static", "pooled"),
    [
        ("copies_wait", True, True),
        ("consumer_waits", False, True),
        ("consumer_waits", True, False),
        ("synchronize", False, False),
        ("synchronize", True, True),
    ],
)
def test_without_any_one_of_its_waits_staging_would_hand_out_wrong_bytes(device, monkeypatch, verb, static, pooled):
    """So the test above can fail, and every wait is needed."""
    if verb == "synchronize":
        monkeypatch.setattr("streamshard.staging.buffers.Buffers.begin", lambda self: setattr(self, "_next", 0))
    else:
        monkeypatch.setattr(device, verb, lambda event: None)
    batches = [{"x": torch.full((100,), n)} for n in range(300)]
    assert stage(batches, device, static=static, pooled=pooled) != [digest(b) for b in batches]


@pytest.mark.parametrize("static", [False, True])
def test_ten_thousand_batches_with_randomly_delayed_streams_neither_grow_nor_mix(static):
    device = DelayedDevice(seed=11)
    made = ({"x": torch.full((64,), n), "y": [torch.full((3, 5), n % 7, dtype=torch.uint8)]} for n in range(10_000))
    expected = [
        digest({"x": torch.full((64,), n), "y": [torch.full((3, 5), n % 7, dtype=torch.uint8)]}) for n in range(10_000)
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert stage(made, device, static=static, pooled=True) == expected
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"
    assert device.allocated["host"] <= 4 * 2
    if static:
        assert device.allocated["memory"] == 2 * 2
    assert device.lent == 20_000
    device.stop()


def test_static_buffers_hand_out_the_same_addresses_in_rotation(device):
    seen = []
    stager = Stager(
        iter([Waiting({"x": torch.full((4,), n)}) for n in range(7)] + [None]).__next__, device, Handover(3), print,
        slots=[Slot(device, static=True) for _ in range(2)], dtypes={},
    )  # fmt: skip
    while (staged := stager.take()) is not None:
        seen.append(staged.batch["x"].data_ptr())
    assert len(set(seen)) == 2
    assert seen == [seen[0], seen[1]] * 3 + [seen[0]]


def test_a_static_buffer_that_would_have_to_move_is_an_error_that_names_the_field(device):
    batches = [{"a": {"x": torch.zeros(n)}} for n in (4, 4, 2, 4, 5)]
    with pytest.raises(
        ss.DataError, match=r"static_buffers=True: the field 'a.x' needs 20 bytes and its device buffer has 16"
    ):
        stage(batches, device, static=True)


@pytest.mark.parametrize("static", [False, True])
def test_fields_are_converted_on_the_device_when_asked(device, static):
    batches = [
        {"t": torch.full((4,), n, dtype=torch.uint8), "deep": [torch.full((2,), n, dtype=torch.float64)]}
        for n in range(50)
    ]
    dtypes = {"t": torch.int64, "deep.0": torch.bfloat16}
    expected = [{"t": b["t"].long(), "deep": [b["deep"][0].bfloat16()]} for b in batches]
    assert stage(batches, device, static=static, dtypes=dtypes) == [digest(b) for b in expected]


def test_an_error_of_the_source_comes_out_after_the_batches_before_it(device):
    def source():
        yield Waiting({"x": torch.zeros(1)})
        raise ss.StorageError("gone")

    stager = Stager(source().__next__, device, Handover(3), print, slots=[Slot(device, static=False)], dtypes={})
    assert stager.take() is not None
    with pytest.raises(ss.StorageError, match="gone"):
        stager.take()
    assert stager.take() is None


# --------------------------------------------------------------------------------------------------- through the loader


def fixed(item):
    return {"id": item["id"], "pair": np.array([item["id"], item["id"] + 1], np.uint16)}


@pytest.fixture(scope="module")
def dataset_200(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "ds", 200)


@pytest.mark.parametrize("step", [True, False])
@pytest.mark.parametrize("options", [{}, {"static_buffers": True}, {"slots": 1}, {"slots": 4, "prefetch": 5}])
def test_a_loader_hands_out_the_same_batches_on_a_device(dataset_200, monkeypatch, device, step, options):
    monkeypatch.setattr("streamshard.loader.open_device", lambda *_, **__: device)

    def dataset():
        steps = [ss.Map(fixed)] + [ss.Batch(8)] * step
        return ss.StreamDataset(dataset_200, *steps, partitions=4)

    size = None if step else 8
    whole = [digest(b) for b in ss.StreamLoader(dataset(), batch_size=size)]
    seen = []
    with ss.StreamLoader(dataset(), batch_size=size, device="cpu", **options) as loader:
        batches = iter(loader)
        for _ in range(7):
            found = next(batches)
            device.compute(lambda batch=found: seen.append(digest(batch)))
        state = loader.state_dict()
        device.finish()
    resumed = ss.StreamLoader(dataset(), batch_size=size, device="cpu", **options)
    resumed.load_state_dict(state)
    for found in resumed:
        device.compute(lambda batch=found: seen.append(digest(batch)))
    device.finish()
    assert seen == whole


def test_device_cpu_runs_the_same_program_and_batches_may_be_kept(dataset_200):
    dataset = ss.StreamDataset(dataset_200, ss.Map(fixed), partitions=4)
    plain = [digest(b) for b in ss.StreamLoader(dataset, batch_size=8)]
    dataset.set_epoch(0)
    kept = list(ss.StreamLoader(dataset, batch_size=8, device="cpu"))
    assert [digest(b) for b in kept] == plain


def test_static_addresses_stay_the_same_from_one_iteration_to_the_next(dataset_200):
    loader = ss.StreamLoader(
        ss.StreamDataset(dataset_200, ss.Map(fixed), partitions=4), batch_size=8, device="cpu", static_buffers=True
    )
    assert len({batch["pair"].data_ptr() for _ in range(3) for batch in loader}) == 2


def test_fields_with_dots_in_their_names_do_not_share_memory(device):
    batches = [{"a.b": torch.full((2,), n), "a": {"b": torch.full((2,), -n)}, 0: torch.ones(1) * n} for n in range(20)]
    assert stage(batches, device, static=True) == [digest(b) for b in batches]


def test_a_dtype_for_a_field_that_is_not_there_is_an_error(device):
    with pytest.raises(ss.UsageError, match="the first batch has no tensor 'tokns'"):
        stage([{"tokens": torch.zeros(2)}], device, dtypes={"tokns": torch.int64})


def test_an_empty_loader_is_fine(dataset_200):
    empty = ss.StreamLoader(ss.StreamDataset(dataset_200, ss.Filter(lambda _: False)), batch_size=8, device="cpu")
    assert list(empty) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device='gpu' is no device that torch knows"),
        ({"device": "meta"}, "device='meta': batches are staged on CUDA devices and 'cpu'"),
        ({"device": "cuda:99"}, "device='cuda:99'"),
        ({"static_buffers": True}, "static_buffers=True.*pass device= too"),
        ({"dtypes": {"x": torch.int64}}, "dtypes=.*pass device= too"),
        ({"device": "cpu", "dtypes": {"x": "int64"}}, "field 'x' has 'int64'; pass a torch dtype"),
        ({"device": "cpu", "slots": 0}, "slots=0"),
    ],
)
def test_devices_that_cannot_be_are_refused_at_construction(dataset_200, options, message):
    with pytest.raises(ss.UsageError, match=message):
        ss.StreamLoader(ss.StreamDataset(dataset_200), batch_size=8, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_cuda_cuda_is_refused_at_construction(dataset_200):
    for options, message in [
        ({"device": "cuda"}, "is_available.. is False"),
        ({"pin_memory": True}, "pin_memory=True needs CUDA"),
    ]:
        with pytest.raises(ss.UsageError, match=message):
            ss.StreamLoader(ss.StreamDataset(dataset_200), batch_size=8, **options)


def test_the_cpu_device_has_the_verbs_of_a_device():
    device = CpuDevice()
    target = device.memory(4)
    device.copy(target, torch.arange(4, dtype=torch.uint8))
    device.consumer_waits(device.copied())
    device.copies_wait(device.passed())
    assert target.tolist() == [0, 1, 2, 3]
