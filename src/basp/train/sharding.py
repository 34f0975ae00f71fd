"""How weights lie on ranks (FSDP2, or a copy on each), and what a step needs of it: averaged gradients, their norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from basp.errors import ConfigError, ModelError

_BUCKET_BYTES = 64 << 20


def shard_mesh(device: torch.device, *, replicate: int = 1) -> DeviceMesh:
    """All ranks, for ``shard_model``: one copy of the model, or with hybrid sharding several.

    Neighbouring ranks share a copy, as they sit on one node: there weights are gathered and gradients scattered inside
    a node, and only sums of gradients cross, once for each weight.

    Raises:
        ConfigError: copies that do not divide the ranks.
    """
    ranks = dist.get_world_size()
    if ranks % replicate:
        raise ConfigError(
            f"{replicate} copies of the model on {ranks} ranks",
            allowed="a number of copies that divides the ranks",
            remedy="change the number of copies (replicate): usually it is the number of nodes",
        )
    if replicate == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp_shard",))
    shape = (replicate, ranks // replicate)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def shard_model(model: PreTrainedModel, mesh: DeviceMesh, *, compute_dtype: torch.dtype, gather_ahead: int = 0) -> None:
    """FSDP2 over all ranks of ``mesh``: each decoder layer, then the rest. Gradients are reduced in the weights' dtype.

    Args:
        model: on any device; its weights move to the mesh's.
        mesh: all ranks that average gradients, in one dimension; or in two, for hybrid sharding: copies of the model
            over the first, each sharded over the second. ``shard_mesh`` makes either.
        compute_dtype: that weights are cast to for forward and backward.
        gather_ahead: layers whose weights are on their way while one is computed, forward and backward. 0 leaves it to
            FSDP2: the next one where the device has streams, none on a CPU.
    """
    weights = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=weights)
    layers = [fully_shard(layer, mesh=mesh, mp_policy=policy) for layer in decoder_layers(model)]
    root = fully_shard(model, mesh=mesh, mp_policy=policy)
    if gather_ahead:
        _gather_ahead(root, layers, gather_ahead)
        if mesh.device_type == "cpu":
            # Without streams, a gather that is not asked to be asynchronous blocks. FSDP2 has no public name for this.
            root._set_unshard_async_op(True)


def _gather_ahead(root: FSDPModule, layers: list[FSDPModule], count: int) -> None:
    root.set_modules_to_forward_prefetch(layers[:count])
    root.set_modules_to_backward_prefetch(layers[: -count - 1 : -1])
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + count])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - count) : index][::-1])


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers checkpoints: the units to shard and to compile."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def wrap_layers(model: nn.Module, *, compiled: bool, recomputed: bool) -> None:
    """Compile each decoder layer's forward, and recompute it in the backward pass. Call it before ``shard_model``.

    The checkpoint goes around the compiled forward: inside it, the graph break at attention would make dynamo leave the
    whole layer uncompiled, without a word. Layers are compiled for any number of tokens, since plans change it.
    """
    layers = decoder_layers(model)
    if not layers and (compiled or recomputed):
        raise ModelError(
            f"a {type(model).__name__} with model.compile or model.gradient_checkpointing, and no layers to do it to",
            allowed="a model whose layers transformers can checkpoint (GradientCheckpointingLayer)",
            remedy="turn both off for this model",
        )
    for layer in layers:
        forward = layer.forward
        if compiled:
            forward = torch.compile(forward, dynamic=True)
        if recomputed:
            forward = partial(checkpoint, forward, use_reentrant=False)
        layer.forward = forward


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Mean of every gradient over ``group``, for weights that each rank has a copy of. All ranks call it together."""
    ranks = dist.get_world_size(group)
    for bucket in _buckets([parameter for parameter in parameters if parameter.requires_grad]):
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= ranks
        for parameter, mean in zip(bucket, flat.split([grad.numel() for grad in grads]), strict=True):
            parameter.grad = mean.view_as(parameter)


def clip_gradients(parameters: list[nn.Parameter], clip_norm: float) -> float:
    """Scale gradients to a global norm of at most ``clip_norm`` (0: leave them), and give the norm that they had."""
    norm = nn.utils.clip_grad_norm_(parameters, clip_norm or float("inf"))
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def whole_state(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights on the CPU of rank 0, floating point in ``dtype``; empty on other ranks. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype, in order, in portions that bound the flat copy."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size >= _BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
