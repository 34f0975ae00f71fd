"""Batch-aware sequence parallelism: the batch decides which ranks share which sequence.

The names below are imported on first use, so that planning (numpy only) never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from basp import lab
    from basp.checks import check
    from basp.hf import prepare
    from basp.parallel import SequenceParallel, Step
    from basp.plans import Plan, Shard, Tile
    from basp.strategies import plan

_HOME = {
    "Plan": "basp.plans",
    "Shard": "basp.plans",
    "Tile": "basp.plans",
    "plan": "basp.strategies",
    "SequenceParallel": "basp.parallel",
    "Step": "basp.parallel",
    "prepare": "basp.hf",
    "check": "basp.checks.command",
}

__all__ = ["Plan", "SequenceParallel", "Shard", "Step", "Tile", "check", "lab", "plan", "prepare"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "lab":
        return importlib.import_module("basp.lab")
    if name not in _HOME:
        raise AttributeError(f"module 'basp' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
