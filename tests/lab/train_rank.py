"""One rank of a tiny training run, as ``basp lab run`` starts it: python train_rank.py FOLDER.

It writes what it saw to FOLDER/RANK.json. ``reference_losses`` is the same run in one process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import basp

STEPS = 2
LENGTH = 512


def build(sp: basp.SequenceParallel) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return basp.prepare(LlamaForCausalLM(config).double(), sp)


def batch() -> list[np.ndarray]:
    """Two sequences of one length: on two nodes of two ranks, one for each node."""
    return list(np.random.default_rng(0).integers(0, 64, size=(2, LENGTH)))


def train(model: PreTrainedModel, sp: basp.SequenceParallel) -> list[float]:
    """The loss of each step, which depends on the gradients of those before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        (step,) = sp.shard_steps([batch()])
        loss = sp.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def reference_losses() -> list[float]:
    sp = basp.SequenceParallel(None)
    return train(build(sp), sp)


def trained(mesh: dist.DeviceMesh) -> dict[str, Any]:
    """Under FSDP2 over all ranks, as in training."""
    sp = basp.SequenceParallel(mesh)
    model = build(sp)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, sp)
    return {"losses": losses, "attention": (sp.counter.forward + sp.counter.backward).tolist()}


def attended(mesh: dist.DeviceMesh, strategy: str) -> dict[str, Any]:
    """Weights on every rank: what crosses the link is attention, and a few small collectives."""
    sp = basp.SequenceParallel(mesh, strategy=strategy)
    model = build(sp)
    (step,) = sp.shard_steps([batch()])
    before = bytes_sent()
    sp.loss(model, step).backward()
    return {"link": bytes_sent() - before, "attention": (sp.counter.forward + sp.counter.backward).tolist()}


def bytes_sent() -> int:
    """By this rank's node over its link, when no rank is sending."""
    dist.barrier()
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    saw = {"trained": trained(mesh), "basp": attended(mesh, "basp"), "ulysses": attended(mesh, "ulysses")}
    saw["gloo"] = os.environ["GLOO_SOCKET_IFNAME"]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(saw))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
