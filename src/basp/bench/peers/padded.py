"""What the peers have in common: a padded batch of which each rank holds a slice, the model, FSDP2 and its step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from basp.batches import IGNORED
from basp.bench.building import build_model, build_optimizer, describe_sharding, shard
from basp.bench.contender import Unavailable, Workload
from basp.losses import share_of_mean, sum_token_losses

# ---- the batch


@dataclass(frozen=True)
class Part:
    """What one rank computes. B sequences of the batch, T tokens of each, padding included.

    Attributes:
        input_ids: [B, T]
        position_ids: [B, T] positions in the padded sequence.
        targets: [B, T] the next token of each, -100 where it has none.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor


def padded_length(lengths: Sequence[int], multiple: int) -> int:
    """The longest, rounded up to a multiple."""
    return -(-max(lengths) // multiple) * multiple


def cut(
    sequences: Sequence[np.ndarray], *, ranks: int, rank: int, device: torch.device, multiple: int | None = None
) -> Part:
    """The slice that ``rank`` of ``ranks`` holds of all these sequences, padded at their ends to one length.

    Causal attention never looks from a token to the padding behind it, and padding has no label: the loss is as
    without. The length is a multiple of ``ranks``, or of ``multiple``.
    """
    length = padded_length([len(sequence) for sequence in sequences], multiple or ranks)
    ids = np.zeros((len(sequences), length), dtype=np.int64)
    targets = np.full_like(ids, IGNORED)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        targets[row, : len(sequence) - 1] = sequence[1:]
    positions = np.broadcast_to(np.arange(length), ids.shape)
    own = slice(rank * length // ranks, (rank + 1) * length // ranks)
    return Part(*(torch.from_numpy(table[:, own].copy()).to(device) for table in (ids, positions, targets)))


def describe_padding(groups: Sequence[Sequence[int]], multiple: int) -> str:
    """What ``cut`` adds to these groups' sequences, whose lengths become a multiple, as a phrase."""
    padding = sum(padded_length(lengths, multiple) * len(lengths) - sum(lengths) for lengths in groups)
    return f"{padding} tokens of padding at sequences' ends" if padding else "no padding"


def valid_tokens(sequences: Sequence[np.ndarray]) -> int:
    """Tokens of the batch that have a next one."""
    return sum(len(sequence) - 1 for sequence in sequences)


# ---- the model


def read_config(workload: Workload) -> PreTrainedConfig:
    """The model's config.

    Raises:
        Unavailable: its attention is not plain causal attention, which is all that the peers do, or it computes in
            another type than theirs.
    """
    if workload.dtype not in _DTYPES:
        raise Unavailable(f"dtype {workload.dtype!r}", allowed=" or ".join(_DTYPES), remedy="choose one of these")
    config = AutoConfig.for_model(**workload.model)
    asked = [name for name in _NOT_PLAIN if getattr(config, name, None)]
    if workload.model["model_type"] not in _PLAIN or asked:
        raise Unavailable(
            f"a {workload.model['model_type']} model" + (f" with {', '.join(asked)}" if asked else ""),
            allowed=f"{' or '.join(_PLAIN)} without windows and dropout: the peers run plain causal attention",
            remedy="measure such a model without peers",
        )
    return config


_DTYPES = ("float32", "bfloat16")
_PLAIN = ("llama", "qwen3")
_NOT_PLAIN = ("sliding_window", "use_sliding_window", "attention_dropout")


Attention = Callable[..., tuple[Tensor, None]]
"""As transformers calls it: (module, query [B, H, T, D], key [B, K, T, D], value, mask, ...) -> ([B, T, H, D], None)"""


def build_with(attention: Attention, workload: Workload, *, name: str) -> PreTrainedModel:
    """The workload's model, which calls ``attention``.

    Args:
        attention: takes care of causality itself: it is given no mask.
        workload: of a model that ``read_config`` lets pass.
        name: of the attention implementation; must not contain "flash", which transformers takes for its own.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _no_mask)
    return build_model(workload, attention=name)


def _no_mask(**_: Any) -> None:
    return None


# ---- heads


def check_heads(config: PreTrainedConfig, ranks: int) -> str:
    """What sharing a layer's heads among ``ranks`` means for its kv heads, as a phrase.

    Raises:
        Unavailable: heads that do not divide.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise Unavailable(
            f"{heads} query and {kv_heads} kv heads on {ranks} ranks that share a sequence",
            allowed="query heads that the ranks divide, and kv heads that they divide or that divide them",
            remedy="choose other heads or another number of ranks",
        )
    return f"kv heads repeated from {kv_heads} to {ranks}" if kv_heads < ranks else "no kv head repeated"


# ---- FSDP2


class FsdpContender:
    """A model under FSDP2 over all ranks, of which each rank computes its part of a padded batch.

    Args:
        name: of the contender.
        does: with the workload.
        model: with its own attention; is sharded here.
        workload: gives the optimizer and how to shard.
        device: of the model.
        own: sequences of the batch that this rank has a part of.
        group: the ranks that share these.
    """

    counted = True

    def __init__(
        self,
        model: PreTrainedModel,
        workload: Workload,
        device: torch.device,
        *,
        name: str,
        does: str,
        own: slice,
        group: dist.ProcessGroup,
    ) -> None:
        self.name, self.does = name, f"{does}; {describe_sharding(workload)}"
        self._model, self._device, self._own, self._group = model, device, own, group
        self._place = {"ranks": dist.get_world_size(group), "rank": dist.get_rank(group)}
        lengths = workload.lengths[own]
        self.tokens = len(lengths) * padded_length(lengths, self._place["ranks"]) // self._place["ranks"]
        shard(workload, model, device)
        self._optimizer = build_optimizer(workload, model)

    def part(self, sequences: Sequence[np.ndarray]) -> AbstractContextManager[Part]:
        """What this rank computes of a batch, for as long as the context is entered."""
        return nullcontext(cut(sequences[self._own], **self._place, device=self._device))

    def step(self, sequences: Sequence[np.ndarray]) -> float:
        """See ``Contender``."""
        world = dist.group.WORLD
        assert world is not None
        with self.part(sequences) as part:
            logits = self._model(
                input_ids=part.input_ids, position_ids=part.position_ids, use_cache=False, sequence_group=self._group
            ).logits
            local_sum = sum_token_losses(logits, part.targets)
            loss = share_of_mean(local_sum, valid_tokens=valid_tokens(sequences), groups=[world])
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def close(self) -> None:
        """Let go of the model and the optimizer's state."""
        del self._model, self._optimizer
