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

IGNORED = -100
"""Label of a token that has no loss, as in transformers and torch."""


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
    return _ShareOfMean.apply(local_sum, max(valid_tokens, 1), groups)  # type: ignore[return-value]


class _ShareOfMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_sum: Tensor, valid_tokens: int, groups: Sequence[dist.ProcessGroup]) -> Tensor:
        total, ranks = local_sum.detach().clone(), 1
        for group in groups:
            dist.all_reduce(total, group=group)
            ranks *= dist.get_world_size(group)
        ctx.scale = ranks / valid_tokens
        return total / valid_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.scale, None, None
