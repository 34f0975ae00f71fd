"""The model of a run: loaded or started at random, fitted to the data, written so that ``from_pretrained`` reads it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from basp.data.tokenizers import Tokenizer
from basp.errors import BaspError, ConfigError, ModelError
from basp.files import written_whole
from basp.fit import position_limit
from basp.train.config import TrainConfig
from basp.train.settings import nearest_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def build_model(config: TrainConfig, tokenizer: Tokenizer) -> PreTrainedModel:
    """The model to train, on the CPU, with the same weights on every rank.

    bfloat16 under FSDP keeps float32 weights, which FSDP casts for computation; otherwise weights have the dtype asked.

    Raises:
        ModelError: a checkpoint or an architecture that transformers cannot build.
        ConfigError: a vocabulary smaller than the tokenizer's, positions fewer than ``data.max_length``.
    """
    dtype = DTYPES[config.model.dtype]
    if config.model.dtype == "bfloat16" and config.parallel.sharding == "fsdp":
        dtype = torch.float32
    torch.manual_seed(config.seed)
    if config.model.path is not None:
        model = _load(config.model.path, dtype)
    else:
        assert config.model.config is not None
        model = _from_config(config.model.config, dtype, tokenizer, config.data.max_length)
    _check_fit(model, tokenizer, config.data.max_length)
    return model


def save_model(folder: Path, trained: PreTrainedModel, state: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write weights, configs and tokenizer as one folder that ``from_pretrained`` loads; whole or not at all.

    Args:
        folder: to write.
        trained: gives the configs.
        state: its whole weights, in the dtype to save.
        tokenizer: to save beside them.
    """
    dtype = next(value.dtype for value in state.values() if value.is_floating_point())
    with torch.device("meta"):  # a clean model of the same class: wrappers for sharding leave no mark on what is saved
        model = AutoModelForCausalLM.from_config(trained.config, attn_implementation="eager", dtype=dtype)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.generation_config = trained.generation_config
    with written_whole(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save(partial)
        mode = (partial / "config.json").stat().st_mode
        for weights in partial.glob("*.safetensors"):  # safetensors makes files that only their owner can read
            weights.chmod(mode)


def _load(path: str, dtype: torch.dtype) -> PreTrainedModel:
    if not Path(path).is_dir():
        raise ModelError(
            f"model.path {path!r} is not a folder",
            allowed="a local checkpoint folder, as save_pretrained writes it",
            remedy="download the checkpoint first, and give its folder",
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager",  # a config.json that names a hub's kernel must not make it run
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"the checkpoint in {path!r} cannot be loaded: {_sentence(error)}",
            allowed="a transformers causal LM in safetensors that needs no remote code",
            remedy="check that the folder is complete: config.json and its model*.safetensors",
        ) from error
    model, told = loaded
    for kind, meaning in (("missing_keys", "lacks"), ("unexpected_keys", "has, and its config has no place for,")):
        if told[kind]:
            names = sorted(told[kind])
            raise ModelError(
                f"the checkpoint in {path!r} {meaning} {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1),
                allowed="exactly the weights of the model in its config.json",
                remedy="check that the folder is complete, and that config.json and the weights belong together",
            )
    return model


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _from_config(
    architecture: dict[str, Any], dtype: torch.dtype, tokenizer: Tokenizer, max_length: int
) -> PreTrainedModel:
    # What the data decides, unless the user has: a vocabulary, positions, and where documents end.
    fitted = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.end_id, "bos_token_id": None}
    wanted = {**fitted, **architecture}
    model_type = wanted.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        near = nearest_name(model_type, list(CONFIG_MAPPING))
        raise ModelError(
            f"model.config has model_type {model_type!r}",
            allowed="the model_type of a transformers causal LM",
            remedy=f"write {near!r}, the nearest" if near else "see the config.json of the model you mean",
        )
    try:
        model_config = AutoConfig.for_model(model_type, **wanted)
        _check_keys(model_config, architecture)
        if "max_position_embeddings" not in architecture and hasattr(model_config, "max_position_embeddings"):
            model_config.max_position_embeddings = max(max_length, model_config.max_position_embeddings)
        return AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation="eager")
    except BaspError:
        raise
    except Exception as error:  # transformers and torch raise many kinds for sizes that do not fit
        raise ModelError(
            f"model.config {architecture!r} cannot be built: {_sentence(error)}",
            allowed="a transformers causal LM's model_type and sizes that fit together",
            remedy="compare with that architecture's config in transformers",
        ) from error


_DECIDED_ELSEWHERE = {
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "attn_implementation": "remove it: attention is basp's",
}


def _check_keys(model_config: PreTrainedConfig, architecture: dict[str, Any]) -> None:
    # What transformers does not know it keeps as an attribute that nothing reads.
    known = {*inspect.signature(type(model_config).__init__).parameters, *model_config.attribute_map, "model_type"}
    for key in architecture:
        if key in _DECIDED_ELSEWHERE:
            raise ModelError(
                f"model.config has {key!r}",
                allowed=f"what transformers' {type(model_config).__name__} takes as its architecture",
                remedy=_DECIDED_ELSEWHERE[key],
            )
        if key not in known and key in vars(model_config):
            near = nearest_name(key, known - {"self", "kwargs"})
            raise ModelError(
                f"model.config has an unknown key {key!r}",
                allowed=f"what transformers' {type(model_config).__name__} takes",
                remedy=f"write {near!r}, the nearest key" if near else "remove it",
            )


def _check_fit(model: PreTrainedModel, tokenizer: Tokenizer, max_length: int) -> None:
    sizes = model.config.get_text_config()
    if sizes.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"a model with a vocabulary of {sizes.vocab_size} for a tokenizer with {tokenizer.vocab_size}",
            allowed="a vocabulary at least as large as the tokenizer's",
            remedy="set data.tokenizer to the checkpoint's own folder, or drop vocab_size from [model.config]",
        )
    positions = position_limit(model.config)
    if positions is not None and positions < max_length:
        raise ConfigError(
            f"data.max_length {max_length} with a model of max_position_embeddings {positions}",
            allowed=f"at most {positions}",
            remedy="lower data.max_length, or raise max_position_embeddings (with rope scaling) in the model's config",
        )
