"""Layers that carry a state along the sequence, some of a model's or all: refused by name (known failure 15)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from basp import SequenceParallel, prepare
from basp.errors import ModelError

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3_5": DELTA,
    "MiniMax": {"num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_kf15_linear_attention_in_one_layer_of_two_is_refused(name: str) -> None:
    config_name = "Qwen3_5Text" if name == "Qwen3_5" else name
    torch.manual_seed(0)
    config = getattr(transformers, f"{config_name}Config")(**SIZES, **HYBRIDS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with pytest.raises(ModelError) as refused:
        prepare(model, SequenceParallel())
    for words in (
        f"{name}ForCausalLM calls the attention function 1 times for its 2 layers (in model.layers.1.self_attn)",
        "linear attention, a state space, or an attention of its own",
        "train this model without basp",
    ):
        assert words in str(refused.value)
