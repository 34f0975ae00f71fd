"""Strategies over random batches: what they promise of tokens, heads and traffic."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import basp
from basp import Plan, Shard, Tile
from basp.errors import PlanError
from basp.strategies import STRATEGIES, find_strategy

examples = settings(deadline=None, derandomize=True, database=None, max_examples=200)

ranks = st.integers(1, 16)
lengths = st.one_of(st.integers(1, 6), st.integers(1, 500))  # few tokens for many ranks are as frequent as the rest
head_counts = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(lambda pair: (pair[0] * pair[1], pair[0]))


def plans(batch: Sequence[int], n: int, heads: tuple[int, int], causal: bool = True) -> dict[str, Plan]:
    sizes: dict[str, Any] = {"ranks": n, "heads": heads[0], "kv_heads": heads[1], "causal": causal}
    return {name: basp.plan(batch, strategy=name, **sizes) for name in ("basp", "ulysses")}


def total(plan: Plan) -> int:
    return int(plan.traffic(head_dim=8, itemsize=2).sum())


# ---- tokens and heads


@examples
@given(st.lists(lengths, min_size=1, max_size=6), ranks, head_counts, st.booleans())
def test_tokens_are_equal_and_each_sequence_lies_in_rank_order(
    batch: list[int], n: int, heads: tuple[int, int], causal: bool
) -> None:
    both = plans(batch, n, heads, causal)  # the construction checks the invariants
    assert np.ptp(both["basp"].tokens) <= 1
    assert np.ptp(both["ulysses"].tokens) <= len(batch)
    for plan in both.values():
        assert (plan.lengths, plan.ranks, plan.heads, plan.kv_heads) == (tuple(batch), n, *heads)
        assert plan.causal is causal
        for owners in plan.owners:
            assert [rank for rank, _, _ in owners] == sorted({rank for rank, _, _ in owners})
    stream = [shard for shards in both["basp"].shards for shard in shards]
    assert stream == sorted(stream), "basp cuts one stream: rank after rank, the batch in order"
    for sequence, length in enumerate(batch):
        assert len(both["ulysses"].owners[sequence]) == min(n, length)


@examples
@given(st.lists(lengths, min_size=1, max_size=6), ranks, head_counts)
def test_heads_are_shared_in_proportion_to_tokens(batch: list[int], n: int, heads: tuple[int, int]) -> None:
    for plan in plans(batch, n, heads).values():
        tiles = {(rank, tile.sequence): tile for rank in range(n) for tile in plan.tiles[rank]}
        assert len(tiles) == len(plan.tile_table), "at most one tile for each rank and sequence"
        for sequence, length in enumerate(batch):
            for rank, start, stop in plan.owners[sequence]:
                tile = tiles.pop((rank, sequence), Tile(sequence, 0, 0, 0, length))
                assert (tile.query_start, tile.query_stop) == (0, length)
                share = Fraction(heads[0] * (stop - start), length)
                assert abs(tile.head_stop - tile.head_start - share) <= 1
                if all(heads[0] * border % length == 0 for border in (start, stop)):
                    assert tile.head_stop - tile.head_start == share, "whole shares are kept exactly"
        assert not tiles, "only ranks that hold a sequence compute its attention"


@examples
@given(st.lists(lengths, min_size=1, max_size=6), ranks, head_counts, head_counts)
def test_shards_do_not_follow_the_heads(
    batch: list[int], n: int, heads: tuple[int, int], other: tuple[int, int]
) -> None:
    one, two = plans(batch, n, heads), plans(batch, n, other)
    assert all(one[name].shards == two[name].shards for name in one)


def test_owners_of_whole_kv_heads_come_first() -> None:
    for name in ("basp", "ulysses"):
        plan = basp.plan([4], ranks=4, heads=6, kv_heads=3, strategy=name)  # borders at 1.5, 3, 4.5: 2, 1, 2, 1 heads
        heads = [(tile.head_start, tile.head_stop) for tiles in plan.tiles for tile in tiles]
        assert heads == [(0, 2), (4, 5), (2, 4), (5, 6)]
        kv_start, kv_stop = plan.kv_range
        assert (kv_stop - kv_start).tolist() == [1, 1, 1, 1], "no rank reads a kv head that it does not have to"


def test_ranks_without_tokens_or_heads_are_left_out() -> None:
    plan = basp.plan([2], ranks=4, heads=8, kv_heads=2)
    assert plan.shards == ((), (Shard(0, 0, 1),), (), (Shard(0, 1, 2),))
    assert plan.tiles == ((), (Tile(0, 0, 4, 0, 2),), (), (Tile(0, 4, 8, 0, 2),))
    plan = basp.plan([16], ranks=4, heads=1)  # exact borders: 1/4, 1/2, 3/4
    assert plan.tiles == ((), (Tile(0, 0, 1, 0, 16),), (), ())


# ---- against Ulysses and the paper


@examples
@given(lengths, ranks, head_counts, st.booleans())
def test_one_sequence_is_ulysses(length: int, n: int, heads: tuple[int, int], causal: bool) -> None:
    both = plans([length], n, heads, causal)
    assert both["basp"] == both["ulysses"]


@examples
@given(lengths, st.integers(1, 10), ranks, head_counts)
def test_equal_lengths_never_move_more_than_ulysses(length: int, batch: int, n: int, heads: tuple[int, int]) -> None:
    both = plans([length] * batch, n, heads)
    assert total(both["basp"]) <= total(both["ulysses"])


@examples
@given(st.lists(lengths, min_size=1, max_size=6), ranks, head_counts)
def test_any_lengths_move_at_most_a_fifth_more_than_ulysses(batch: list[int], n: int, heads: tuple[int, int]) -> None:
    both = plans(batch, n, heads)
    assert 5 * total(both["basp"]) <= 6 * total(both["ulysses"])


def test_unequal_lengths_do_not_push_owners_off_the_borders_of_kv_heads() -> None:
    # Rounding borders alone gives every rank an odd head to start with here, and two kv heads to fetch: 1.22 and 1.16.
    for batch, n, heads in (([1, 12], 4, (8, 4)), ([5658, 139, 100], 16, (32, 16))):
        both = plans(batch, n, heads)
        assert 16 * total(both["basp"]) <= 17 * total(both["ulysses"])


@examples
@given(
    st.integers(1, 8), st.integers(1, 6), st.integers(1, 30), st.integers(1, 3), st.integers(1, 4), st.integers(1, 256)
)
def test_with_a_group_for_each_sequence_it_is_the_papers_to_the_byte(
    k: int, batch: int, tokens: int, kv_heads_each: int, group: int, head_dim: int
) -> None:
    """Equal lengths, N = K B, and K divides the length and both head counts: the paper's case."""
    length, kv_heads = k * tokens, k * kv_heads_each
    heads = kv_heads * group
    plan = basp.plan([length] * batch, ranks=k * batch, heads=heads, kv_heads=kv_heads)
    for rank in range(plan.ranks):
        sequence, place = divmod(rank, k)
        assert plan.shards[rank] == (Shard(sequence, place * tokens, (place + 1) * tokens),)
        each = heads // k
        assert plan.tiles[rank] == (Tile(sequence, place * each, (place + 1) * each, 0, length),)
    moved = plan.traffic(head_dim, itemsize=2)
    assert moved.sum() == Fraction(k - 1, k) * batch * length * head_dim * 2 * (2 * heads + 2 * kv_heads)
    group_of = np.arange(plan.ranks) // k
    assert not moved[group_of[:, None] != group_of].any(), "nothing leaves a group"
    assert np.unique(moved[(group_of[:, None] == group_of) & ~np.eye(plan.ranks, dtype=bool)]).size <= 1


def test_known_batches() -> None:
    both = plans([1200] * 8, 8, (32, 8))
    assert total(both["basp"]) == 0
    both = plans([1200] * 3, 8, (32, 8))
    # 1 - sum(share^2) of each sequence moves; its ranks' shares, in eighths, are 3 3 2, then 1 3 3 1, then 2 3 3.
    assert Fraction(total(both["basp"]), total(both["ulysses"])) == Fraction(2 * 42 + 44, 3 * 56)
    both = plans([16384, 16384, 9000], 8, (32, 8))
    assert both["basp"].tokens.tolist() == [5221] * 8
    assert total(both["basp"]) < 0.8 * total(both["ulysses"])


# ---- by name, or a function of one's own


def test_strategies_are_found_by_name() -> None:
    assert [find_strategy(name) for name in STRATEGIES] == list(STRATEGIES.values())
    assert {"basp", "ulysses"} <= set(STRATEGIES)


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"strategy 'ulises'.*'basp', 'ulysses'.*did you mean 'ulysses'\?"):
        find_strategy("ulises")
    with pytest.raises(PlanError, match=r"strategy 'ring'.*choose one of these"):
        basp.plan([4], ranks=2, heads=2, strategy="ring")


def test_a_strategy_of_ones_own_is_called_with_checked_sizes() -> None:
    asked: list[dict[str, Any]] = []

    def last_rank_takes_all(lengths: Sequence[int], **sizes: Any) -> Plan:
        asked.append({"lengths": lengths, **sizes})
        idle = [()] * (sizes["ranks"] - 1)
        return Plan.of(
            lengths,
            heads=sizes["heads"],
            kv_heads=sizes["kv_heads"],
            causal=sizes["causal"],
            shards=[*idle, [Shard(i, 0, length) for i, length in enumerate(lengths)]],
            tiles=[*idle, [Tile(i, 0, sizes["heads"], 0, length) for i, length in enumerate(lengths)]],
        )

    plan = basp.plan([5, 3], ranks=3, heads=4, strategy=last_rank_takes_all, causal=False)
    assert plan.tokens.tolist() == [0, 0, 8]
    assert asked == [{"lengths": [5, 3], "ranks": 3, "heads": 4, "kv_heads": 4, "causal": False}]
    with pytest.raises(PlanError, match="sequence 1 has 0 tokens"):
        basp.plan([5, 0], ranks=3, heads=4, strategy=last_rank_takes_all)
    assert len(asked) == 1


@pytest.mark.parametrize("strategy", ["basp", "ulysses"])
def test_any_sequence_of_whole_numbers_will_do(strategy: str) -> None:
    sizes: dict[str, Any] = {"ranks": 3, "heads": 4, "kv_heads": 2, "strategy": strategy}
    plan = basp.plan([7, 8, 9], **sizes)
    assert basp.plan((7, 8, 9), **sizes) == plan
    assert basp.plan(range(7, 10), **sizes) == plan
    assert basp.plan(np.array([7, 8, 9], dtype=np.int32), **sizes) == plan  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["basp", "ulysses"])
def test_bad_sizes_are_refused_before_planning(strategy: str) -> None:
    for lengths, sizes in (
        ([], {"ranks": 2, "heads": 4}),
        ([3, 0], {"ranks": 2, "heads": 4}),
        ([3], {"ranks": 0, "heads": 4}),
        ([3], {"ranks": 2, "heads": 6, "kv_heads": 4}),
    ):
        with pytest.raises(PlanError):
            basp.plan(lengths, strategy=strategy, **sizes)
