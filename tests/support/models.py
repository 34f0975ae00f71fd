"""Tiny random language models of the families that are tested: every parameter away from its default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen3")
"""Without windows, sinks, soft caps or experts."""
HEAD_SHAPES = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "7 heads": (7, 7), "6/3": (6, 3)}
"""(query heads, kv heads)."""
VOCABULARY = 37
HEAD_DIM = 4
ROPE = {"rope_type": "default", "rope_theta": 100.0}

_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM"),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
}


def tiny_config(
    family: str,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    tied: bool = False,
    window: int | None = None,
    **more: Any,
) -> PreTrainedConfig:
    """Biases where the family has them; in some families the head dim is not hidden size / heads.

    ``window`` where the family has one: in all layers, or in all but the last where the family lets layers differ.
    """
    width = heads * HEAD_DIM
    experts = {"num_experts_per_tok": 2, "experts_implementation": "eager", "router_aux_loss_coef": 0.5}
    some_layers = {"layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"]}
    no_layer = {"layer_types": ["full_attention"] * layers}
    alternating = {"sliding_window": window or 5} | (no_layer if window is None else some_layers)
    own: dict[str, Any] = {
        "llama": {"hidden_size": width, "attention_bias": True, "mlp_bias": True},
        "mistral": {"hidden_size": 20, "head_dim": 6, "sliding_window": window},
        "qwen2": {"hidden_size": width} | ({} if window is None else {"use_sliding_window": True} | alternating),
        "qwen3": {"hidden_size": 20, "head_dim": 6, "attention_bias": True}
        | ({} if window is None else {"use_sliding_window": True} | alternating),
        "qwen3-moe": experts
        | {"hidden_size": 20, "head_dim": 6, "num_experts": 5, "moe_intermediate_size": 12, "norm_topk_prob": True}
        | {"use_sliding_window": window is not None, "sliding_window": window},
        "mixtral": experts | {"hidden_size": width, "num_local_experts": 5, "sliding_window": window},
        "gemma2": {"hidden_size": 20, "head_dim": 6, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 1.5}
        | {"final_logit_softcapping": 3.0}
        | alternating,
        "gemma3": {"hidden_size": 20, "head_dim": 6, "query_pre_attn_scalar": 9}
        | {"rope_parameters": {kind: {**ROPE} for kind in ("full_attention", "sliding_attention")}}
        | alternating,
        "phi3": {"hidden_size": width, "sliding_window": window},
        "olmo2": {"hidden_size": width, "attention_bias": True},
        "gpt-oss": experts | {"hidden_size": 20, "head_dim": 6, "num_local_experts": 5} | alternating,
        "deepseek-v3": experts
        | {"hidden_size": 20, "q_lora_rank": 8, "kv_lora_rank": 8, "moe_intermediate_size": 12, "n_routed_experts": 6}
        | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 1}
        | {"n_group": 2, "topk_group": 1, "attention_bias": True},
    }[family]
    return getattr(transformers, _CLASSES[family][0])(
        **{
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": layers,
            "tie_word_embeddings": tied,
            "vocab_size": VOCABULARY,
            "intermediate_size": 24,
            "max_position_embeddings": 512,
            "rope_parameters": {**ROPE},
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        | own
        | more
    )


def tiny_model(
    family: str, *, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0, **more: Any
) -> PreTrainedModel:
    """A model in training mode; the same on every rank for the same arguments. ``more`` as ``tiny_config`` takes it."""
    config = tiny_config(family, heads=heads, kv_heads=kv_heads, **more)
    model = getattr(transformers, _CLASSES[family][1])(config).to(dtype).train()
    randomise(model, seed)
    return model


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter (and a router's bias buffer) at random, so that none is at a value that hides it."""
    random = torch.Generator().manual_seed(seed)
    router_biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *router_biases]:
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            elif name.endswith("sinks"):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / 5 + ("norm" in name))


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
