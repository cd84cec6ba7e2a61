"""The layers know only what the design lets them know, read from the source with ``ast``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import streamshard

ROOT = Path(streamshard.__file__).parent
EVERYWHERE = {"streamshard.errors", "streamshard.order", "streamshard.observe.events"}

LAYERS = {  # folder -> what of the package it may import besides itself, order and errors
    "order": set(),
    "storage": set(),
    "shard": set(),
    "steps": set(),
    "prefetch": {"streamshard.shard", "streamshard.storage.store"},
    "distributed": {"streamshard.state", "streamshard.staging.tree"},
    "observe": set(),
    "staging": set(),
    "frameworks": {
        "streamshard.dataset",
        "streamshard.iteration",
        "streamshard.loader",
        "streamshard.loading",
        "streamshard.state",
        "streamshard.distributed",
    },
    "loading": {
        "streamshard.iteration",
        "streamshard.dataset",
        "streamshard.frameworks.callers",
        "streamshard.state",
        "streamshard.staging",
        "streamshard.steps.tensors",
        "streamshard.steps.counts",
    },
}
HOMES = {  # third-party package -> the only files that may import it
    "zstandard": {"shard/compression.py"},
    "xxhash": {"shard/compression.py"},
    "msgpack": {"shard/records.py", "testing/resume.py"},
    "fsspec": set(),  # storage/fsspec_store.py, by name at first use
    "obstore": set(),  # storage/obstore_store.py, likewise
    "tenacity": {"storage/limiter.py"},
    "lightning": {"frameworks/lightning.py"},
    "transformers": {"frameworks/transformers.py"},
    "s3fs": set(),
    "gcsfs": set(),
    "torch": {
        "dataset.py",
        "map_dataset.py",
        "steps/tensors.py",
        "attention.py",
        "balanced.py",
        "distributed/topology.py",
        "testing/resume.py",
        "loader.py",
        "staging/buffers.py",
        "staging/device.py",
        "staging/stager.py",
        "staging/tree.py",
        "loading/shared_memory.py",
        "loading/run.py",
        "loading/worker.py",
        "loading/parts.py",
        "frameworks/track.py",
        "frameworks/lightning.py",
        "frameworks/transformers.py",
        "distributed/gather.py",
        "distributed/mesh.py",
        "distributed/replicas.py",
        "distributed/first_step.py",
        "distributed/channel.py",
        "distributed/equal_steps.py",
        "distributed/job.py",
        "loading/equal.py",
        "loading/broadcast.py",
        "cli/state.py",
        "cli/state_files.py",
    },
}
PURE = {"threading", "concurrent", "time", "random", "os", "io", "socket", "torch", "asyncio", "logging"}


def files(folder=""):
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path):
    """Modules imported at the top of a file, and those imported further down."""
    tree = ast.parse(path.read_text())
    top, late = set(), set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        (top if node in tree.body else late).update(names)
    return top, late


def within(module, allowed):
    return any(module == name or module.startswith(name + ".") for name in allowed)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_is_below_it(layer):
    allowed = EVERYWHERE | LAYERS[layer] | {f"streamshard.{layer}"}
    for path in files(layer):
        ours = {module for module in imports(path)[0] if module.startswith("streamshard")}
        assert not {module for module in ours if not within(module, allowed)}, path


def test_every_dependency_has_one_home():
    for path in files():
        for module in imports(path)[0] | imports(path)[1]:
            package = module.partition(".")[0]
            if package in HOMES:
                assert path.relative_to(ROOT).as_posix() in HOMES[package], f"{path} imports {module}"


def test_the_order_layer_is_pure():
    for path in files("order"):
        assert not {module.partition(".")[0] for module in imports(path)[0]} & PURE, path


def test_nothing_is_imported_late_or_pickled_or_asserted_on_users():
    for path in files():
        assert not imports(path)[1], f"{path} imports inside a function"
        if path.relative_to(ROOT).as_posix() != "loading/wire.py":  # batches between processes of one job
            assert not {"pickle", "cloudpickle", "dill", "marshal"} & imports(path)[0], path


def test_no_function_is_longer_than_a_screen():
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                doc = node.body[0].end_lineno + 1 if ast.get_docstring(node) else node.body[0].lineno
                assert node.end_lineno - doc < 50, f"{path}: {node.name}"


def test_the_public_surface_is_sorted_and_documented():
    assert streamshard.__all__ == sorted(streamshard.__all__)
    for name in streamshard.__all__:
        assert getattr(streamshard, name).__doc__, name
