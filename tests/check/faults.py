"""Faults that public code has had, planted in a rank's process: ``fault(model, sp)`` is called before its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import basp.hf.function
from basp.attention import AttentionSpec, Context
from basp.strategies import plan


def lost_border_label(_model: Any, sp: Any) -> None:
    """Labels shifted after cutting: the last token of a rank's slice has none."""

    def spoil(step: Any) -> Any:
        step.targets[0, -1] = -100
        return step

    _after_shard(sp, spoil)


def loss_times_ranks(_model: Any, sp: Any) -> None:
    share = sp.loss
    sp.loss = lambda model, step: share(model, step) * sp.ranks


def position_offset(_model: Any, sp: Any) -> None:
    """Positions that start at 0 in every rank's slice."""
    _after_shard(sp, lambda step: replace(step, position_ids=torch.arange(step.input_ids.shape[1])[None]))


def kv_head_off_by_one(_model: Any, _sp: Any) -> None:
    _around_attend(lambda q, k, v, spec: (q, k.roll(1, dims=1), v.roll(1, dims=1), spec))


def dropped_window(_model: Any, _sp: Any) -> None:
    _around_attend(lambda q, k, v, spec: (q, k, v, replace(spec, window=None)))


def missing_sinks(_model: Any, _sp: Any) -> None:
    _around_attend(lambda q, k, v, spec: (q, k, v, replace(spec, sinks=None)))


def dropped_softcap(_model: Any, _sp: Any) -> None:
    _around_attend(lambda q, k, v, spec: (q, k, v, replace(spec, softcap=None)))


def doubled_head_gradient(model: Any, _sp: Any) -> None:
    """Head 1 of layer 1 is counted twice where its weight's gradient is summed."""

    def double(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[8:16] *= 2
        return gradient

    model.model.layers[1].self_attn.q_proj.weight.register_hook(double)


def doubled_key_gradient(_model: Any, _sp: Any) -> None:
    """An exchange whose backward sends keys' gradients twice."""

    def double(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
        return q, 2 * k - k.detach(), v, spec

    _around_attend(double)


def leaking_mask(_model: Any, _sp: Any) -> None:
    """The batch as one long document."""

    def merged(self: Context, heads: int, kv_heads: int, *, causal: bool = True) -> Any:
        total = [sum(self.lengths)]
        return plan(total, ranks=self.ranks, heads=heads, kv_heads=kv_heads, strategy=self.strategy, causal=causal)

    Context.plan = merged


def crash(_model: Any, _sp: Any) -> None:
    raise ZeroDivisionError("planted")


def hang(_model: Any, sp: Any) -> None:
    """Rank 0 waits for the others, who do not come."""
    if sp.rank == 0:
        torch.distributed.barrier()


def _after_shard(sp: Any, change: Callable[[Any], Any]) -> None:
    shard = sp.shard
    sp.shard = lambda sequences, labels: change(shard(sequences, labels))


def _around_attend(change: Callable[..., tuple[Tensor, Tensor, Tensor, AttentionSpec]]) -> None:
    attend = basp.hf.function.attend

    def wrapped(q: Tensor, k: Tensor, v: Tensor, context: Context, *, spec: AttentionSpec) -> Tensor:
        *parts, spec = change(q, k, v, spec)
        return attend(*parts, context, spec=spec)

    basp.hf.function.attend = wrapped
