"""Contenders that are wrong on purpose, for the benchmark to notice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from basp.bench.contender import Unavailable, Workload
from basp.bench.ours import Ours


class Loud(Ours):
    """Reports a loss 1 % too high."""

    def step(self, sequences: Sequence[np.ndarray]) -> float:
        return 1.01 * super().step(sequences)


class Broken(Ours):
    """Has no loss at all."""

    def step(self, sequences: Sequence[np.ndarray]) -> float:
        return float("nan") * super().step(sequences)


class Alone(Ours):
    """Reports the right loss on rank 0 only."""

    def step(self, sequences: Sequence[np.ndarray]) -> float:
        return super().step(sequences) + dist.get_rank()


class Uncounted(Ours):
    """As if its collectives were none that the stopwatch knows."""

    counted = False


def build_uncounted(workload: Workload, device: torch.device) -> Ours:
    return Uncounted(workload, device, strategy="ulysses")


def build_loud(workload: Workload, device: torch.device) -> Ours:
    return Loud(workload, device, strategy="ulysses")


def build_broken(workload: Workload, device: torch.device) -> Ours:
    return Broken(workload, device, strategy="ulysses")


def build_alone(workload: Workload, device: torch.device) -> Ours:
    return Alone(workload, device, strategy="ulysses")


def build_steep(workload: Workload, device: torch.device) -> Ours:
    """Gradients twice as large: nothing to AdamW, and wrong under SGD."""
    made = Ours(workload, device, strategy="ulysses")

    def double(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad *= 2

    made._optimizer.register_step_pre_hook(double)
    return made


def build_unhappy(workload: Workload, device: torch.device) -> Ours:
    """Cannot be built on the last rank alone."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise Unavailable("no luck", allowed="luck", remedy="try again")
    return Ours(workload, device, strategy="basp")


def build_crashing(workload: Workload, device: torch.device) -> Ours:
    raise ZeroDivisionError("planted")
