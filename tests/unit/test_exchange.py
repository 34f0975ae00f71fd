"""Exchange tables, run by a simulator of all ranks in numpy.

Every packed row is tagged (kind, sequence, position, head, unit), so that a row which ends up anywhere but where the
documented layout wants it is seen. What each rank should read is written down from the plan's shards and tiles alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import basp
from basp import Plan, Shard, Tile
from basp.exchange import Call, Exchange, Gather, Route, Run, compile_exchange
from basp.plans import Ints
from tests.unit.test_plans import hand_plans

examples = settings(deadline=None, derandomize=True, database=None, max_examples=120)

Q, K, V, OUT = range(4)
Tag = tuple[int, int, int, int, int]
"""kind, sequence, position, head, unit"""

dims = st.sampled_from([(8, 8), (12, 8), (8, 12), (6, 2), (5, 3)])


@st.composite
def strategy_plans(draw: st.DrawFn) -> Plan:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    if draw(st.booleans()):
        lengths = lengths[:1] * len(lengths)
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return basp.plan(
        lengths,
        ranks=draw(st.integers(1, 6)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        strategy=draw(st.sampled_from(["basp", "ulysses"])),
        causal=draw(st.booleans()),
    )


any_plans = st.one_of(strategy_plans(), hand_plans())


# ---- what the documentation says, from shards and tiles alone


def private(plan: Plan) -> list[bool]:
    """For each sequence whether a single rank owns and computes all of it."""
    ranks: list[set[int]] = [set() for _ in plan.lengths]
    for rank in range(plan.ranks):
        for part in (*plan.shards[rank], *plan.tiles[rank]):
            ranks[part.sequence].add(rank)
    return [len(of_sequence) == 1 for of_sequence in ranks]


def shared_tokens(plan: Plan, rank: int) -> list[tuple[int, int]]:
    """(sequence, position) of a rank's tokens that are exchanged, in packed order."""
    alone = private(plan)
    shards = [shard for shard in sorted(plan.shards[rank]) if not alone[shard.sequence]]
    return [(shard.sequence, token) for shard in shards for token in range(shard.start, shard.stop)]


def token_rows(kind: int, sequence: int, position: int, heads: range, units: int) -> list[Tag]:
    return [(kind, sequence, position, head, unit) for head in heads for unit in range(units)]


def packed_rows(plan: Plan, rank: int, qk_units: int, v_units: int) -> list[Tag]:
    rows: list[Tag] = []
    for token in shared_tokens(plan, rank):
        rows += token_rows(Q, *token, range(plan.heads), qk_units)
        rows += token_rows(K, *token, range(plan.kv_heads), qk_units)
        rows += token_rows(V, *token, range(plan.kv_heads), v_units)
    return rows


def call_rows(call: Call, qk_units: int, v_units: int) -> list[Tag]:
    """[tokens, tiles, width] of q, k and v side by side; of q, then of k and v, where some keys have no query."""
    start, stop = call.queries
    parts = [(range(start, stop), (Q,)), (range(call.key_stop), (K, V))]
    if (start, stop) == (0, call.key_stop):
        parts = [(range(call.key_stop), (Q, K, V))]
    rows: list[Tag] = []
    for positions, kinds in parts:
        for position in positions:
            for sequence in call.sequences:
                for kind in kinds:
                    heads = range(*(call.heads if kind == Q else call.kv_heads))
                    rows += token_rows(kind, sequence, position, heads, v_units if kind == V else qk_units)
    return rows


def call_outputs(call: Call) -> list[Tag]:
    """[Tq, tiles, heads]"""
    return [
        (OUT, sequence, position, head, 0)
        for position in range(*call.queries)
        for sequence in call.sequences
        for head in range(*call.heads)
    ]


# ---- the simulator


def as_table(rows: Sequence[Tag]) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(len(rows), 5)


def read(rows: Ints, gather: Gather) -> Ints:
    assert len(rows) == gather.size
    if gather.index is None:
        return rows
    assert np.unique(gather.index).tolist() == list(range(gather.size)), "every input row is read at least once"
    return rows[gather.index]


def all_to_all(rows: Sequence[Ints], routes: Sequence[Route]) -> list[Ints]:
    """What each rank reads after its rows have been where its route says."""
    sent = []
    for own, route in zip(rows, routes, strict=True):
        gathered = read(own, route.send)
        assert len(gathered) == sum(route.send_splits)
        sent.append(np.split(gathered, np.cumsum(route.send_splits)[:-1]))
    results = []
    for target, route in enumerate(routes):
        received = [parts[target] for parts in sent]
        assert tuple(len(part) for part in received) == route.recv_splits
        results.append(read(np.concatenate(received), route.recv))
    return results


def compiled(plan: Plan, head_dim: int = 8, value_dim: int = 8) -> list[Exchange]:
    return [compile_exchange(plan, rank, head_dim=head_dim, value_head_dim=value_dim) for rank in range(plan.ranks)]


def check_exchange(plan: Plan, head_dim: int = 8, value_dim: int = 8) -> list[Exchange]:
    """Run all ranks of a plan; everything that the documentation promises is asserted."""
    exchanges = compiled(plan, head_dim, value_dim)
    for rank, exchange in enumerate(exchanges):
        check_runs(plan, rank, exchange.runs)
        check_calls(plan, rank, exchange.calls)
    if all(private(plan)):
        assert all(exchange.dispatch is None and exchange.combine is None for exchange in exchanges)
        return exchanges
    dispatches, combines = routes_of(exchanges)
    unit = gcd(head_dim, value_dim)
    units = head_dim // unit, value_dim // unit
    received = all_to_all([as_table(packed_rows(plan, rank, *units)) for rank in range(plan.ranks)], dispatches)
    outputs = []
    for exchange, rows in zip(exchanges, received, strict=True):
        assert exchange.unit == unit
        expected = [tag for call in exchange.calls for tag in call_rows(call, *units)]
        np.testing.assert_array_equal(rows, as_table(expected))
        outputs.append(as_table([tag for call in exchange.calls for tag in call_outputs(call)]))
    for rank, rows in enumerate(all_to_all(outputs, combines)):
        owned = [tag for token in shared_tokens(plan, rank) for tag in token_rows(OUT, *token, range(plan.heads), 1)]
        np.testing.assert_array_equal(rows, as_table(owned))
    check_bytes(plan, exchanges, head_dim, value_dim)
    return exchanges


def routes_of(exchanges: Sequence[Exchange]) -> tuple[list[Route], list[Route]]:
    dispatches = [exchange.dispatch for exchange in exchanges if exchange.dispatch is not None]
    combines = [exchange.combine for exchange in exchanges if exchange.combine is not None]
    assert len(dispatches) == len(combines) == len(exchanges), "every rank takes part, or none does"
    return dispatches, combines


def check_runs(plan: Plan, rank: int, runs: tuple[Run, ...]) -> None:
    if not plan.shards[rank]:
        assert runs == (Run(1, 1, 1),), "a dummy token, alone"
        return
    alone = private(plan)
    lengths: list[int] = []
    for shard in sorted(plan.shards[rank]):
        if not alone[shard.sequence]:
            lengths += [0] * (shard.stop - shard.start)
        elif shard.start == 0:  # a whole sequence, be it in several shards
            lengths.append(plan.lengths[shard.sequence])
    assert [length for run in runs for length in [run.length] * (run.batch or run.tokens)] == lengths
    assert all(run.tokens == run.batch * run.length for run in runs if run.length)
    assert all(first.length != second.length for first, second in itertools.pairwise(runs))


def check_calls(plan: Plan, rank: int, calls: tuple[Call, ...]) -> None:
    alone = private(plan)
    computed = [(sequence, *call.heads, *call.queries) for call in calls for sequence in call.sequences]
    assert sorted(computed) == sorted(tile for tile in plan.tiles[rank] if not alone[tile.sequence])
    group = plan.heads // plan.kv_heads
    for call in calls:
        kv_head_of = [head // group for head in range(*call.heads)]
        assert call.kv_heads == (kv_head_of[0], kv_head_of[-1] + 1)
        for sequence in call.sequences:
            assert call.key_stop == (call.queries[1] if plan.causal else plan.lengths[sequence])
        heads, kv_heads = len(kv_head_of), call.kv_heads[1] - call.kv_heads[0]
        index = call.kv_index or [head // (heads // kv_heads) for head in range(heads)]
        assert [call.kv_heads[0] + head for head in index] == kv_head_of


def check_bytes(plan: Plan, exchanges: Sequence[Exchange], head_dim: int, value_dim: int, itemsize: int = 2) -> None:
    dispatches, combines = routes_of(exchanges)
    there = np.array([route.send_splits for route in dispatches]) * exchanges[0].unit
    back = np.array([route.send_splits for route in combines]) * value_dim
    sent = (there + back) * itemsize
    np.fill_diagonal(sent, 0)
    np.testing.assert_array_equal(sent, plan.traffic(head_dim, itemsize, value_dim))


# ---- any plan


@examples
@given(strategy_plans(), dims)
def test_calls_of_strategies_read_what_their_tiles_need(plan: Plan, dim: tuple[int, int]) -> None:
    check_exchange(plan, *dim)


@examples
@given(hand_plans(), dims)
def test_calls_of_any_plan_read_what_their_tiles_need(plan: Plan, dim: tuple[int, int]) -> None:
    check_exchange(plan, *dim)


def zig_zag(causal: bool) -> Plan:
    """8 positions in 4 pieces, rank 0 has the first and last of them; queries are computed where they lie."""
    pieces = [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
    shards = [[Shard(i, *piece) for i in range(2) for piece in of_rank] for of_rank in pieces]
    tiles = [[Tile(i, 0, 4, *piece) for i in range(2) for piece in of_rank] for of_rank in pieces]
    return Plan.of([8, 8], heads=4, kv_heads=2, shards=shards, tiles=tiles, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_zig_zag_moves_keys_and_values_only(causal: bool) -> None:
    plan = zig_zag(causal)
    exchanges = check_exchange(plan, 12, 8)
    # Sequences lie side by side in one call for each of a rank's pieces.
    assert [len(exchange.calls) for exchange in exchanges] == [2, 2]
    assert all(call.sequences == (0, 1) for exchange in exchanges for call in exchange.calls)
    keys_to = [6 - 2, 2 + 2] if causal else [2 * 4, 2 * 4]  # tokens that each rank's two tiles read from the other
    bytes_each = 2 * 2 * (12 + 8) * 2  # sequences, kv heads, dims, itemsize
    assert plan.traffic(12, 2, 8).tolist() == [[0, keys_to[1] * bytes_each], [keys_to[0] * bytes_each, 0]]


def test_two_tiles_of_a_sequence_on_one_rank_with_heads_that_straddle_kv_heads() -> None:
    tiles = [
        [Tile(0, 1, 3, 0, 6), Tile(0, 4, 6, 2, 6)],
        [Tile(0, 0, 1, 0, 6), Tile(0, 3, 4, 0, 6), Tile(0, 4, 6, 0, 2)],
    ]
    plan = Plan.of([6], heads=6, kv_heads=3, shards=[[Shard(0, 0, 3)], [Shard(0, 3, 6)]], tiles=tiles)
    calls = check_exchange(plan, 8, 12)[0].calls
    assert [(call.kv_heads, call.kv_index) for call in calls] == [((0, 2), None), ((2, 3), None)]
    plan = Plan.of(
        [6],
        heads=6,
        kv_heads=2,
        shards=plan.shards,
        tiles=[[Tile(0, 1, 4, 0, 6)], [*tiles[1][:1], Tile(0, 4, 6, 0, 6)]],
    )
    calls = check_exchange(plan)[0].calls
    assert [(call.kv_heads, call.kv_index) for call in calls] == [((0, 2), (0, 0, 1))]


def test_attention_far_from_its_tokens() -> None:
    """Rank 0 owns all and computes nothing, rank 1 computes all and owns nothing, rank 2 is idle."""
    plan = Plan.of(
        [4, 4],
        heads=2,
        kv_heads=1,
        shards=[[Shard(0, 0, 4), Shard(1, 0, 4)], [], []],
        tiles=[[], [Tile(0, 0, 2, 0, 4), Tile(1, 0, 2, 0, 4)], []],
    )
    first, second, idle = check_exchange(plan)
    assert (first.calls, idle.calls) == ((), ())
    assert [call.sequences for call in second.calls] == [(0, 1)]
    assert (first.runs, second.runs, idle.runs) == ((Run(8, 0, 0),), (Run(1, 1, 1),), (Run(1, 1, 1),))
    assert idle.dispatch is not None
    assert idle.dispatch.send_splits == idle.dispatch.recv_splits == (0, 0, 0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ends", [(4, 4), (4, 6)])
def test_tiles_alike_with_other_owners_are_not_one_call(ends: tuple[int, int], causal: bool) -> None:
    shards = [[Shard(0, 0, 2), Shard(1, 2, ends[1])], [Shard(0, 2, 4), Shard(1, 0, 2)]]
    tiles = [[Tile(0, 0, 2, 0, 4), Tile(1, 0, 2, 0, 4)], [Tile(1, 0, 2, 4, 6)] if ends[1] == 6 else []]
    plan = Plan.of(ends, heads=2, kv_heads=1, shards=shards, tiles=tiles, causal=causal)
    assert [call.sequences for call in check_exchange(plan)[0].calls] == [(0,), (1,)]


# ---- what is left out


@pytest.mark.parametrize("strategy", ["basp", "ulysses"])
def test_one_rank_exchanges_nothing(strategy: str) -> None:
    (exchange,) = check_exchange(basp.plan([5, 5, 3], ranks=1, heads=4, kv_heads=2, strategy=strategy))
    assert (exchange.dispatch, exchange.combine, exchange.calls) == (None, None, ())
    assert exchange.runs == (Run(10, 2, 5), Run(3, 1, 3))


def test_a_sequence_for_each_rank_exchanges_nothing() -> None:
    exchanges = check_exchange(basp.plan([5] * 8, ranks=4, heads=4, kv_heads=2))
    assert all(exchange.dispatch is None for exchange in exchanges)
    assert {exchange.runs for exchange in exchanges} == {(Run(10, 2, 5),)}


def test_whole_sequences_are_in_no_table() -> None:
    plan = basp.plan([6, 2, 4], ranks=3, heads=2)  # slices of 4: rank 1 holds the end of 0 and all of 1
    exchanges = check_exchange(plan)
    assert [exchange.runs for exchange in exchanges] == [
        (Run(4, 0, 0),),
        (Run(2, 0, 0), Run(2, 1, 2)),
        (Run(4, 1, 4),),
    ]
    sizes = [exchange.dispatch.send.size for exchange in exchanges if exchange.dispatch is not None]
    assert sizes == [4 * 6, 2 * 6, 0]


def test_a_rank_without_tokens_has_a_dummy_and_still_takes_part() -> None:
    exchanges = check_exchange(basp.plan([2], ranks=4, heads=4))
    assert [exchange.runs for exchange in exchanges] == [
        (Run(1, 1, 1),),
        (Run(1, 0, 0),),
        (Run(1, 1, 1),),
        (Run(1, 0, 0),),
    ]
    assert all(exchange.dispatch is not None for exchange in exchanges)


@examples
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 9), dims)
def test_basp_never_reorders_what_arrives(lengths: list[int], ranks: int, heads: int, dim: tuple[int, int]) -> None:
    for exchange in compiled(basp.plan(lengths, ranks=ranks, heads=heads), *dim):
        assert exchange.dispatch is None or exchange.dispatch.recv.index is None
        assert exchange.combine is None or exchange.combine.send.index is None


@examples
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 8), st.integers(1, 9))
def test_ulysses_never_reorders_sequences_of_equal_length(length: int, batch: int, ranks: int, heads: int) -> None:
    plan = basp.plan([length] * batch, ranks=ranks, heads=heads, strategy="ulysses")
    for exchange in compiled(plan):
        assert exchange.dispatch is None or exchange.dispatch.recv.index is None
        assert exchange.combine is None or exchange.combine.send.index is None
        assert len(exchange.calls) <= 1, "one kernel call for the whole batch"


# ---- gathers and their transposes


def check_transpose(gather: Gather) -> None:
    assert gather.index is not None
    first, rounds = gather.transpose
    grads = np.random.default_rng(3).integers(-1000, 1000, (len(gather.index), 2))
    dense = np.zeros((gather.size, 2), dtype=np.int64)
    np.add.at(dense, gather.index, grads)
    total = grads[first]
    places = [first]
    for rows, read_places in rounds:
        assert len(rows)
        assert len(np.unique(rows)) == len(rows), "a row twice in one round would lose a gradient"
        total[rows] += grads[read_places]
        places.append(read_places)
    np.testing.assert_array_equal(total, dense)
    assert sorted(np.concatenate(places).tolist()) == list(range(len(gather.index)))
    most = np.bincount(gather.index, minlength=1).max(initial=0)
    assert len(rounds) == max(most - 1, 0), "as few rounds as the row that is read most often needs"


@examples
@given(st.lists(st.integers(0, 9), max_size=60), st.randoms(use_true_random=False))
def test_transpose_is_a_scatter_add(repeats: list[int], random: Any) -> None:
    index = [row for row, more in enumerate(repeats) for _ in range(1 + more)]
    random.shuffle(index)
    check_transpose(Gather(np.array(index, dtype=np.int64), len(repeats)))


@examples
@given(any_plans)
def test_transposes_of_compiled_gathers(plan: Plan) -> None:
    readers: dict[tuple[int, int], int] = defaultdict(int)
    for rank in range(plan.ranks):
        for tile in plan.tiles[rank]:
            for kv_head in {head // (plan.heads // plan.kv_heads) for head in range(tile.head_start, tile.head_stop)}:
                readers[tile.sequence, kv_head] += 1
    for exchange in compiled(plan):
        if exchange.dispatch is None or exchange.combine is None:
            continue
        for gather in (exchange.dispatch.send, exchange.dispatch.recv, exchange.combine.send, exchange.combine.recv):
            if gather.index is not None:
                check_transpose(gather)
        for gather in (exchange.dispatch.recv, exchange.combine.send, exchange.combine.recv):
            assert gather.index is None or not gather.transpose[1], "a permutation has no second reader"
        assert exchange.dispatch.send.index is not None
        assert len(exchange.dispatch.send.transpose[1]) < max(readers.values())


def test_tables_hold_only_a_ranks_own_tokens() -> None:
    """The same tokens for each rank in a batch 8 times as large, on 8 times as many ranks: tables stay as large."""
    sizes = []
    for times in (1, 8):
        plan = basp.plan([64, 40, 24] * times, ranks=4 * times, heads=8, kv_heads=4)
        exchange = compile_exchange(plan, 1, head_dim=8)
        assert exchange.dispatch is not None
        assert exchange.combine is not None
        gathers = (exchange.dispatch.send, exchange.dispatch.recv, exchange.combine.send, exchange.combine.recv)
        sizes.append([0 if gather.index is None else gather.index.size for gather in gathers])
    assert sizes[0] == sizes[1]
    assert max(sizes[0]) > 0
