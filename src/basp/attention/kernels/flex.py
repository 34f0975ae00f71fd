"""torch's flex_attention: one fused kernel on CUDA for whatever a layer wishes, compiled for any length."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from basp.attention.kernels.declare import Abilities
from basp.attention.spec import AttentionSpec

ABILITIES = Abilities(
    types={"cuda": (torch.float16, torch.bfloat16, torch.float32), "cpu": None},
    backward=("cuda",),
)

BLOCK = 128
"""Queries, and keys, of a block of the mask."""
_GRAPHS = 64
"""Compiled variants that may exist: a mask or none, a soft cap or none, one block or several, ... torch's own limit of
8 would make later calls fall back to attention that holds all scores."""


def flex(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """flex_attention: blocks that no query sees are skipped, and nothing holds all scores.

    On CPU it is there to check what is asked of it: forward only, not compiled, and it does hold all scores.
    """
    attention = _compiled if q.device.type == "cuda" else _uncompiled
    masked = spec.causal or spec.window is not None
    precision = torch.promote_types(q.dtype, torch.float32)
    cap = None if spec.softcap is None else torch.tensor(spec.softcap, dtype=precision, device=q.device)
    out, logsumexp = attention(
        *(_widened(x) for x in (q, k, v)),
        block_mask(q.shape[2], k.shape[2], spec, q.device) if masked else None,
        None if cap is None else _soft_cap(cap),
        spec.scale,
        spec.sinks is not None,
    )
    out = out[..., : v.shape[-1]]
    if spec.sinks is None:
        return out
    # A sink is one more score of the softmax and has no value: it takes its share of every weight alike.
    share = torch.sigmoid(logsumexp - spec.sinks.to(logsumexp.dtype)[None, :, None])
    return (out * share[..., None]).to(q.dtype)


def _widened(x: Tensor) -> Tensor:
    """Heads of dim 16 at least, which is what it can compile for; zeros change nothing."""
    return F.pad(x, (0, 16 - x.shape[-1])) if x.shape[-1] < 16 else x


def block_mask(queries: int, keys: int, spec: AttentionSpec, device: torch.device) -> BlockMask:
    """The mask in blocks, computed from their corners: torch's own ``create_block_mask`` evaluates it at every score.

    Numbers that differ between calls are tensors: a compiled kernel would be compiled anew for each Python number.
    """
    offset = keys - queries
    first_query = torch.arange(0, queries, BLOCK, device=device)
    last_query = (first_query + BLOCK - 1).clamp(max=queries - 1)
    first_key = torch.arange(0, keys, BLOCK, device=device)
    last_key = (first_key + BLOCK - 1).clamp(max=keys - 1)
    nearest = (first_query + offset)[:, None] - last_key[None]
    farthest = (last_query + offset)[:, None] - first_key[None]
    least, most = _distances(keys, spec)
    some = (farthest >= least) & (nearest <= most)
    whole = (nearest >= least) & (farthest <= most)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=_within(*(torch.tensor(number, device=device) for number in (offset, least, most))),
        seq_lengths=(queries, keys),
    )


def _distances(keys: int, spec: AttentionSpec) -> tuple[int, int]:
    """Least and largest distance, from a query back to a key that it sees."""
    return 0 if spec.causal else -keys, keys if spec.window is None else spec.window - 1


def _listed(blocks: Tensor) -> tuple[Tensor, Any]:
    """[1, 1, Q] how many blocks a row of blocks sees, [1, 1, Q, K] their indices first."""
    count = blocks.sum(-1, dtype=torch.int32)
    indices = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], indices[None, None]


def _within(offset: Tensor, least: Tensor, most: Tensor) -> Callable[..., Tensor]:
    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + offset - key
        return (distance >= least) & (distance <= most)

    return seen


def _soft_cap(cap: Tensor) -> Callable[..., Tensor]:
    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None,
    change: Callable[..., Tensor] | None,
    scale: float,
    logsumexp: bool,
) -> tuple[Tensor, Any]:
    wished = {"score_mod": change, "block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if not logsumexp:
        return flex_attention(q, k, v, **wished), None
    out, aux = flex_attention(q, k, v, **wished, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@cache
def _compilable() -> Callable[..., tuple[Tensor, Any]]:
    # The whole graph or an error: what is not compiled holds all scores, which no GPU has room for.
    return torch.compile(_attention, dynamic=True, fullgraph=True)


def _compiled(*given: Any) -> tuple[Tensor, Any]:
    with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
        return _compilable()(*given)


def _uncompiled(*given: Any) -> tuple[Tensor, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return _attention(*given)
