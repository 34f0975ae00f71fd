"""Strategies: pure functions from a batch's lengths (and the model's heads) to a Plan."""

# What users pass is checked at run time, whatever it is annotated as:
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from basp.errors import PlanError, check_named
from basp.plans import Plan, check_sizes
from basp.strategies.basp import basp
from basp.strategies.ulysses import ulysses

__all__ = ["STRATEGIES", "Strategy", "basp", "find_strategy", "plan", "ulysses"]


class Strategy(Protocol):
    """Lengths of the batch -> Plan. The shards may depend on lengths and ranks only, never on the heads.

    A model may have several head counts, and its tokens stay where they are between layers.
    """

    def __call__(self, lengths: Sequence[int], *, ranks: int, heads: int, kv_heads: int, causal: bool = True) -> Plan:
        """Lay the batch out over ``ranks``, as ``plan`` describes."""
        ...


STRATEGIES: dict[str, Strategy] = {"basp": basp, "ulysses": ulysses}


def find_strategy(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        PlanError: there is none; names the nearest.
    """
    check_named("strategy", name, STRATEGIES, PlanError)
    return STRATEGIES[name]


def plan(
    lengths: Sequence[int],
    *,
    ranks: int,
    heads: int,
    kv_heads: int | None = None,
    strategy: str | Strategy = "basp",
    causal: bool = True,
) -> Plan:
    """Lay one micro-step out over ``ranks``.

    Args:
        lengths: tokens of each sequence; any number of them, each at least 1.
        ranks: N, any number from 1.
        heads: H, query heads.
        kv_heads: K, a divisor of ``heads``; ``heads`` by default.
        strategy: "basp", "ulysses", or a function as ``Strategy`` describes.
        causal: whether a query sees only keys at and before its position.

    Raises:
        PlanError: sizes that no plan can have, an unknown strategy, or one that returns another plan than asked.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    check_sizes(lengths, ranks=ranks, heads=heads, kv_heads=kv_heads)
    build = find_strategy(strategy) if isinstance(strategy, str) else strategy
    made = build(lengths, ranks=ranks, heads=heads, kv_heads=kv_heads, causal=causal)
    asked = (tuple(map(int, lengths)), ranks, heads, kv_heads, causal)
    if not isinstance(made, Plan) or asked != (made.lengths, made.ranks, made.heads, made.kv_heads, made.causal):
        raise PlanError(
            f"{made!r} from strategy {strategy!r}",
            allowed=f"a Plan of lengths {asked[0]}, {ranks} ranks, {heads}/{kv_heads} heads, causal={causal}",
            remedy="build the plan from the arguments that the strategy is given",
        )
    return made
