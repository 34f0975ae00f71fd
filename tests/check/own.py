"""A model of a user's own: a plain module that calls transformers' attention interface, with learned positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Attention(nn.Module):
    is_causal = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.dim = config.hidden_size // config.num_attention_heads
        kv_width = self.dim * config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, kv_width)
        self.v_proj = nn.Linear(config.hidden_size, kv_width)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        q, k, v = (
            project(hidden).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attention(self, q, k, v, None, scaling=self.dim**-0.5, **given)
        return self.o_proj(out.flatten(2))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm, self.self_attn = nn.LayerNorm(config.hidden_size), Attention(config)
        self.mlp = nn.Sequential(nn.LayerNorm(config.hidden_size), nn.Linear(config.hidden_size, config.hidden_size))

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        hidden = hidden + self.self_attn(self.norm(hidden), **given)
        return hidden + self.mlp(hidden).tanh()


class OwnModel(nn.Module):
    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, **given: Any) -> Any:
        hidden = self.embed(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, **given)
        return SimpleNamespace(logits=self.lm_head(hidden))


class Mixes(OwnModel):
    """Its tokens meet beside attention too."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, **given: Any) -> Any:
        logits = super().forward(input_ids, position_ids, **given).logits
        return SimpleNamespace(logits=logits + torch.cumsum(logits, dim=1) / 8)


class Ignores(OwnModel):
    """It does not hand on what its layers need."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, **given: Any) -> Any:
        return super().forward(input_ids, position_ids)
