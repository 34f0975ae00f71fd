"""The one tree of exceptions: every refusal says what arrived, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BaspError(Exception):
    """Base of everything that basp refuses.

    Args:
        arrived: what was found, with its place ("sequence 3 has 0 tokens").
        allowed: what would have been accepted ("at least 1 token").
        remedy: what the reader can do now ("drop empty documents before sharding").
    """

    def __init__(self, arrived: str, *, allowed: str, remedy: str) -> None:
        super().__init__(arrived, allowed, remedy)
        self.arrived, self.allowed, self.remedy = arrived, allowed, remedy

    def __str__(self) -> str:
        return f"{self.arrived}. Allowed: {self.allowed}. To do: {self.remedy}."

    def __reduce__(self):  # keyword-only arguments do not survive the default pickling between processes
        return _rebuild, (type(self), self.arrived, self.allowed, self.remedy)


def check_named(kind: str, name: str, names: Iterable[str], error: type[BaspError]) -> None:
    """Refuse ``name`` as an ``error``, with the nearest of ``names``, unless it is one of them."""
    known = list(names)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
        raise error(f"{kind} {name!r}", allowed=", ".join(map(repr, known)), remedy=hint)


def _rebuild(kind: type[BaspError], arrived: str, allowed: str, remedy: str) -> BaspError:
    return kind(arrived, allowed=allowed, remedy=remedy)


class PlanError(BaspError, ValueError):
    """Lengths, heads or ranks that no plan can have, or a plan that breaks an invariant."""


class BatchError(BaspError, ValueError):
    """Sequences or labels given to ``shard`` that cannot be trained on."""


class DisagreementError(BaspError, RuntimeError):
    """Ranks of one group were given different batches; raised on every rank of the group."""


class ModelError(BaspError, ValueError):
    """A model, or what a model asks of attention, that basp cannot honour exactly."""


class ConfigError(BaspError, ValueError):
    """Settings that do not exist, contradict each other or are out of range."""


class DataError(BaspError, ValueError):
    """Training data that cannot be read or holds nothing to train on; names the file and, where known, the line."""


class TrainingError(BaspError, RuntimeError):
    """A run that had to stop: a loss that is not finite, a rank that died."""


class LabError(BaspError, RuntimeError):
    """An emulated cluster that this machine or this process cannot have, or that could not be removed."""
