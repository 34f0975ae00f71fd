"""What every contender starts from: the same weights, the same optimizer, ranks laid out alike for FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from basp.bench.contender import Workload
from basp.errors import ConfigError
from basp.train.model import DTYPES


def build_model(workload: Workload, *, attention: str = "eager") -> PreTrainedModel:
    """The model on the CPU, with the same weights on every rank. FSDP2 keeps them in float32 under bfloat16.

    Args:
        workload: has the model and the seed.
        attention: transformers' name of its attention implementation.
    """
    torch.manual_seed(workload.seed)
    dtype = torch.float32 if workload.dtype == "bfloat16" else DTYPES[workload.dtype]
    config = AutoConfig.for_model(**workload.model)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def build_optimizer(workload: Workload, model: torch.nn.Module) -> torch.optim.Optimizer:
    """torch's own, without weight decay."""
    if workload.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=workload.lr)
    return torch.optim.AdamW(model.parameters(), lr=workload.lr, weight_decay=0.0)


def shard_mesh(workload: Workload, device: torch.device) -> DeviceMesh:
    """All ranks, for FSDP2; with hybrid sharding its first dimension holds the copies.

    Raises:
        ConfigError: copies that do not divide the ranks.
    """
    ranks, copies = dist.get_world_size(), workload.replicate
    if ranks % copies:
        raise ConfigError(
            f"{copies} copies of the model on {ranks} ranks",
            allowed="a number of copies that divides the ranks",
            remedy="change --replicate: usually it is the number of nodes",
        )
    if copies == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp_shard",))
    # Ranks of a node are neighbours: weights are gathered inside a node, gradients summed across.
    return init_device_mesh(device.type, (copies, ranks // copies), mesh_dim_names=("dp_replicate", "dp_shard"))
