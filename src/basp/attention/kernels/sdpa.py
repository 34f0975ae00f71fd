"""torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from basp.attention.kernels.declare import Abilities
from basp.attention.kernels.masks import repeat_heads, seen, seen_at
from basp.attention.spec import AttentionSpec

ABILITIES = Abilities(softcap=False, sinks=False)

_LEAST_BLOCK = 256
"""Queries of a block for windows shorter than this: smaller ones would cost more in calls than they save."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """torch's scaled_dot_product_attention: flash on CUDA in half precision and on CPU, memory-efficient otherwise.

    A sliding window runs in blocks of queries, each against the keys that its window reaches: time and memory grow with
    Tq x window, not with Tq x Tk.
    """
    if spec.window is not None and spec.window < k.shape[2]:
        return _in_blocks(q, k, v, spec)
    whole = q.shape[2] == k.shape[2]
    mask = None if whole or not spec.causal else seen(q.shape[2], k.shape[2], spec, q.device)
    return _sdpa(q, k, v, mask, is_causal=spec.causal and whole, scale=spec.scale)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    assert spec.window is not None
    queries, keys = q.shape[2], k.shape[2]
    size = max(spec.window, _LEAST_BLOCK)
    outs: list[Tensor] = []
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        first = max(0, keys - queries + start - spec.window + 1)
        last = keys - queries + stop if spec.causal else keys
        # The block's mask is a piece of the whole one: rows start:stop, columns first:last.
        positions = torch.arange(start, stop, device=q.device) + (keys - queries)
        mask = seen_at(positions, torch.arange(first, last, device=q.device), spec)
        block = (q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last])
        outs.append(_sdpa(*block, mask, is_causal=False, scale=spec.scale))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float) -> Tensor:
    if q.shape[1] != k.shape[1] and not _flash_groups_heads(q, v, mask):
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    value_dim = v.shape[-1]
    if value_dim < q.shape[-1]:  # flash takes one dim only: zeros beyond the values' own leave it exact (MLA)
        v = F.pad(v, (0, q.shape[-1] - value_dim))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[..., :value_dim]


def _flash_groups_heads(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    # Only flash takes fewer kv heads than query heads; another backend would fall back to math, which holds all scores.
    if q.shape[-1] < v.shape[-1]:
        return False
    return q.device.type == "cpu" or (mask is None and q.dtype in (torch.float16, torch.bfloat16))
