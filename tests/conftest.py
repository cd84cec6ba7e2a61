"""Datasets that many tests read, and guards that no test leaves anything behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import streamshard as ss
from streamshard.storage import engine


def write_dataset(directory: Path | str, count: int, *, per_shard: int = 40, block_bytes: int = 400, **options) -> str:
    """`count` samples {id, tokens, text} with about `per_shard` to a shard, in blocks of a few samples."""
    with ss.DatasetWriter(str(directory), shard_bytes=1 << 30, block_bytes=block_bytes, **options) as writer:
        for number in range(count):
            writer.write(sample(number))
            if (number + 1) % per_shard == 0:
                writer._finish_shard()
    return str(directory)


def sample(number: int) -> dict:
    tokens = np.arange(number, number + 5 + number % 7, dtype=np.uint16)
    return {"id": number, "tokens": tokens, "text": f"sample {number}", "maybe": None if number % 3 else "yes"}


@pytest.fixture(scope="session")
def dataset_203(tmp_path_factory) -> str:
    """203 samples in six shards: not a multiple of any P in use."""
    return write_dataset(tmp_path_factory.mktemp("data") / "ds203", 203)


@pytest.fixture(scope="session")
def dataset_1000(tmp_path_factory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "ds1000", 1000, per_shard=77)


@pytest.fixture(autouse=True)
def no_thread_and_no_request_is_left() -> Iterator[None]:
    """Every thread of ours that a test started ends with it, but for those that a process has once; so does every request."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("streamshard") and not thread.name.startswith(
            ("streamshard-io", "streamshard-blocking", "streamshard-inflate")
        ):
            thread.join(timeout=5)
            assert not thread.is_alive(), f"{thread.name} is still running"
    if engine._current is not None:
        left = engine._current.run(_requests_left())
        assert not left, f"still running: {left}"


async def _requests_left() -> set[asyncio.Task]:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return (await asyncio.wait(others, timeout=5))[1] if others else set()
