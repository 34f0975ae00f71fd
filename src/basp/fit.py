"""Whether a model can take a step: else one rank would fail while the others wait, or all would train on nonsense."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from basp.errors import BatchError, ModelError


def checkpoints_reentrantly(model: Any) -> bool:
    """Whether any module does: what is kept of its forward, as router logits are, then has no graph."""
    return any(
        module.training
        and getattr(module, "gradient_checkpointing", False)
        and getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant", False)
        for module in model.modules()
    )


def position_limit(config: Any) -> int | None:
    """Tokens of the longest sequence that a transformers model of this config has positions for; None: any number."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def input_embeddings(model: Any) -> nn.Module | None:
    """The module that token ids go to: what the model says, or its first table of as many rows as the vocabulary."""
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings()
    rows = getattr(getattr(model, "config", None), "vocab_size", None)
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return next((table for table in tables if table.num_embeddings == rows), None)


def check_inputs(model: Any, device: torch.device, *, highest_id: int, longest: int) -> None:
    """Refuse on every rank what the embeddings cannot take: else the one that meets it fails, and the others wait.

    Args:
        model: that takes the step, or a DistributedDataParallel around it.
        device: of the step's tensors.
        highest_id: of the step's token ids and labels.
        longest: tokens of its longest sequence.

    Raises:
        BatchError: a token id that the vocabulary does not have, or a sequence longer than the model's positions.
        ModelError: the model is on another device.
    """
    model = getattr(model, "module", model)  # DistributedDataParallel
    limit = position_limit(model.config) if hasattr(model, "config") else None
    if limit is not None and longest > limit:
        raise BatchError(
            f"a sequence of {longest} tokens for a model of max_position_embeddings {limit}",
            allowed=f"at most {limit}",
            remedy="shorten it, or raise max_position_embeddings (with rope scaling) in the model's config",
        )
    embeddings = input_embeddings(model)
    vocabulary = getattr(embeddings, "num_embeddings", None)
    if vocabulary is not None and highest_id >= vocabulary:
        raise BatchError(
            f"token id or label {highest_id} for a vocabulary of {vocabulary}",
            allowed=f"ids from 0 to {vocabulary - 1}",
            remedy="use the model's own tokenizer, or resize its embeddings",
        )
    weight = getattr(embeddings, "weight", None)
    if weight is not None and weight.device.type not in (device.type, "meta"):
        raise ModelError(
            f"a model on {weight.device} and a step on {device}",
            allowed="both on one device",
            remedy="pass SequenceParallel(..., device=...) the model's device",
        )


def check_averaging(model: Any, ranks: int) -> None:
    """Over data-parallel ranks only, say, each would train on its own slice's gradient, and show the right loss.

    Raises:
        ModelError: DDP or FSDP2 averages over another number of ranks than ``ranks``.
    """
    others = _averaged_over(model) - {ranks}
    if others:
        raise ModelError(
            f"a {type(model).__name__} whose gradients are averaged over {min(others)} ranks",
            allowed=f"the {ranks} that share a step: dp_replicate x dp_shard x sp",
            remedy="wrap the model over a mesh or a process group of all of these ranks",
        )


def _averaged_over(model: Any) -> set[int]:
    """Numbers of ranks that DDP or FSDP2 average parameters' gradients over; none where neither wraps the model."""
    if isinstance(model, DistributedDataParallel):
        return {dist.get_world_size(model.process_group)}
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return set()
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    return {_size_without_tp(mesh) for mesh in meshes}


def _size_without_tp(mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.size() // (mesh.size(names.index("tp")) if "tp" in names else 1)
