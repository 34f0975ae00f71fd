"""Which keys a query sees, by their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from basp.attention.spec import AttentionSpec


def seen(queries: int, keys: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """[Tq, Tk] whether the query sees the key."""
    return seen_at(torch.arange(keys - queries, keys, device=device), torch.arange(keys, device=device), spec)


def seen_at(query_positions: Tensor, key_positions: Tensor, spec: AttentionSpec) -> Tensor:
    """The same for queries and keys at these positions, [Tq] and [Tk]."""
    distance = query_positions[:, None] - key_positions[None]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if spec.causal:
        allowed &= distance >= 0
    if spec.window is not None:
        allowed &= distance < spec.window
    return allowed


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, K, T, D] -> [B, H, T, D], each kv head for the query heads that read it; itself where K is H."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
