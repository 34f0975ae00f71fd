"""The run that N ranks are compared with: one process, one sequence at a time, attention and loss written out.

Shares no code with basp's executor. What a token may see is asked of transformers itself: the mask that the model's
own code requests of its eager attention. So a window, a chunk or a direction that basp misreads shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from basp.checks.trace import Trace, gradients_of, sgd_step, watched
from basp.hf.function import set_attention

NAME = "basp_check_reference"
"""Of the attention implementation."""


def run_reference(
    model: nn.Module, ids: Sequence[NDArray[Any]], labels: Sequence[NDArray[Any]], *, attention: str = NAME
) -> Trace:
    """One optimizer step in one process.

    Args:
        model: takes the step, and its attention implementation is changed.
        ids: [T] token ids of each sequence.
        labels: [T] of each, not shifted, -100 where there is no loss.
        attention: an implementation of transformers to use instead of the one below.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _whole_mask)
    set_attention(model, attention)
    with watched(model) as records:
        outputs = [_forward(model, sequence) for sequence in ids]
        pairs = [_token_losses(output.logits[0], own) for output, own in zip(outputs, labels, strict=True)]
        losses, counts = zip(*pairs, strict=True)
        loss = torch.stack(losses).sum() / max(sum(counts), 1) + _router_loss(model, outputs)
        loss.backward()
    gradients = gradients_of(model)
    return Trace(loss.detach()[None], records, gradients, sgd_step(model, gradients))


def _forward(model: nn.Module, ids: NDArray[Any]) -> Any:
    """What the model gives for one sequence alone: logits [1, T, V]."""
    tokens, positions = torch.from_numpy(ids)[None], torch.arange(len(ids))[None]
    return model(input_ids=tokens, position_ids=positions, use_cache=False)


def _token_losses(logits: Tensor, labels: NDArray[Any]) -> tuple[Tensor, int]:
    """Sum of the losses of one sequence [T, V], and how many there are: token t predicts label t + 1."""
    wide = logits[:-1].to(torch.promote_types(logits.dtype, torch.float32))
    following = torch.from_numpy(labels)[1:]
    counted = following != -100
    chosen = wide.gather(1, following.clamp(min=0)[:, None])[:, 0]
    return ((wide.logsumexp(dim=-1) - chosen) * counted).sum(), int(counted.sum())


def _router_loss(model: nn.Module, outputs: Sequence[Any]) -> Tensor | float:
    """Load balancing of a mixture of experts over the whole batch, where the config asks for it (output_router_logits).

    The number of experts x the sum over experts of (choices of it / tokens) x (its mean probability), tokens counted
    once for each layer: as transformers' models add it to their own loss.
    """
    config: Any = cast(Any, model.config).get_text_config()
    given = [logits for output in outputs for logits in getattr(output, "router_logits", None) or ()]
    if not given:
        return 0.0
    logits = torch.cat(given)
    probabilities = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(config.num_experts_per_tok).indices, 1.0)
    balance = (chosen.mean(dim=0) * probabilities.mean(dim=0)).sum() * logits.shape[-1]
    return balance * config.router_aux_loss_coef


def _whole_mask(**asked: Any) -> Tensor | None:
    """[1, 1, T, T], true where a query sees a key; never left out as transformers may where it is plainly causal."""
    asked |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**asked)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Every score written out: query [1, H, T, D], key [1, K, T, D], value [1, K, T, Dv] -> [1, T, H, Dv].

    Query head h reads kv head h // (H / K). Computed in at least float32, rounded to the query's type at the end.
    """
    heads, wide = query.shape[1], torch.promote_types(query.dtype, torch.float32)
    kv_head = torch.arange(heads) // (heads // key.shape[1])
    q, k, v = (x[0].to(wide) for x in (query, key[:, kv_head], value[:, kv_head]))
    scores = torch.einsum("hqd,hkd->hqk", q, k) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is None and getattr(module, "is_causal", True):  # a module of one's own that makes no mask
        attention_mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()[None]
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask[0], float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    if s_aux is not None:
        largest = torch.maximum(largest, s_aux.to(wide)[:, None, None])
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=-1, keepdim=True)
    if s_aux is not None:  # a sink takes its share of the softmax and gives nothing
        total = total + torch.exp(s_aux.to(wide)[:, None, None] - largest)
    return torch.einsum("hqk,hke->qhe", weights / total, v).to(query.dtype)[None], None
