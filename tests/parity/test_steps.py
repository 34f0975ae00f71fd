"""Whole training runs: strategies, and one process, end at the same losses and parameters (known failures 1, 6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import basp
from basp.casts import keep_float64
from tests.support import oracle
from tests.support.models import random_batch, tiny_model
from tests.support.ranks import run_ranks

STEPS = 50
ORACLE_STEPS = 10
TOLERANCE = 1e-8
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
}


def data() -> list[list[list[np.ndarray]]]:
    """For each step its micro-batches: 1 or 2 of them, of 1 to 5 sequences of 1 to 20 tokens."""
    random = np.random.default_rng(5)
    return [
        [
            random_batch(random.integers(1, 21, size=random.integers(1, 6)), seed=int(random.integers(1 << 30)))
            for _ in range(random.integers(1, 3))
        ]
        for _ in range(STEPS)
    ]


def _train(rank: int, world: int, strategy: str, optimizer_name: str) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses of all steps, and the parameters after ``ORACLE_STEPS`` and at the end."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
    losses, states = [], []
    with keep_float64():
        sp = basp.SequenceParallel(mesh, strategy=strategy)
        model = basp.prepare(tiny_model("llama"), sp)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        for number, batches in enumerate(data(), start=1):
            losses.append(0.0)
            for step in sp.shard_steps(batches):
                loss = sp.loss(model, step)
                loss.backward()
                losses[-1] += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            if number in (ORACLE_STEPS, STEPS):
                states.append({name: value.full_tensor().numpy() for name, value in model.state_dict().items()})
    return losses, states if rank == 0 else []


def _one_process(optimizer_name: str) -> tuple[list[float], dict[str, Any]]:
    losses = []
    with keep_float64():
        model = tiny_model("llama")
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        for batches in data()[:ORACLE_STEPS]:
            loss, grads = oracle.run_model(model, batches)
            for name, parameter in model.named_parameters():
                parameter.grad = grads[name]
            optimizer.step()
            losses.append(loss.item())
    return losses, {name: value.numpy() for name, value in model.state_dict().items()}


def assert_same_states(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        oracle.assert_close(torch.tensor(got[name]), torch.tensor(want[name]), name, tolerance=TOLERANCE)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_kf01_kf06_strategies_and_one_process_train_alike(optimizer):
    runs = {strategy: run_ranks(3, _train, strategy, optimizer, timeout=100) for strategy in ("basp", "ulysses")}
    for ranks in runs.values():
        assert all(losses == ranks[0][0] for losses, _ in ranks)
    (losses, states), (other_losses, other_states) = runs["basp"][0], runs["ulysses"][0]
    assert losses[-1] != losses[0]
    np.testing.assert_allclose(other_losses, losses, rtol=TOLERANCE, atol=0)
    assert_same_states(other_states[-1], states[-1])
    right_losses, right_state = _one_process(optimizer)
    np.testing.assert_allclose(losses[:ORACLE_STEPS], right_losses, rtol=TOLERANCE, atol=0)
    assert_same_states(states[0], right_state)
