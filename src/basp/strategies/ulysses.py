"""Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): every sequence over all ranks, its heads over all that hold it."""

from __future__ import annotations

from collections.abc import Sequence

from basp.plans import Plan
from basp.strategies.cut import cut_each, share_heads


def ulysses(lengths: Sequence[int], *, ranks: int, heads: int, kv_heads: int, causal: bool = True) -> Plan:
    """Cut each sequence over all N ranks and share its heads among them, whatever else is in the batch.

    Tokens per rank differ by at most B: each sequence rounds on its own. The paper needs N to divide the length and the
    heads; here neither does.
    """
    shard_table = cut_each(lengths, ranks=ranks)
    tile_table = share_heads(shard_table, lengths, heads=heads, kv_heads=kv_heads)
    return Plan(tuple(lengths), ranks, heads, kv_heads, causal, shard_table, tile_table)
