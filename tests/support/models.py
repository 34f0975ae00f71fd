"""Tiny random language models of the families that are tested: every parameter away from its default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "qwen2", "qwen3")
HEAD_SHAPES = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "7 heads": (7, 7), "6/3": (6, 3)}
"""(query heads, kv heads)."""
VOCABULARY = 37
HEAD_DIM = 4

_CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_config(
    family: str, *, heads: int = 4, kv_heads: int = 2, layers: int = 2, tied: bool = False, **more: Any
) -> PreTrainedConfig:
    """Biases where the family has them; for Qwen3 the head dim is not hidden size / heads."""
    own: dict[str, Any] = {
        "llama": {"hidden_size": heads * HEAD_DIM, "attention_bias": True, "mlp_bias": True},
        "qwen2": {"hidden_size": heads * HEAD_DIM},
        "qwen3": {"hidden_size": 20, "head_dim": 6, "attention_bias": True},
    }[family]
    return _CLASSES[family][0](
        **own
        | {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": layers,
            "tie_word_embeddings": tied,
            "vocab_size": VOCABULARY,
            "intermediate_size": 24,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        | more
    )


def tiny_model(
    family: str, *, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0, **more: Any
) -> PreTrainedModel:
    """A model in training mode; the same on every rank for the same arguments. ``more`` as ``tiny_config`` takes it."""
    model = _CLASSES[family][1](tiny_config(family, heads=heads, kv_heads=kv_heads, **more)).to(dtype).train()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise / 5 + ("norm" in name))
    return model


def random_batch(lengths: Sequence[int], *, seed: int = 0) -> list[np.ndarray]:
    """Token ids of each sequence."""
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, size=length) for length in lengths]


def mean_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every trainable parameter's gradient averaged over all ranks by hand, as FSDP2 and DDP do; zeros where none."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    grads = [torch.zeros_like(value) if value.grad is None else value.grad for value in trained.values()]
    total = torch.cat([grad.flatten() for grad in grads])  # one all-reduce: many small ones are slow over gloo
    dist.all_reduce(total)
    means = (total / dist.get_world_size()).split([grad.numel() for grad in grads])
    return {name: mean.view_as(grad) for name, mean, grad in zip(trained, means, grads, strict=True)}
