"""The contenders that are this library: a transformers model under FSDP2, with one strategy or the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from basp.bench.contender import Workload
from basp.errors import ConfigError
from basp.hf import prepare
from basp.parallel import SequenceParallel
from basp.strategies import plan
from basp.train.model import DTYPES
from basp.train.sharding import shard_model


def build_basp(workload: Workload, device: torch.device) -> Ours:
    """Groups follow the batch."""
    return Ours(workload, device, strategy="basp")


def build_ulysses(workload: Workload, device: torch.device) -> Ours:
    """Every sequence over all ranks."""
    return Ours(workload, device, strategy="ulysses")


class Ours:
    """A model whose attention is ours, sharded by FSDP2. The batch is compared over ranks in every step, as ever."""

    def __init__(self, workload: Workload, device: torch.device, *, strategy: str) -> None:
        mesh = _mesh(workload.replicate, device)
        self._sp = SequenceParallel(dist.group.WORLD, strategy=strategy, device=device)
        self._model = prepare(build_model(workload), self._sp)
        self._model.train()
        shard_model(self._model, mesh, compute_dtype=DTYPES[workload.dtype])
        self._optimizer = build_optimizer(workload, self._model)
        tokens = plan(workload.lengths, strategy=strategy, ranks=self._sp.ranks, heads=1).tokens
        self.name, self.tokens = strategy, int(tokens[self._sp.rank])
        copies = f"{workload.replicate} copies of the model" if workload.replicate > 1 else "one copy of the model"
        how = "groups follow the batch" if strategy == "basp" else "every sequence over all ranks"
        self.does = self._about = f"plan {strategy!r}: {how}, no padding, no head repeated; FSDP2, {copies}"

    def step(self, sequences: Sequence[np.ndarray]) -> float:
        """One optimizer step; see ``Contender``."""
        step = self._sp.shard(list(sequences))
        loss = self._sp.loss(self._model, step)
        loss.backward()
        step.context.release()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.does = f"{self._about}; attention kernel: {self._sp.kernel}"  # which it has chosen in its first step
        return loss.item()

    def close(self) -> None:
        """Let go of the model and its optimizer."""
        del self._model, self._optimizer


def build_model(workload: Workload) -> PreTrainedModel:
    """The model on the CPU, with the same weights on every rank. FSDP2 keeps them in float32 under bfloat16."""
    torch.manual_seed(workload.seed)
    dtype = torch.float32 if workload.dtype == "bfloat16" else DTYPES[workload.dtype]
    config = AutoConfig.for_model(**workload.model)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


def build_optimizer(workload: Workload, model: torch.nn.Module) -> torch.optim.Optimizer:
    """torch's own, without weight decay."""
    if workload.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=workload.lr)
    return torch.optim.AdamW(model.parameters(), lr=workload.lr, weight_decay=0.0)


def _mesh(replicate: int, device: torch.device) -> DeviceMesh:
    ranks = dist.get_world_size()
    if ranks % replicate:
        raise ConfigError(
            f"{replicate} copies of the model on {ranks} ranks",
            allowed="a number of copies that divides the ranks",
            remedy="change --replicate: usually it is the number of nodes",
        )
    if replicate == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp_shard",))
    # Ranks of a node are neighbours: weights are gathered inside a node, gradients summed across.
    return init_device_mesh(device.type, (replicate, ranks // replicate), mesh_dim_names=("dp_replicate", "dp_shard"))
