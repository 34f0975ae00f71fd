"""BASP (Batch-Aware Sequence Parallelism, arXiv 2609.03151), for any batch."""

from __future__ import annotations

from collections.abc import Sequence

from basp.plans import Plan
from basp.strategies.cut import cut_stream, share_heads


def basp(lengths: Sequence[int], *, ranks: int, heads: int, kv_heads: int, causal: bool = True) -> Plan:
    """Cut the batch, laid end to end, into N equal slices; only ranks that hold a sequence share its heads.

    Tokens per rank differ by at most 1. When B divides N and lengths are equal this is the paper's BASP: groups of
    K = N / B consecutive ranks, one sequence and heads / K heads each. Otherwise a slice may hold the end of one
    sequence, whole ones, and the start of another.
    """
    shard_table = cut_stream(lengths, ranks=ranks)
    tile_table = share_heads(shard_table, lengths, heads=heads, kv_heads=kv_heads)
    return Plan(tuple(lengths), ranks, heads, kv_heads, causal, shard_table, tile_table)
