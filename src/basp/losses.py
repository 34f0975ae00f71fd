"""One loss: the mean over all valid tokens of an optimizer step, however ranks and micro-batches share them.

Worked example. Two ranks, one optimizer step of two micro-batches, 10 valid tokens in all. In the first micro-batch
rank 0 holds 3 of them with losses that sum to 6.0, rank 1 holds 1 with 2.0; in the second, rank 0 holds none, rank 1
holds 6 with 9.0. One process would print (6 + 2 + 0 + 9) / 10 = 1.7.

- The shares: (6 + 2) / 10 = 0.8 and (0 + 9) / 10 = 0.9 on *both* ranks; they sum to 1.7. A mean of means,
  (2 + 2 + 1.5) / 3, would not.
- The gradients: rank 0 backpropagates 2 x 6.0 / 10 and 2 x 0, rank 1 2 x 2.0 / 10 and 2 x 9.0 / 10. Averaging over the
  two ranks (FSDP2, DDP or an all-reduce mean) divides by 2 what was multiplied by 2: the gradient of 1.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from basp.batches import IGNORED


def sum_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies of this rank's valid tokens, in at least float32.

    Args:
        logits: [..., V].
        targets: [...] next token of each token, already shifted; ``IGNORED`` has no loss.

    Returns:
        Scalar; 0, with a gradient of zeros, where no target is valid.
    """
    flat = logits.flatten(0, -2)
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def share_of_mean(local_sum: Tensor, *, valid_tokens: int, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """This micro-step's share of the mean over all valid tokens of the optimizer step; see the module's example.

    Args:
        local_sum: sum of this rank's token losses.
        valid_tokens: of the whole optimizer step, over all ranks and micro-steps. With 0 the share is 0.
        groups: the ranks that average gradients are the product of these groups (one for each mesh dimension).

    Returns:
        Scalar with the same value on all those ranks, whose backward is ``ranks / valid_tokens`` into ``local_sum``.
    """
    return _scaled_sum(local_sum, divisor=max(valid_tokens, 1), groups=groups, ranks=_product(groups))


def share_of_router_loss(
    router_logits: Sequence[Tensor],
    *,
    top_k: int,
    own_tokens: int,
    all_tokens: int,
    weight: float,
    group: dist.ProcessGroup | None,
    groups: Sequence[dist.ProcessGroup],
) -> Tensor:
    """This micro-step's share of a mixture of experts' load-balancing loss (Switch Transformer, arXiv 2101.03961, 4-6).

    It is that of the whole micro-batch, as one process would compute it over all its tokens and layers: the share of
    tokens that an expert is given x its mean probability, summed over experts, x the number of experts.

    Args:
        router_logits: [T, E] of each layer, of this rank's tokens.
        top_k: experts that a token is given.
        own_tokens: the first of the T that count: 0 on a rank that runs a dummy.
        all_tokens: of the micro-batch, over all ranks of ``group``.
        weight: of the micro-batch in the optimizer step: its share of the valid tokens.
        group: the ranks that share the micro-batch.
        groups: whose product averages gradients; ``group`` is one of them.

    Returns:
        Scalar with the same value on all ranks that average, whose backward, averaged over them, is one process's.
    """
    experts = router_logits[0].shape[-1]
    rows = all_tokens * len(router_logits)
    wide = torch.promote_types(router_logits[0].dtype, torch.float32)
    given = torch.zeros(experts, dtype=wide, device=router_logits[0].device)
    probability = torch.zeros_like(given)
    for logits in router_logits:
        weights = torch.softmax(logits[:own_tokens].to(wide), dim=-1)
        chosen = weights.topk(top_k, dim=-1).indices.flatten()
        given = given + torch.zeros_like(given).index_add_(0, chosen, torch.ones_like(chosen, dtype=wide))
        probability = probability + weights.sum(dim=0)
    sharing = [] if group is None else [group]
    given = _scaled_sum(given, divisor=rows, groups=sharing, ranks=1)
    mean_probability = _scaled_sum(probability, divisor=rows, groups=sharing, ranks=_product(groups))
    share = (given * mean_probability).sum() * experts * weight
    # Each data-parallel group has its own micro-batch: the value is all of theirs, the gradient goes to its own.
    others = [other for other in groups if other is not group]
    return _scaled_sum(share, divisor=1, groups=others, ranks=1)


def _product(groups: Sequence[dist.ProcessGroup]) -> int:
    ranks = 1
    for group in groups:
        ranks *= dist.get_world_size(group)
    return ranks


def _scaled_sum(local: Tensor, *, divisor: float, groups: Sequence[dist.ProcessGroup], ranks: int) -> Tensor:
    """Sum over ``groups`` / divisor, the same on all their ranks; its backward is ``ranks / divisor``."""
    return _ScaledSum.apply(local, divisor, groups, ranks)  # type: ignore[return-value]  # apply is untyped in torch


class _ScaledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, divisor: float, groups: Sequence[dist.ProcessGroup], ranks: int) -> Tensor:
        total = local.detach().clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        ctx.scale = ranks / divisor
        return total / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0] * ctx.scale, None, None, None
