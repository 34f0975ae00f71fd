"""The contenders of ``basp bench attention``: one attention layer over a batch that lies on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from basp.attention import AttentionSpec, Context, attend
from basp.bench.contender import Unavailable
from basp.bench.registry import load_builder
from basp.parallel import SequenceParallel

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [T, H, D], k [T, K, D], v [T, K, D] of this rank -> [T, H, D]"""

Kernel = Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]
"""q [B, H, T, D], k and v [B, K, T, D] -> [B, H, T, D]"""


@dataclass(frozen=True)
class Shape:
    """One layer's heads and batch, and what is computed inside: "attention" or "exchange"."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    inside: str


class Layer(NamedTuple):
    """A contender.

    Attributes:
        forward: of this rank's tokens.
        rows: [T] which tokens these are, in the batch laid end to end.
        does: one honest line.
    """

    forward: Forward
    rows: np.ndarray
    does: str


def _sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=spec.causal, scale=spec.scale, enable_gqa=True)


def _add(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Reads everything that was exchanged, and next to no time."""
    return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)


KERNELS: dict[str, Kernel] = {"attention": _sdpa, "exchange": _add}


def build_ours(shape: Shape, *, strategy: str) -> Layer:
    """Our executor with a strategy's plan."""
    sp = SequenceParallel(dist.group.WORLD, strategy=strategy)
    context: Context = sp.shard([np.arange(length) for length in shape.lengths]).context
    starts = np.cumsum([0, *shape.lengths])
    rows = [np.arange(start, stop) + starts[number] for number, start, stop in context.layout.shards[sp.rank]]
    kernel: Any = KERNELS[shape.inside]
    return Layer(
        lambda q, k, v: attend(q, k, v, context, kernel),
        np.concatenate(rows or [np.zeros(0, dtype=np.int64)]),
        f"basp's executor, plan {strategy!r}",
    )


# ---- Ulysses by hand


def build_by_hand(shape: Shape) -> Layer:
    """One all-to-all for each of q, k and v, as usual implementations do."""
    rows = _even_rows(shape, divides_kv=True)
    spread, gather, kernel = _scatter_heads(shape), _gather_heads(shape), _by_hand_kernel(shape)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gather(kernel(spread(q), spread(k), spread(v)))

    return Layer(forward, rows, "Ulysses by hand: an all-to-all for each of q, k and v")


def build_by_hand_packed(shape: Shape) -> Layer:
    """q, k and v packed into one all-to-all, the best that a person writes by hand."""
    rows = _even_rows(shape, divides_kv=True)
    ranks = dist.get_world_size()
    spread, gather, kernel = _scatter_heads(shape), _gather_heads(shape), _by_hand_kernel(shape)
    own = [shape.heads // ranks, shape.kv_heads // ranks, shape.kv_heads // ranks]

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = torch.cat([x.unflatten(1, (ranks, -1)) for x in (q, k, v)], dim=2)  # [T, N, (H + 2 K) / N, D]
        return gather(kernel(*spread(packed.flatten(1, 2)).split(own, dim=2)))

    return Layer(forward, rows, "Ulysses by hand: q, k and v packed into one all-to-all")


class _AllToAll(torch.autograd.Function):
    """[N, ...] -> [N, ...]: block i to rank i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        out = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, grads[0].contiguous())
        return out


def _scatter_heads(shape: Shape) -> Callable[[Tensor], Tensor]:
    """[B * T / N, H, D] -> [B, T, H / N, D]"""
    ranks, batch = dist.get_world_size(), len(shape.lengths)

    def scatter(x: Tensor) -> Tensor:
        blocks = _AllToAll.apply(x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous())
        return blocks.unflatten(1, (batch, -1)).transpose(0, 1).flatten(1, 2)

    return scatter


def _gather_heads(shape: Shape) -> Callable[[Tensor], Tensor]:
    """[B, T, H / N, D] -> [B * T / N, H, D]"""
    ranks = dist.get_world_size()

    def gather(x: Tensor) -> Tensor:
        blocks = x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(1, 2)
        return _AllToAll.apply(blocks.contiguous()).transpose(0, 1).flatten(1, 2)

    return gather


def _by_hand_kernel(shape: Shape) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """[B, T, H, D] in and out."""
    kernel, spec = KERNELS[shape.inside], AttentionSpec(shape.head_dim**-0.5)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spec).transpose(1, 2)

    return compute


# ---- peers


def build_yunchang(shape: Shape) -> Layer:
    """yunchang's all-to-all around sdpa."""
    attention: Any = load_builder("basp.bench.peers.ulysses_fsdp2:ulysses_attention")
    compute = attention()
    group, scale = dist.group.WORLD, shape.head_dim**-0.5
    return _peer(
        shape,
        lambda q, k, v: compute(None, q, k, v, None, scaling=scale, sequence_group=group)[0],
        "yunchang's all-to-all around torch's sdpa",
        divides_kv=True,
    )


def build_ring(shape: Shape) -> Layer:
    """Keys and values go round."""
    ring: Any = load_builder("basp.bench.peers.ring:RingAttention")
    group, scale = dist.group.WORLD, shape.head_dim**-0.5
    return _peer(
        shape,
        lambda q, k, v: ring.apply(q, k, v, scale, group).transpose(1, 2),
        "ring (ours, plain): keys and values once round all ranks, contiguous slices, no zig-zag",
        divides_kv=False,
    )


def _peer(shape: Shape, attention: Forward, does: str, *, divides_kv: bool) -> Layer:
    """``attention``: [B, H, T / N, D] of each -> [B, T / N, H, D]."""
    if shape.inside != "attention":
        raise Unavailable(
            "a peer that computes its own attention",
            allowed="--inside attention",
            remedy="leave it out: what it exchanges cannot be measured alone",
        )
    batch = len(shape.lengths)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*(x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))).flatten(0, 1)

    return Layer(forward, _even_rows(shape, divides_kv=divides_kv), does)


def _even_rows(shape: Shape, *, divides_kv: bool) -> np.ndarray:
    """This rank's slice of every sequence.

    Raises:
        Unavailable: sequences or heads that do not come out even.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    batch, length = len(shape.lengths), shape.lengths[0]
    uneven = set(shape.lengths) != {length} or length % ranks
    if uneven or (divides_kv and (shape.heads % ranks or shape.kv_heads % ranks)):
        raise Unavailable(
            f"sequences of {', '.join(map(str, shape.lengths))} tokens with {shape.heads}/{shape.kv_heads} heads "
            f"on {ranks} ranks",
            allowed="equal lengths and heads that the ranks divide",
            remedy="change them, or leave this contender out",
        )
    own = np.arange(rank * length // ranks, (rank + 1) * length // ranks)
    return np.concatenate([own + number * length for number in range(batch)])


LAYERS: dict[str, Callable[[Shape], Layer]] = {
    "by-hand": build_by_hand,
    "by-hand-packed": build_by_hand_packed,
    "ulysses": lambda shape: build_ours(shape, strategy="ulysses"),
    "basp": lambda shape: build_ours(shape, strategy="basp"),
    "yunchang": build_yunchang,
    "ring": build_ring,
}
