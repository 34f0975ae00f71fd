"""The model that a check is about: found by what the user wrote, shrunk, and built the same in every process."""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from basp.errors import BaspError, ModelError
from basp.train.settings import nearest_name

SEED = 0
"""Of the random weights and of the data."""


@dataclass(frozen=True)
class Subject:
    """A model to build; small, and the same in every process.

    Attributes:
        config: its sizes.
        model_class: to build it of; None asks transformers for the causal LM of the config.
        weights: a folder that ``save_pretrained`` wrote, to load instead of random weights.
    """

    config: PreTrainedConfig
    model_class: type[nn.Module] | None = None
    weights: str | None = None

    @property
    def name(self) -> str:
        """For titles."""
        return self.model_class.__name__ if self.model_class else str(self.config.model_type)

    @property
    def text(self) -> PreTrainedConfig:
        """The part of the config that the language model reads."""
        return self.config.get_text_config()


def find_subject(model: str | PreTrainedConfig | nn.Module) -> Subject:
    """What the user means by ``model``: a folder, a config.json, "package.module:Class", a model_type, a config.

    Raises:
        ModelError: none of these, or one that is incomplete or that transformers does not know.
    """
    if isinstance(model, PreTrainedConfig):
        return _checked(Subject(_language_model(model)))
    if isinstance(model, nn.Module):
        return _checked(Subject(_config_of(model), model_class=type(model)))
    path = Path(model)
    if path.is_dir():
        _check_weights(path)
        return _checked(Subject(_language_model(_read_config(path / "config.json")), weights=model))
    if path.suffix == ".json":
        return _checked(Subject(_language_model(_read_config(path))))
    if ":" in model:
        model_class = _find_class(model)
        return _checked(Subject(_made(model, model_class.config_class), model_class=model_class))
    model_type = model.replace("-", "_")
    if model_type not in CONFIG_MAPPING:
        raise _unknown(model, "no folder, file or model_type has this name")
    return _checked(Subject(_language_model(_made(model, CONFIG_MAPPING[model_type]))))


def build(subject: Subject, dtype: torch.dtype) -> nn.Module:
    """The model on the CPU, in training mode; for the same arguments the same weights in every process.

    Random weights are far from their usual initial values, so that every parameter matters to the loss: what is nearly
    zero in a fresh model (attention scores, sinks, biases) would hide mistakes.

    Raises:
        ModelError: transformers cannot build or load it.
    """
    torch.manual_seed(SEED)
    try:
        model = _make(subject, dtype)
    except BaspError:
        raise
    except Exception as error:  # transformers and torch raise many kinds for sizes that do not fit
        raise ModelError(
            f"{subject.name} cannot be built: {_sentence(error)}",
            allowed="a transformers causal LM whose sizes fit together",
            remedy="compare its config.json with that architecture's in transformers",
        ) from error
    if dtype is torch.float64:
        model = model.to(dtype)  # what a model keeps in float32 as well
        if isinstance(model, PreTrainedModel) and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # the grouped matrix multiplication has no float64
    if subject.weights is None:
        _randomise(model)
    return model.train()


def _make(subject: Subject, dtype: torch.dtype) -> Any:
    maker: Any = subject.model_class or AutoModelForCausalLM
    if subject.weights is None:
        config = copy.deepcopy(subject.config)  # a model keeps it, and its attention implementation in it
        config._attn_implementation = "eager"
        made = maker(config) if subject.model_class else maker.from_config(config)
        return made.to(dtype)
    if not any(Path(subject.weights).glob("*.safetensors")):
        raise ModelError(
            f"the checkpoint in {subject.weights!r} has no *.safetensors",
            allowed="weights in safetensors files, beside its config.json",
            remedy="complete the download or convert the weights, or leave --full out to check a small random model",
        )
    model, told = maker.from_pretrained(
        subject.weights,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if told["missing_keys"]:
        raise ModelError(
            f"the checkpoint in {subject.weights!r} lacks {min(told['missing_keys'])}",
            allowed="every weight of the model in its config.json",
            remedy="check that the folder is complete, and that config.json and the weights belong together",
        )
    return model


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    random = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        scaled = noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else noise / 5 + ("norm" in name)
        parameter.copy_(scaled)


def _read_config(path: Path) -> PreTrainedConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or _sentence(error)}",
            allowed="a config.json as save_pretrained writes it",
            remedy="check the path, and that the download is complete",
        ) from error
    model_type = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(model_type, str):
        raise ModelError(
            f"{str(path)!r} has no model_type",
            allowed="a config.json as save_pretrained writes it",
            remedy="add the model_type of its architecture",
        )
    if model_type not in CONFIG_MAPPING:
        raise _unknown(model_type, f"it is the model_type of {str(path)!r}")
    if "num_attention_heads" in values:  # transformers may divide by it
        _check_heads(str(path), values["num_attention_heads"], values.get("num_key_value_heads"))
    return _made(str(path), AutoConfig.for_model, **values)


def _made(source: str, maker: Any, *args: Any, **values: Any) -> PreTrainedConfig:
    try:
        return maker(*args, **values)
    except Exception as error:
        raise ModelError(
            f"the config of {source!r} is refused by transformers: {_sentence(error)}",
            allowed="values that fit together",
            remedy="compare it with that architecture's config in transformers",
        ) from error


def _config_of(model: nn.Module) -> PreTrainedConfig:
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise ModelError(
            f"a {type(model).__name__} without a transformers config",
            allowed="a module that is made from a config of transformers, and keeps it as its config",
            remedy="give it a config, or compare basp.attention.attend from your own attention layer yourself",
        )
    return _language_model(config) if isinstance(model, PreTrainedModel) else config


def _find_class(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"{name!r} cannot be imported: {_sentence(error)}",
            allowed='"package.module:Class"',
            remedy="check the name, and that the package is installed or on PYTHONPATH",
        ) from error
    config_class = getattr(found, "config_class", None)
    is_config = isinstance(config_class, type) and issubclass(config_class, PreTrainedConfig)
    if not (isinstance(found, type) and issubclass(found, nn.Module) and is_config):
        raise ModelError(
            f"{name!r} is a {type(found).__name__} that is no nn.Module class with a config_class",
            allowed="a module class made from a config_class of transformers, that calls its attention interface",
            remedy="set config_class, and call the attention function that config._attn_implementation names",
        )
    return found


def _unknown(name: str, what: str) -> ModelError:
    near = nearest_name(name, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    return ModelError(
        f"unknown model {name!r}: {what}",
        allowed="a checkpoint folder, a config.json, a model_type of transformers, or package.module:Class",
        remedy=f"write {near!r}, the nearest model_type" if near else "check the path",
    )


def _language_model(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text part of a multimodal config, where transformers has a causal LM for it."""
    text = config.get_text_config()
    found = text if text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else config
    if found.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise _unknown(str(config.model_type), "transformers has no causal LM of this model_type")
    return found


def _check_weights(folder: Path) -> None:
    """Every weight file of a checkpoint is there and whole, as far as its header says."""
    try:
        for name in sorted(_listed(folder) | {path.name for path in folder.glob("*.safetensors")}):
            with safe_open(folder / name, framework="pt"):
                pass
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"the checkpoint in {str(folder)!r} is incomplete: {_sentence(error)}",
            allowed="every file of its index, each of them whole",
            remedy="download it again",
        ) from error


def _listed(folder: Path) -> set[str]:
    """Names of weight files in a checkpoint's index, if it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return set()
    content = json.loads(index.read_text(encoding="utf-8"))
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise ValueError(f"{index.name} has no weight_map")
    return {str(name) for name in weights.values()}


def _checked(subject: Subject) -> Subject:
    """Refuse sizes and head counts that make no sense: shrinking would hide them."""
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        size = getattr(subject.text, name, 1)
        if not isinstance(size, int) or size < 1:
            raise ModelError(
                f"{subject.name} has {name} {size}", allowed="a whole number from 1", remedy="correct it in its config"
            )
    heads = getattr(subject.text, "num_attention_heads", None)
    if heads is None:
        raise ModelError(
            f"{subject.name} has no attention heads (num_attention_heads)",
            allowed="a model whose tokens meet in attention",
            remedy="a state space needs the whole sequence on one rank: train this model without basp",
        )
    _check_heads(subject.name, heads, getattr(subject.text, "num_key_value_heads", None))
    return subject


def _check_heads(name: str, heads: Any, kv_heads: Any) -> None:
    kv_heads = heads if kv_heads is None else kv_heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelError(
            f"{name} has {heads} query heads and {kv_heads} kv heads",
            allowed="whole numbers from 1, the query heads a multiple of the kv heads",
            remedy="correct num_attention_heads and num_key_value_heads in its config",
        )


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
