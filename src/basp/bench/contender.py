"""What a benchmark compares: one workload, and contenders that each take its optimizer steps in their own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from basp.errors import BaspError


@dataclass(frozen=True)
class Workload:
    """One micro-batch per optimizer step, the same for every contender."""

    model: dict[str, Any]
    """model_type and sizes, as AutoConfig.for_model takes them."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    dtype: str = "float32"
    seed: int = 0
    """Of weights and of data."""
    replicate: int = 1
    """Hybrid sharding: copies of the model; 1 shards over all ranks."""
    gather_ahead: int = 0
    """Layers whose weights FSDP2 gathers while one is computed."""


class Contender(Protocol):
    """One way to take a workload's steps. Every rank makes its own, and all ranks call it together."""

    name: str
    """As in the command: "fsdp2-ulysses"."""
    does: str
    """One honest line: what it really does with this workload (padding, repeated kv heads, ...)."""
    tokens: int
    """Tokens that this rank computes, padding included."""
    counted: bool
    """Whether the stopwatch knows its attention's collectives; else it has neither their time nor their bytes."""

    def step(self, sequences: Sequence[np.ndarray]) -> float:
        """One optimizer step on these token ids.

        Labels are the ids, next-token; the loss is the mean over all valid tokens of the batch; no clipping, no weight
        decay.

        Returns:
            The loss, the same value on every rank.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class Unavailable(BaspError):  # it is no error of the run: a row says so
    """Raised by a builder: a package is missing, or the workload is one that this contender cannot run."""


Builder = Callable[[Workload, torch.device], Contender]
"""Called on every rank after ``init_process_group``."""
