"""Ring attention under FSDP2: torch's own on CUDA; elsewhere, where that does not run, a plain one of ours.

In ours keys and values go round all ranks and queries stay. Each rank holds a contiguous slice of every sequence. Under
a causal mask the first rank then needs one block of keys and the last all N, and every step of the ring waits for the
slowest: no zig-zag evens that out here, as torch's does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from basp.bench.contender import Unavailable, Workload
from basp.bench.peers.padded import (
    FsdpContender,
    build_with,
    describe_padding,
    read_config,
)

NAME = "ring"


def build(workload: Workload, device: torch.device) -> FsdpContender:
    """Called on every rank after ``init_process_group``.

    Raises:
        Unavailable: a model whose attention is not plain causal attention, a torch that has no ring any more.
    """
    group = dist.group.WORLD
    assert group is not None
    read_config(workload)
    if device.type == "cuda":
        try:
            from basp.bench.peers.context_parallel import ContextParallelContender
        except ImportError as error:  # torch calls it experimental
            raise Unavailable(
                f"a torch without context_parallel: {error}",
                allowed="torch 2.9 to 2.13, which have it",
                remedy="leave this contender out",
            ) from error
        return ContextParallelContender(workload, device, name=NAME)
    ranks = dist.get_world_size()
    kernel = "torch's CPU flash kernel" if device.type == "cpu" else "all scores of a block in memory"
    return FsdpContender(
        build_with(_attention, workload, name="basp_bench_ring"),
        workload,
        device,
        name=NAME,
        does=f"ring (ours, plain): K and V once round all {ranks} ranks, contiguous slices, no zig-zag: the last rank "
        f"attends to {ranks} blocks and the first to 1; {kernel}; {describe_padding([workload.lengths], ranks)}",
        own=slice(None),
        group=group,
    )


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    sequence_group: dist.ProcessGroup,
    **_: Any,
) -> tuple[Tensor, None]:
    return RingAttention.apply(query, key, value, scaling, sequence_group).transpose(1, 2), None


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys of all ranks up to it.

    q [B, H, T, D], k and v [B, K, T, D] of equally many tokens on every rank, in rank order -> [B, H, T, D]
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:  # noqa: D102
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        ring = _Ring(group)
        passing = torch.stack([k, v])
        out, lse = q.new_zeros(q.shape, dtype=torch.float32), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        for hops in range(ranks):
            following = ring.start(passing) if hops < ranks - 1 else None
            if hops <= rank:  # else the block is of tokens after ours
                block_out, block_lse = attend_block(q, *passing, scale=scale, causal=hops == 0)
                out, lse = merge(out, lse, block_out.float(), block_lse)
            if following is not None:
                passing = following.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # noqa: D102
        q, k, v, out, lse = ctx.saved_tensors
        ranks, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        ring = _Ring(ctx.group)
        passing, grad_q = torch.stack([k, v]), torch.zeros_like(q, dtype=torch.float32)
        # The gradients of a block travel with it, one hop behind, and after N hops they are at home.
        collecting: _Passing | None = None
        for hops in range(ranks):
            following = ring.start(passing) if hops < ranks - 1 else None
            grad_kv = torch.zeros_like(passing, dtype=torch.float32)
            if hops <= rank:
                parts = differentiate_block(grads[0], q, *passing, out, lse, scale=ctx.scale, causal=hops == 0)
                grad_q += parts[0]
                grad_kv += torch.stack(parts[1:])
            if collecting is not None:
                grad_kv += collecting.wait()
            collecting = ring.start(grad_kv)
            if following is not None:
                passing = following.wait()
        assert collecting is not None
        grad_k, grad_v = collecting.wait().to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


class _Passing:
    """A tensor on its way to the next rank, and the one that comes from the previous."""

    def __init__(self, works: list[dist.Work], sent: Tensor, received: Tensor) -> None:
        self._works, self._sent, self._received = works, sent, received  # what is sent must live until it has left

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


class _Ring:
    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._group, self._next, self._previous = group, (rank + 1) % ranks, (rank - 1) % ranks

    def start(self, tensor: Tensor) -> _Passing:
        """Send a contiguous tensor on; every rank starts the same ones in the same order."""
        received = torch.empty_like(tensor)
        if self._next == self._previous == dist.get_rank(self._group):
            return _Passing([], tensor, tensor)
        sending = dist.P2POp(dist.isend, tensor, group=self._group, group_peer=self._next)
        receiving = dist.P2POp(dist.irecv, received, group=self._group, group_peer=self._previous)
        return _Passing(dist.batch_isend_irecv([sending, receiving]), tensor, received)


# ---- one block: T queries, as many keys


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys from attention to each: out [B, H, T, D], log-sum-exp [B, H, T], in float32."""
    both = torch.logaddexp(lse, block_lse)
    return out * (lse - both).exp()[..., None] + block_out * (block_lse - both).exp()[..., None], both


def attend_block(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and log-sum-exp of the scores, float32 [B, H, T]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if q.device.type == "cpu":  # no public function of torch gives the log-sum-exp as well
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return attend_plainly(q, k, v, scale=scale, causal=causal)


def differentiate_block(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from this block of keys, given output and log-sum-exp over *all* keys."""
    kv_heads = k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if q.device.type == "cpu":
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = flash_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    else:
        grads = differentiate_plainly(grad, q, k, v, out, lse, scale=scale, causal=causal)
    grad_k, grad_v = (x.unflatten(1, (kv_heads, -1)).sum(dim=2) for x in grads[1:])
    return grads[0], grad_k, grad_v


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """``attend_block`` for as many heads of k and v as of q, with all scores in memory."""
    scores = _scores(q, k, scale=scale, causal=causal)
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


def differentiate_plainly(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``differentiate_block`` for as many heads of k and v as of q, with all scores in memory."""
    weights = (_scores(q, k, scale=scale, causal=causal) - lse[..., None]).exp()
    spread = (grad @ v.mT).float() - (grad.float() * out.float()).sum(dim=-1, keepdim=True)
    of_scores = (weights * spread * scale).to(q.dtype)
    return of_scores @ k, of_scores.mT @ q, weights.to(q.dtype).mT @ grad


def _scores(q: Tensor, k: Tensor, *, scale: float, causal: bool) -> Tensor:
    scores = (q @ k.mT).float() * scale
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf)
