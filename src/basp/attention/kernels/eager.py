"""Plain attention, written out."""

from __future__ import annotations

import torch
from torch import Tensor

from basp.attention.kernels.declare import Abilities
from basp.attention.kernels.masks import repeat_heads, seen
from basp.attention.spec import AttentionSpec

ABILITIES = Abilities()


def eager(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Plain attention, softmax in at least float32. Honours everything, and holds all Tq x Tk scores in memory."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = (q @ k.transpose(-1, -2)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.causal or spec.window is not None:
        scores = scores.masked_fill(~seen(q.shape[2], k.shape[2], spec, q.device), float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights[..., : k.shape[2]].to(q.dtype) @ v
