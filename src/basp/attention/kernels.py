"""Local attention kernels behind one signature.

    kernel(q, k, v, causal=..., scale=...) -> out

q [B, H, Tq, D], k [B, K, Tk, D], v [B, K, Tk, Dv], out [B, H, Tq, Dv], any strides; H a multiple of K, query head h
reads kv head h // (H // K). With ``causal``, query i sees keys up to ``Tk - Tq + i``: the last query sees them all.
"""

from __future__ import annotations

import difflib
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from basp.errors import ModelError


class Kernel(Protocol):
    """Attention of whole heads on one device, as the module's docstring says."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        """Compute softmax(q k^T x scale + mask) v."""
        ...


def eager(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Plain attention, softmax in at least float32. Right everywhere, and holds all Tq x Tk scores in memory."""
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    scores = (q @ k.transpose(-1, -2)) * scale
    if causal:
        scores = scores.masked_fill(~_causal_mask(q, k), float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights.to(q.dtype) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """torch's scaled_dot_product_attention: flash on CUDA in half precision and on CPU, memory-efficient otherwise."""
    whole = q.shape[2] == k.shape[2]
    mask = None if whole or not causal else _causal_mask(q, k)
    if q.shape[1] != k.shape[1] and not _flash_groups_heads(q, v, mask):
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and whole, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


KERNELS: dict[str, Kernel] = {"eager": eager, "sdpa": sdpa}


def find_kernel(name: str) -> Kernel:
    """The kernel of that name; "auto" is sdpa.

    Raises:
        ModelError: there is none; names the nearest.
    """
    if name == "auto":
        return sdpa
    if name not in KERNELS:
        near = difflib.get_close_matches(name, ["auto", *KERNELS], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
        raise ModelError(f"kernel {name!r}", allowed=", ".join(map(repr, ["auto", *KERNELS])), remedy=hint)
    return KERNELS[name]


def _flash_groups_heads(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    # Only flash takes fewer kv heads than query heads; another backend would fall back to math, which holds all scores.
    if q.shape[-1] != v.shape[-1]:
        return False
    return q.device.type == "cpu" or (mask is None and q.dtype in (torch.float16, torch.bfloat16))


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _causal_mask(q: Tensor, k: Tensor) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
