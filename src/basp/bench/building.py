"""What every contender starts from: the same weights, the same optimizer, the same sharding by FSDP2."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from basp.bench.contender import Workload
from basp.train.model import DTYPES
from basp.train.sharding import shard_mesh, shard_model


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


def shard(workload: Workload, model: PreTrainedModel, device: torch.device) -> None:
    """FSDP2 over all ranks, as the workload says.

    Raises:
        ConfigError: copies that do not divide the ranks.
    """
    mesh = shard_mesh(device, replicate=workload.replicate)
    shard_model(model, mesh, compute_dtype=DTYPES[workload.dtype], gather_ahead=workload.gather_ahead)


def describe_sharding(workload: Workload) -> str:
    """What ``shard`` does, as a phrase."""
    copies = f"{workload.replicate} copies of the model" if workload.replicate > 1 else "one copy of the model"
    ahead = f", weights gathered {workload.gather_ahead} ahead" if workload.gather_ahead else ""
    return f"FSDP2, {copies}{ahead}"
