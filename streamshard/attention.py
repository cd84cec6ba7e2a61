"""Batches of rows with several documents, as attention kernels and models want them. docs/batch.md has an example of each.

Every function takes a batch as `StreamLoader` hands it out (or one row, made a batch of one), on any device, and works from
``segment_ids`` and ``cu_seqlens``, never from token ids or position resets. Without state; thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from streamshard.errors import UsageError

Batch = Mapping[str, Any]

KINDS = ("sdpa", "eager", "flash")


def block_mask(batch: Batch, *, causal: bool = True) -> torch.Tensor:
    """Who may attend to whom, for ``scaled_dot_product_attention``: bool, shape ``(rows, 1, tokens, tokens)``, True where a
    query (third dimension) sees a key (fourth): in its own document, with `causal` only up to itself.

    Padding sees padding, so that no query sees nothing, which would give NaN.
    """
    ids = _segment_ids(batch)
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    if causal:
        mask &= torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    return mask


def flex_mask(batch: Batch, *, causal: bool = True) -> Any:
    """The same as a ``BlockMask`` for ``torch.nn.attention.flex_attention.flex_attention(..., block_mask=)``, for any number of
    heads: blocks of 128 tokens that nobody sees are skipped.
    """
    ids = _segment_ids(batch)

    def visible(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same = ids[row, query] == ids[row, key]
        return same & (query >= key) if causal else same

    rows, tokens = ids.shape
    return create_block_mask(visible, rows, None, tokens, tokens, device=ids.device)


def varlen(batch: Batch) -> tuple[torch.Tensor, int]:
    """(cu_seqlens, max_seqlen) of the rows laid end to end, ``q.view(rows * tokens, heads, dim)``, padding as segments.

    For ``flash_attn_varlen_func``. int32, shape ``(rows * entries + 1,)``, on the batch's device; some segments are empty. The
    second is an upper bound. Nothing waits for the device, and with ``Pack(max_segments=)`` the shape is always the same.
    """
    ids, ends = _segment_ids(batch), batch["cu_seqlens"]
    rows, tokens = ids.shape
    begins = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=ends.device)
    return torch.cat([(ends + begins[:-1, None]).flatten(), begins[-1:]]), tokens


def flatten(batch: Batch) -> dict[str, Any]:
    """The batch without its padding: what has a value per token as shape ``(real tokens,)``, ``cu_seqlens`` with the ends of
    all documents (int32, shape ``(documents + 1,)``) and ``max_seqlen`` (int). On a GPU it waits for the device.
    """
    ids = _segment_ids(batch)
    real = ids >= 0
    flat: dict[str, Any] = {
        name: value[real]
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.shape == ids.shape
    }
    ends = batch["cu_seqlens"]
    lengths = ends.diff(dim=1)
    lengths = lengths[(lengths > 0) & (ends[:, 1:] <= real.sum(1, keepdim=True))]  # fixed shapes have padding in it too
    flat["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    flat["max_seqlen"] = int(lengths.max())
    return flat


def hugging_face(batch: Batch, attention: str = "sdpa", *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments for a causal language model of ``transformers``, ``model(**hugging_face(batch))``: its ``loss`` is then the
    mean over the batch's loss tokens.

    attention: what the model was made with, ``attn_implementation=``: ``"sdpa"``, ``"eager"`` (a mask of `dtype`, that of the
        model) or ``"flash"`` (one row without padding).

    The labels must not be shifted: the models do that.
    """
    if attention not in KINDS:
        raise UsageError(f"attention={attention!r}: choose one of {', '.join(map(repr, KINDS))}")
    if attention == "flash":
        flat = flatten(batch)
        ends, longest = flat["cu_seqlens"], flat["max_seqlen"]
        given = {name: flat[name][None] for name in ("input_ids", "labels", "position_ids")}
        return given | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    given = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    mask = block_mask(batch)
    if attention == "eager":
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    return given | {"attention_mask": mask}


def _segment_ids(batch: Batch) -> torch.Tensor:
    ids = batch.get("segment_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        found = "none" if ids is None else f"shape {tuple(ids.shape)}"
        raise UsageError(
            f"a batch of rows has segment_ids of shape (rows, tokens), this one has {found}: pass what a StreamLoader over "
            f"a dataset with Pack hands out"
        )
    return ids
