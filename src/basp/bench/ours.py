"""The contenders that are this library: a transformers model under FSDP2, with one strategy or the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from basp.bench.building import build_model, build_optimizer, describe_sharding, shard
from basp.bench.contender import Workload
from basp.hf import prepare
from basp.parallel import SequenceParallel
from basp.strategies import plan


def build_basp(workload: Workload, device: torch.device) -> Ours:
    """Groups follow the batch."""
    return Ours(workload, device, strategy="basp")


def build_ulysses(workload: Workload, device: torch.device) -> Ours:
    """Every sequence over all ranks."""
    return Ours(workload, device, strategy="ulysses")


class Ours:
    """A model whose attention is ours, sharded by FSDP2. The batch is compared over ranks in every step, as ever."""

    counted = True

    def __init__(self, workload: Workload, device: torch.device, *, strategy: str) -> None:
        self._sp = SequenceParallel(dist.group.WORLD, strategy=strategy, device=device)
        self._model = prepare(build_model(workload), self._sp)
        self._model.train()
        shard(workload, self._model, device)
        self._optimizer = build_optimizer(workload, self._model)
        tokens = plan(workload.lengths, strategy=strategy, ranks=self._sp.ranks, heads=1).tokens
        self.name, self.tokens = strategy, int(tokens[self._sp.rank])
        how = "groups follow the batch" if strategy == "basp" else "every sequence over all ranks"
        self.does = self._about = (
            f"plan {strategy!r}: {how}, no padding, no head repeated; {describe_sharding(workload)}"
        )

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
