"""What a model's config and modules say of themselves, and basp cannot honour: no forward is needed to refuse it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from basp.errors import ModelError


def check_declared(model: nn.Module) -> None:
    """Refuse what the config or a module declares.

    Raises:
        ModelError: an encoder beside the decoder, dropout, chunks, keys chosen for each query, rope that follows the
            length; names the layer.
    """
    config: Any = model.config
    _check_encoder(model, config)
    _check_dropout(model)
    _check_chunks(model, config.get_text_config())
    _check_selection(model)
    _check_rope(model, config.get_text_config())


def _check_encoder(model: nn.Module, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder and a decoder, whose layers attend to the encoder's states",
            allowed="a causal LM: a decoder alone",
            remedy="train this model without basp",
        )


def check_cross_attention(model: nn.Module, attention: Iterable[str]) -> None:
    """Refuse layers that can attend to states of another model beside their own tokens.

    Args:
        model: to look through.
        attention: names of the modules that are a layer's own attention; towers of other modalities have none.

    Raises:
        ModelError: names the module.
    """
    stacks = {name.rsplit(".", 2)[0] + "." for name in attention}
    for name, module in model.named_modules():
        crosses = re.fullmatch(r"(.*_)?(cross_?att|encoder_att)\w*", name.rpartition(".")[2])
        if crosses and "att" in type(module).__name__.lower() and name.startswith(tuple(stacks)):
            raise ModelError(
                f"{name} ({type(module).__name__}) is cross attention, to the states of an encoder",
                allowed="layers that attend to their own tokens only",
                remedy="set config.add_cross_attention = False where the model has it, or train it without basp",
            )


def _check_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        dropout = getattr(module, "attention_dropout", 0.0)
        if isinstance(dropout, float) and dropout > 0:
            raise ModelError(
                f"{name} has attention_dropout {dropout}",
                allowed="0: ranks would draw different random numbers for one sequence",
                remedy="set config.attention_dropout = 0.0 before loading the model",
            )


def _check_chunks(model: nn.Module, config: Any) -> None:
    """Chunked attention reaches only the mask function: a layer never says so itself."""
    kinds = getattr(config, "layer_types", None) or []
    if "chunked_attention" in kinds:
        raise ModelError(
            f"layer {kinds.index('chunked_attention')} of {type(model).__name__} attends within chunks of "
            f"{config.attention_chunk_size} tokens (attention_chunk_size)",
            allowed="causal attention over whole sequences",
            remedy='set every config.layer_types to "full_attention" if that is meant, or train it without basp',
        )


def _check_rope(model: nn.Module, config: Any) -> None:
    """Rope whose angles depend on the length of what is on the rank, once that passes max_position_embeddings."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    if any(kind.get("rope_type") == "dynamic" for kind in kinds):
        raise ModelError(
            f"{type(model).__name__} has rope of type dynamic, whose angles follow the longest position on the rank",
            allowed="rope whose angles follow from a token's position alone (default, linear, llama3, yarn)",
            remedy="set config.rope_parameters to one of these, or train it without basp",
        )


def _check_selection(model: nn.Module) -> None:
    """Sparse attention whose keys a part of the layer chooses or makes: its arguments need not show it."""
    for name, module in model.named_modules():
        if re.search(r"att\w*\.(indexer|compressor)$", name):
            raise ModelError(
                f"{name} ({type(module).__name__}) chooses or makes the keys that each query sees",
                allowed="attention to every key of the sequence, or to those of a sliding window",
                remedy="index-sparse and compressed attention need the whole sequence on one rank: train this model "
                "without basp",
            )
