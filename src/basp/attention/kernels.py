"""Local attention kernels behind one signature, and what each can honour.

    kernel(q, k, v, spec) -> out

q [B, H, Tq, D], k [B, K, Tk, D], v [B, K, Tk, Dv], out [B, H, Tq, Dv], any strides; H a multiple of K, query head h
reads kv head h // (H // K). Query i stands at position ``Tk - Tq + i`` of its sequence: the last one sees every key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from basp.attention.spec import AttentionSpec
from basp.errors import ModelError, check_named


class Kernel(Protocol):
    """Attention of whole heads on one device, as the module's docstring says."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Compute softmax(q k^T x scale, as ``spec`` has it) v."""
        ...


def eager(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Plain attention, softmax in at least float32. Honours everything, and holds all Tq x Tk scores in memory."""
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    scores = (q @ k.transpose(-1, -2)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.causal or spec.window is not None:
        scores = scores.masked_fill(~_seen(q.shape[2], k.shape[2], spec, q.device), float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights[..., : k.shape[2]].to(q.dtype) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """torch's scaled_dot_product_attention: flash on CUDA in half precision and on CPU, memory-efficient otherwise.

    A sliding window runs in blocks of queries, each against the keys that its window reaches: time and memory grow with
    Tq x window, not with Tq x Tk.
    """
    if spec.window is not None and spec.window < k.shape[2]:
        return _in_blocks(q, k, v, spec)
    whole = q.shape[2] == k.shape[2]
    mask = None if whole or not spec.causal else _seen(q.shape[2], k.shape[2], spec, q.device)
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
        mask = _mask(positions, torch.arange(first, last, device=q.device), spec)
        block = (q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last])
        outs.append(_sdpa(*block, mask, is_causal=False, scale=spec.scale))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


_LEAST_BLOCK = 256
"""Queries of a block for windows shorter than this: smaller ones would cost more in calls than they save."""


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float) -> Tensor:
    if q.shape[1] != k.shape[1] and not _flash_groups_heads(q, v, mask):
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    value_dim = v.shape[-1]
    if value_dim < q.shape[-1]:  # flash takes one dim only: zeros beyond the values' own leave it exact (MLA)
        v = F.pad(v, (0, q.shape[-1] - value_dim))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[..., :value_dim]


@dataclass(frozen=True)
class KernelEntry:
    """A kernel and what it cannot do: wishes of a spec, in words."""

    run: Kernel
    lacks: Callable[[AttentionSpec], list[str]]


def _sdpa_lacks(spec: AttentionSpec) -> list[str]:
    return [wish for wish in spec.wishes() if wish.startswith(("a soft cap", "attention sinks"))]


KERNELS: dict[str, KernelEntry] = {
    "sdpa": KernelEntry(sdpa, _sdpa_lacks),
    "eager": KernelEntry(eager, lambda spec: []),
}
"""By name, the preferred first."""


@dataclass(frozen=True)
class ChosenKernel:
    """Picks, for each call, the first of its kernels that can do what the spec wants."""

    names: tuple[str, ...]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Run it.

        Raises:
            ModelError: none of them can.
        """
        return KERNELS[self.pick(spec)].run(q, k, v, spec)

    def pick(self, spec: AttentionSpec) -> str:
        """Its name.

        Raises:
            ModelError: none of them can; says which could.
        """
        for name in self.names:
            if not KERNELS[name].lacks(spec):
                return name
        able = [name for name, entry in KERNELS.items() if not entry.lacks(spec)]
        raise ModelError(
            f"{' and '.join(KERNELS[self.names[0]].lacks(spec))} with kernel {', '.join(map(repr, self.names))}",
            allowed=f"kernel {' or '.join(map(repr, able))}",
            remedy='choose that, or "auto", for SequenceParallel(kernel=...)',
        )


def find_kernel(name: str) -> ChosenKernel:
    """The kernel of that name; "auto" picks for each call the first of ``KERNELS`` that can do it.

    Raises:
        ModelError: there is none; names the nearest.
    """
    check_named("kernel", name, ["auto", *KERNELS], ModelError)
    return ChosenKernel(tuple(KERNELS) if name == "auto" else (name,))


def _flash_groups_heads(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    # Only flash takes fewer kv heads than query heads; another backend would fall back to math, which holds all scores.
    if q.shape[-1] < v.shape[-1]:
        return False
    return q.device.type == "cpu" or (mask is None and q.dtype in (torch.float16, torch.bfloat16))


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _seen(queries: int, keys: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """[Tq, Tk] whether the query sees the key."""
    return _mask(torch.arange(keys - queries, keys, device=device), torch.arange(keys, device=device), spec)


def _mask(query_positions: Tensor, key_positions: Tensor, spec: AttentionSpec) -> Tensor:
    distance = query_positions[:, None] - key_positions[None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if spec.causal:
        seen &= distance >= 0
    if spec.window is not None:
        seen &= distance < spec.window
    return seen
