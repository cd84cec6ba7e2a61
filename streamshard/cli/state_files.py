"""States out of checkpoints: files of ``torch.save``, JSON, and folders of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from streamshard.distributed.sharded import put_together
from streamshard.errors import StateError, UsageError
from streamshard.state import State, of_stateful_dataloader, states_inside


def read_states(path: str) -> list[tuple[str, State]]:
    """(where, state) for every state of a dataset or loader in the checkpoint at `path`, however deep inside.

    Raises `UsageError` for files that cannot be read, or have no state in them.
    """
    place = Path(path)
    if not place.exists():
        raise UsageError(f"{path} does not exist; pass a file of torch.save, a JSON file, or a folder of dcp.save")
    found = list(_in_folder(place) if place.is_dir() else _inside(_loaded(place), ""))
    if not found:
        raise UsageError(f"{path} has no state of a streamshard loader or dataset in it")
    return [(f"{path}{':' if where else ''}{where}", state) for where, state in found]


def _loaded(path: Path) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise UsageError(f"{path} is not JSON ({error})") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever pickle, zip files and torch have for bytes that are none of theirs
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{path} cannot be read as a file of torch.save with weights_only=True ({reason}); save the loader's state_dict() "
            f"in a file of its own"
        ) from error


def _inside(value: Any, where: str) -> Iterator[tuple[str, State]]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return
    if {"format", "scope", "fingerprint", "partitions"} <= value.keys():
        yield where, dict(value)
    elif of_stateful_dataloader(value):  # perhaps of another dataset than ours
        with suppress(StateError, KeyError, TypeError):
            found = states_inside(value)
            yield from (
                (f"{where}[{number}]" if len(found) > 1 else where, state) for number, state in enumerate(found)
            )
    else:
        for key, inner in value.items():
            yield from _inside(inner, f"{where}.{key}" if where else str(key))


def _in_folder(folder: Path) -> Iterator[tuple[str, State]]:
    if not (folder / ".metadata").exists():
        raise UsageError(f"{folder} is no folder of torch.distributed.checkpoint: it has no .metadata")
    keys = list(FileSystemReader(folder).read_metadata().state_dict_metadata)
    for key in keys:
        name = key.removesuffix(".fingerprint")
        if name == key:
            continue
        entries = [k for k in keys if re.fullmatch(re.escape(f"{name}.partitions.") + r"\d+", k)]
        wanted: dict[str, Any] = dict.fromkeys([key, *entries], "")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            load(wanted, checkpoint_id=folder, no_dist=True)
        partitions = {k.rpartition(".")[2]: wanted[k] for k in entries}
        yield name, put_together({"fingerprint": wanted[key], "partitions": partitions})
