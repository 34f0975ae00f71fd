"""A small model of the same architecture: every kind of layer once, every mechanism still at work."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from basp.errors import ModelError

_HEAD_DIM = 8
_SIZES = {
    "intermediate_size": 40,
    "ffn_dim": 40,
    "n_inner": 40,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "vocab_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
}
"""Largest value of each in a shrunk config."""
_LATENT_HEAD = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "qk_head_dim": 10, "v_head_dim": 6, "head_dim": 4}
"""Head dims of multi-head latent attention: queries and keys wider than values, as in the models that have it."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def shrink(config: PreTrainedConfig, *, longest: int) -> PreTrainedConfig:
    """A config of a few narrow layers, of the same kinds.

    Args:
        config: of a causal LM.
        longest: tokens of the longest sequence. A sliding window becomes shorter than it.

    Raises:
        ModelError: the small sizes do not fit this architecture.
    """
    values = config.to_dict()
    names = {canonical: own for canonical, own in config.attribute_map.items() if own in values}

    def put(name: str, value: Any) -> None:
        values[names.get(name, name)] = value

    _shrink_layers(values, config.num_hidden_layers, put)
    for name, most in _SIZES.items():
        if _is_size(values.get(name)):
            values[name] = min(values[name], most)
    _shrink_heads(values, config, put)
    for name in _TOKENS:
        values[name] = None
    if _is_size(values.get("sliding_window")):
        values["sliding_window"] = min(values["sliding_window"], max(1, longest // 3))
    _shrink_rope(values)
    try:
        return type(config).from_dict(values)
    except Exception as error:
        raise ModelError(
            f"{config.model_type} has no model of the small sizes that a check would use: {error}",
            allowed="an architecture that can be shrunk",
            remedy="pass a small config of your own with --full (full=True)",
        ) from error


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shrink_layers(values: dict[str, Any], layers: int, put: Any) -> None:
    """Keep the first layer of each kind, and at least two, in their order."""
    per_layer = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == layers}
    dense_first = values.get("first_k_dense_replace") or 0
    dense_only, sparse_step = values.get("mlp_only_layers"), values.get("decoder_sparse_step") or 1

    def is_dense(layer: int) -> bool:
        return layer < dense_first or layer in (dense_only or []) or (layer + 1) % sparse_step != 0

    kinds = [(is_dense(i), *(repr(value[i]) for value in per_layer.values())) for i in range(layers)]
    kept = sorted({kinds.index(kind) for kind in kinds})
    kept = sorted({*kept, *range(min(2, layers))}) if len(kept) < 2 else kept
    put("num_hidden_layers", len(kept))
    values |= {name: [value[i] for i in kept] for name, value in per_layer.items()}
    if dense_first:
        values["first_k_dense_replace"] = sum(i < dense_first for i in kept)
    if dense_only is not None:
        values["mlp_only_layers"] = [place for place, i in enumerate(kept) if is_dense(i)]
        values["decoder_sparse_step"] = 1


def _shrink_heads(values: dict[str, Any], config: PreTrainedConfig, put: Any) -> None:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    small_kv = min(kv_heads, 4 if heads == kv_heads else 2)
    small = small_kv * min(heads // kv_heads, max(1, 4 // small_kv))
    put("num_attention_heads", small)
    if _is_size(values.get("num_key_value_heads")):
        values["num_key_value_heads"] = small_kv
    put("hidden_size", small * _HEAD_DIM)
    if "word_embed_proj_dim" in values:
        values["word_embed_proj_dim"] = small * _HEAD_DIM
    if "qk_rope_head_dim" in values:
        values |= {name: value for name, value in _LATENT_HEAD.items() if name in values}
    elif values.get("head_dim"):
        values["head_dim"] = _HEAD_DIM


def _shrink_rope(values: dict[str, Any]) -> None:
    """Factors for each rotary frequency (longrope) are cut to the frequencies that are left."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    frequencies = int(_HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("long_factor", "short_factor"):
        if isinstance(rope.get(name), list):
            rope[name] = rope[name][:frequencies]
