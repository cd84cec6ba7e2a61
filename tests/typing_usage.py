"""How users write it; checked by the type checker, never run."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import streamshard as ss
from streamshard.attention import block_mask, hugging_face
from streamshard.testing import assert_exact_resume


def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": np.frombuffer(sample["text"].encode(), np.uint8)}


def noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise": rng.normal()}


def write(url: str) -> str:
    with ss.DatasetWriter(url, length_field="tokens", metadata={"tokenizer": "bytes"}) as writer:
        writer.write({"text": "hello", "tokens": np.zeros(3, np.uint16)})
        print(writer.progress.samples)
    return ss.open_manifest(url).version


def read(url: str, state: dict[str, Any] | None) -> dict[str, Any]:
    dataset = ss.StreamDataset(
        url, ss.Map(tokenize), ss.Map(noise, rng=True), ss.Filter(bool), ss.FlatMap(lambda s: [s, s]), ss.Batch(8),
        seed=17, shuffle_buffer=512, repeat=True, topology=ss.Topology(0, 4), snapshot="contents",
    )  # fmt: skip
    if state is not None:
        dataset.load_state_dict(state, allow={"batch"})
    for batch in dataset:
        print(batch["tokens"])
        break
    merged: dict[str, Any] = ss.merge_states([dataset.state_dict()])
    return merged


def random_access(url: str) -> None:
    samples = ss.MapDataset(url)
    one: dict[str, Any] = samples[0]
    many: list[dict[str, Any]] = samples[2:5]
    print(one, many, len(samples))
    loader: DataLoader[Any] = DataLoader(samples, batch_size=4, sampler=samples.sampler(seed=1))
    print(loader)
    for indices in samples.balanced(max_tokens=4096, seed=1, topology=ss.Topology(0, 8)):
        part: list[int] = indices
        print(part)


def load(url: str, state: dict[str, Any] | None) -> dict[str, Any]:
    dataset = ss.StreamDataset(url, ss.Map(tokenize, threads=4), repeat=True)
    with ss.StreamLoader(
        dataset, batch_size=8, collate=partial(ss.collate, ragged="pad"), workers=2, prefetch=3, device="cuda:0",
        slots=2, pin_memory=True, static_buffers=True, dtypes={"tokens": torch.int64}, accumulation=4,
    ) as loader:  # fmt: skip
        if state is not None:
            loader.load_state_dict(state, allow={"batch"})
        for batch in loader:
            print(batch["tokens"], loader.counters().waiting_s)
            break
        found: dict[str, Any] = loader.state_dict()
    return found


def other_loaders(url: str) -> dict[str, Any]:
    tracked: ss.TrackedLoader = ss.track(DataLoader(ss.StreamDataset(url), batch_size=8, num_workers=2))
    for batch in tracked:
        print(batch, len(tracked))
        break
    everywhere = ss.GatheredState(tracked)
    everywhere.load_state_dict(everywhere.state_dict())
    state: dict[str, Any] = ss.gather_state(tracked.state_dict())
    return state


def prove(url: str) -> int:
    return assert_exact_resume(lambda: ss.StreamDataset(url), items=100).resumes


def pack(web: str, code: str, state: dict[str, Any] | None) -> tuple[ss.Counts, dict[str, ss.SourceProgress]]:
    mixture = ss.Mixture(
        {"web": web, "code": ss.Source(code, ss.Map(tokenize), only="python")},
        {"web": 0.7, "code": 0.3},
        unit="tokens", exhausted={"web": "drop"}, max_epochs={"code": 4}, schedule=[(10**9, (0.5, 0.5))],
    )  # fmt: skip
    rows = ss.Pack(2048, fields={"input_ids": "text"}, overflow="truncate", max_segments=64, balance=16)
    dataset = ss.StreamDataset(mixture, rows, ss.Batch(16), provenance=True)
    if state is not None:
        dataset.load_state_dict(state, allow={"mixture"})
    for batch in dataset:
        segments: list[list[ss.Segment]] = batch["__segments__"]
        mask: torch.Tensor = block_mask(batch)
        print(segments[0][0].ref.source, mask, hugging_face(batch, "flash"))
        break
    print(ss.Batch(max_tokens=8192), ss.BucketBatch([256, 512], max_tokens=8192, overflow="alone"))
    return dataset.counts(over_ranks=True), dataset.sources()
