"""Python objects on their way between processes of one job. Nothing stored, and nothing from outside, is read with this."""

from __future__ import annotations

import pickle
from typing import Any


def pack(value: Any) -> bytes:
    """Plain pickle: multiprocessing's sends tensors as descriptors, which mean nothing to processes that are no relatives."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """What a process of this job has packed."""
    return pickle.loads(data)  # noqa: S301  (see above)
