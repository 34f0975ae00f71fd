"""Plans: what is refused, what is counted (against counts by hand, one token and head at a time), and identity."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basp import Plan, Shard, Tile
from basp.errors import PlanError
from basp.plans import MAX_TOKENS, check_sizes

examples = settings(deadline=None, derandomize=True, database=None, max_examples=150)


# ---- plans of every form that the invariants allow


@st.composite
def ranges(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """``0:size`` cut into consecutive non-empty ranges."""
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    return list(itertools.pairwise([0, *cuts, size]))


@st.composite
def hand_plans(draw: st.DrawFn, *, most_tokens: int = 9) -> Plan:
    """Any ranks own any stretches (zig-zag too) and compute any head x query rectangles."""
    lengths = draw(st.lists(st.integers(1, most_tokens), min_size=1, max_size=4))
    ranks, kv_heads, group = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    rank = st.integers(0, ranks - 1)
    shards: list[list[Shard]] = [[] for _ in range(ranks)]
    tiles: list[list[Tile]] = [[] for _ in range(ranks)]
    for sequence, length in enumerate(lengths):
        one_rank = st.just(draw(rank)) if draw(st.booleans()) else rank  # else sequences on one rank are rare
        for start, stop in draw(ranges(length)):
            shards[draw(one_rank)].append(Shard(sequence, start, stop))
        heads_first = draw(st.booleans())
        for outer in draw(ranges(heads if heads_first else length)):
            for inner in draw(ranges(length if heads_first else heads)):
                head_range, queries = (outer, inner) if heads_first else (inner, outer)
                tiles[draw(one_rank)].append(Tile(sequence, *head_range, *queries))
    causal = draw(st.booleans())
    return Plan.of(lengths, heads=heads, kv_heads=kv_heads, shards=shards, tiles=tiles, causal=causal)


def two_ranks(**changes: Any) -> Plan:
    """Sequences of 6 and 2 tokens, 4/2 heads, on 2 ranks; sequence 0 is shared."""
    parts: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 2,
        "shards": [[Shard(0, 0, 3)], [Shard(0, 3, 6), Shard(1, 0, 2)]],
        "tiles": [[Tile(0, 0, 2, 0, 6)], [Tile(0, 2, 4, 0, 6), Tile(1, 0, 4, 0, 2)]],
    }
    return Plan.of([6, 2], **(parts | changes))


# ---- invariants, each broken on purpose

BROKEN_SHARDS = {
    "a gap": ([Shard(0, 0, 2)], [Shard(0, 3, 6), Shard(1, 0, 2)]),
    "a missing start": ([Shard(0, 1, 3)], [Shard(0, 3, 6), Shard(1, 0, 2)]),
    "a missing end": ([Shard(0, 0, 3)], [Shard(0, 3, 5), Shard(1, 0, 2)]),
    "an overlap": ([Shard(0, 0, 4)], [Shard(0, 3, 6), Shard(1, 0, 2)]),
    "a shard twice": ([Shard(0, 0, 3), Shard(0, 0, 3)], [Shard(0, 3, 6), Shard(1, 0, 2)]),
    "an end past the end": ([Shard(0, 0, 3)], [Shard(0, 3, 7), Shard(1, 0, 2)]),
    "a negative start": ([Shard(0, -1, 3)], [Shard(0, 3, 6), Shard(1, 0, 2)]),
    "an empty shard": ([Shard(0, 0, 3), Shard(0, 3, 3)], [Shard(0, 3, 6), Shard(1, 0, 2)]),
    "an empty shard at the end": ([Shard(0, 0, 3), Shard(0, 6, 6)], [Shard(0, 3, 6), Shard(1, 0, 2)]),
    "a shard backwards": ([Shard(0, 0, 6), Shard(0, 6, 3)], [Shard(0, 3, 6), Shard(1, 0, 2)]),
    "a sequence without shards": ([Shard(1, 0, 2)], []),
    "a container's range inside another": ([Shard(0, 0, 6)], [Shard(0, 2, 4), Shard(1, 0, 2)]),
}


@pytest.mark.parametrize("shards", BROKEN_SHARDS.values(), ids=list(BROKEN_SHARDS))
def test_shards_that_do_not_partition_a_sequence_are_refused(shards: Any) -> None:
    with pytest.raises(PlanError, match=r"shards of sequence 0 leave a gap, overlap or pass its end.* 0:6 once each"):
        two_ranks(shards=shards)


def test_the_faulty_sequence_is_named() -> None:
    with pytest.raises(PlanError, match=r"shards of sequence 1 .* 0:2 once each"):
        two_ranks(shards=[[Shard(0, 0, 6)], [Shard(1, 0, 1)]])
    with pytest.raises(PlanError, match=r"shards of sequence 1 .* 0:2 once each"):
        two_ranks(shards=[[Shard(0, 0, 6)], []])


BROKEN_TILES = {
    "a query gap": (0, [Tile(0, 0, 2, 0, 2), Tile(0, 0, 2, 3, 6)]),
    "queries missing at the end": (0, [Tile(0, 0, 2, 0, 5)]),
    "queries missing at the start": (0, [Tile(0, 0, 2, 1, 6)]),
    "queries past the end": (0, [Tile(0, 0, 2, 0, 7)]),
    "a query overlap": (0, [Tile(0, 0, 2, 0, 4), Tile(0, 0, 2, 3, 6)]),
    "an empty query range": (0, [Tile(0, 0, 2, 0, 6), Tile(0, 0, 2, 6, 6)]),
    "a negative query": (0, [Tile(0, 0, 2, -1, 6)]),
    "a missing head": (1, [Tile(0, 0, 1, 0, 6)]),
    "no tile at all": (0, []),
    "a tile twice": (0, [Tile(0, 0, 2, 0, 6), Tile(0, 0, 2, 0, 6)]),
    "a head twice": (1, [Tile(0, 0, 2, 0, 6), Tile(0, 1, 2, 0, 6)]),
    "a head that another rank has": (2, [Tile(0, 0, 3, 0, 6)]),
    "half a head missing": (1, [Tile(0, 0, 2, 0, 3), Tile(0, 0, 1, 3, 6)]),
}


@pytest.mark.parametrize(("head", "tiles"), BROKEN_TILES.values(), ids=list(BROKEN_TILES))
def test_tiles_that_do_not_partition_heads_and_queries_are_refused(head: int, tiles: list[Tile]) -> None:
    with pytest.raises(PlanError, match=rf"tiles of sequence 0 at head {head} leave a gap.* queries 0:6 of every head"):
        two_ranks(tiles=[tiles, [Tile(0, 2, 4, 0, 6), Tile(1, 0, 4, 0, 2)]])


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (-1, 2), (2, 2), (3, 1), (4, 5)])
def test_heads_out_of_range_are_refused(start: int, stop: int) -> None:
    with pytest.raises(PlanError, match=rf"tile with heads {start}:{stop}.* within 0:4"):
        two_ranks(tiles=[[Tile(0, start, stop, 0, 6)], [Tile(0, 2, 4, 0, 6), Tile(1, 0, 4, 0, 2)]])


@pytest.mark.parametrize("sequence", [-1, 2])
def test_a_sequence_that_does_not_exist_is_refused(sequence: int) -> None:
    plan = two_ranks()
    with pytest.raises(PlanError, match=rf"a shard of sequence {sequence}\. Allowed: sequence 0 to 1"):
        two_ranks(shards=[[Shard(sequence, 0, 3)], plan.shards[1]])
    with pytest.raises(PlanError, match=rf"a tile of sequence {sequence}\. Allowed: sequence 0 to 1"):
        two_ranks(tiles=[[Tile(sequence, 0, 2, 0, 6)], plan.tiles[1]])


@pytest.mark.parametrize("rank", [-1, 2])
@pytest.mark.parametrize("what", ["shard", "tile"])
def test_a_rank_that_does_not_exist_is_refused(what: str, rank: int) -> None:
    parts = json.loads(two_ranks().to_json())
    parts[f"{what}_table"][0][0] = rank
    with pytest.raises(PlanError, match=rf"a {what} of rank {rank}\. Allowed: rank 0 to 1"):
        Plan.from_json(json.dumps(parts))


def test_shards_and_tiles_for_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="shards for 2 ranks and tiles for 1"):
        two_ranks(tiles=[[Tile(0, 0, 4, 0, 6), Tile(1, 0, 4, 0, 2)]])


def test_tables_of_another_shape_are_refused() -> None:
    plan = two_ranks()
    with pytest.raises(PlanError, match=r"a table of shape \(3, 3\).*\[rows, 4\]"):
        Plan(plan.lengths, 2, 4, 2, True, plan.shard_table[:, :3], plan.tile_table)


# ---- sizes

BAD_SIZES = {
    "0 ranks": ({"ranks": 0}, "^0 ranks"),
    "negative ranks": ({"ranks": -4}, "^-4 ranks"),
    "no sequence": ({"lengths": []}, "^a batch of 0 sequences"),
    "an empty sequence": ({"lengths": [5, 0, 3]}, "^sequence 1 has 0 tokens"),
    "a negative length": ({"lengths": [5, 3, -2]}, "^sequence 2 has -2 tokens"),
    "float lengths": ({"lengths": [5.0, 3.0]}, "whole numbers"),
    "a float among lengths": ({"lengths": [5, 3.5]}, "whole numbers"),
    "a list of lists": ({"lengths": [[5, 3]]}, "whole numbers"),
    "too many tokens": ({"lengths": [MAX_TOKENS, 1]}, f"{MAX_TOKENS + 1} tokens in all.*at most {MAX_TOKENS}"),
    "tokens beyond int64": ({"lengths": [2**62, 2**62]}, f"{2**63} tokens in all"),
    "a length beyond int64": ({"lengths": [2**70]}, "whole numbers"),
    "6 heads for 4 kv heads": ({"heads": 6, "kv_heads": 4}, "^6 query heads with 4 kv heads"),
    "fewer heads than kv heads": ({"heads": 2, "kv_heads": 4}, "^2 query heads with 4 kv heads"),
    "0 heads": ({"heads": 0, "kv_heads": 1}, "^0 query heads with 1 kv heads"),
    "0 kv heads": ({"heads": 4, "kv_heads": 0}, "^4 query heads with 0 kv heads"),
    "negative heads": ({"heads": -4, "kv_heads": -2}, "^-4 query heads"),
}


@pytest.mark.parametrize(("sizes", "message"), BAD_SIZES.values(), ids=list(BAD_SIZES))
def test_sizes_that_no_plan_can_have_are_refused(sizes: dict[str, Any], message: str) -> None:
    given_sizes: dict[str, Any] = {"lengths": [5, 3], "ranks": 2, "heads": 4, "kv_heads": 2} | sizes
    with pytest.raises(PlanError, match=message):
        check_sizes(given_sizes.pop("lengths"), **given_sizes)


@pytest.mark.parametrize("lengths", [[float("nan")], [float("inf")], ["7"], [None], [[1, 2], [3]]])
def test_lengths_that_are_no_numbers_are_refused_as_any_other(lengths: Any) -> None:
    with pytest.raises(PlanError, match="whole numbers"):
        check_sizes(lengths, ranks=2, heads=4, kv_heads=2)


@pytest.mark.parametrize("name", ["ranks", "heads", "kv_heads"])
def test_sizes_that_are_not_whole_are_refused(name: str) -> None:
    sizes: dict[str, Any] = {"ranks": 2, "heads": 4, "kv_heads": 2}
    sizes[name] = float(sizes[name])
    with pytest.raises(PlanError, match=r"\.0"):
        check_sizes([5, 3], **sizes)


def test_the_largest_batch_is_counted_without_overflow() -> None:
    for heads, causal in ((128, True), (128, False)):
        tables = np.array([[0, 0, 0, MAX_TOKENS]]), np.array([[0, 0, 0, heads, 0, MAX_TOKENS]])
        plan = Plan((MAX_TOKENS,), 1, heads, heads, causal, *tables)
        pairs = MAX_TOKENS * (MAX_TOKENS + 1) // 2 if causal else MAX_TOKENS**2
        assert plan.attention_work.tolist() == [pairs * heads]


# ---- reading


def test_shards_and_tiles_are_read_back_in_packed_order() -> None:
    shards = [[Shard(1, 0, 2), Shard(0, 3, 6)], [], [Shard(0, 0, 3)]]
    tiles = [[Tile(1, 0, 4, 0, 2)], [Tile(0, 2, 4, 3, 6), Tile(0, 2, 4, 0, 3), Tile(0, 0, 2, 0, 6)], []]
    plan = two_ranks(shards=shards, tiles=tiles)
    assert plan.shards == ((Shard(0, 3, 6), Shard(1, 0, 2)), (), (Shard(0, 0, 3),))
    assert plan.tiles == ((Tile(1, 0, 4, 0, 2),), (Tile(0, 0, 2, 0, 6), Tile(0, 2, 4, 0, 3), Tile(0, 2, 4, 3, 6)), ())
    assert plan.owners == (((2, 0, 3), (0, 3, 6)), ((0, 0, 2),))
    assert plan.tokens.tolist() == [5, 0, 3]
    assert (plan.ranks, plan.lengths) == (3, (6, 2))


def test_what_moves_in_a_small_plan_counted_by_hand() -> None:
    plan = two_ranks()
    # Sequence 0: each rank sends its 3 tokens' 2 q heads, 1 k head and 1 v head (dims 8, 8 and 4), and as many outputs.
    one_way = 3 * (2 * 8 + 1 * 8 + 1 * 4) + 3 * 2 * 4
    assert plan.traffic(head_dim=8, itemsize=2, value_head_dim=4).tolist() == [[0, 2 * one_way], [2 * one_way, 0]]
    assert plan.attention_work.tolist() == [2 * 21, 2 * 21 + 4 * 3]


def work_by_hand(plan: Plan) -> list[int]:
    work = [0] * plan.ranks
    for rank, tiles in enumerate(plan.tiles):
        for tile in tiles:
            for _head in range(tile.head_start, tile.head_stop):
                for query in range(tile.query_start, tile.query_stop):
                    work[rank] += sum(not plan.causal or key <= query for key in range(plan.lengths[tile.sequence]))
    return work


def traffic_by_hand(plan: Plan, *, qk_bytes: int, v_bytes: int) -> list[list[int]]:
    """Each (token, head) that a tile needs is sent by the token's owner; each output (token, head) goes back."""
    owner = {
        (shard.sequence, token): rank
        for rank, shards in enumerate(plan.shards)
        for shard in shards
        for token in range(shard.start, shard.stop)
    }
    sent: Counter[tuple[int, int]] = Counter()
    for worker, tiles in enumerate(plan.tiles):
        for tile in tiles:
            heads = range(tile.head_start, tile.head_stop)
            queries = range(tile.query_start, tile.query_stop)
            for _, query in itertools.product(heads, queries):
                sent[owner[tile.sequence, query], worker] += qk_bytes
                sent[worker, owner[tile.sequence, query]] += v_bytes
            kv_heads = {head // (plan.heads // plan.kv_heads) for head in heads}
            length = plan.lengths[tile.sequence]
            keys = {key for query in queries for key in range(length) if not plan.causal or key <= query}
            for _, key in itertools.product(kv_heads, keys):
                sent[owner[tile.sequence, key], worker] += qk_bytes + v_bytes
    ranks = range(plan.ranks)
    return [[0 if source == target else sent[source, target] for target in ranks] for source in ranks]


@examples
@given(hand_plans())
def test_work_and_tokens_equal_counts_by_hand(plan: Plan) -> None:
    assert plan.attention_work.tolist() == work_by_hand(plan)
    assert plan.tokens.tolist() == [sum(shard.stop - shard.start for shard in shards) for shards in plan.shards]
    pairs = [length * (length + 1) // 2 if plan.causal else length**2 for length in plan.lengths]
    assert plan.attention_work.sum() == plan.heads * sum(pairs)


@examples
@given(hand_plans(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 8))
def test_traffic_equals_a_count_by_hand(plan: Plan, head_dim: int, value_dim: int, itemsize: int) -> None:
    by_hand = traffic_by_hand(plan, qk_bytes=head_dim * itemsize, v_bytes=value_dim * itemsize)
    assert plan.traffic(head_dim, itemsize, value_dim).tolist() == by_hand
    assert plan.traffic(head_dim, itemsize).tolist() == plan.traffic(head_dim, itemsize, head_dim).tolist()


# ---- identity


@examples
@given(hand_plans(), st.randoms(use_true_random=False))
def test_json_round_trip_and_rows_in_any_order_give_an_equal_plan(plan: Plan, random: Any) -> None:
    parts = json.loads(plan.to_json())
    random.shuffle(parts["shard_table"])
    random.shuffle(parts["tile_table"])
    for back in (Plan.from_json(plan.to_json()), Plan.from_json(json.dumps(parts))):
        assert back == plan
        assert (hash(back), back.digest, repr(back)) == (hash(plan), plan.digest, repr(plan))
        assert (back.shards, back.tiles, back.lengths, back.causal) == (
            plan.shards,
            plan.tiles,
            plan.lengths,
            plan.causal,
        )


def test_plans_that_differ_in_anything_are_not_equal() -> None:
    tiles = two_ranks().tiles
    plans = [
        two_ranks(),
        two_ranks(causal=False),
        two_ranks(kv_heads=4),
        two_ranks(shards=[[Shard(0, 0, 2)], [Shard(0, 2, 6), Shard(1, 0, 2)]]),
        two_ranks(shards=[[Shard(0, 0, 3)], [Shard(0, 3, 5), Shard(0, 5, 6), Shard(1, 0, 2)]]),
        two_ranks(tiles=[tiles[1], tiles[0]]),
        two_ranks(shards=[*two_ranks().shards, ()], tiles=[*tiles, ()]),
    ]
    assert len({plan.digest for plan in plans}) == len(set(plans)) == len(plans)
    assert two_ranks() in plans
    assert two_ranks() != "a plan"


def test_numpy_sizes_give_the_same_plan_as_pythons() -> None:
    plan = two_ranks()
    other = Plan(
        tuple(np.array([6, 2], dtype=np.int32)),
        np.int64(2),  # type: ignore[arg-type]
        np.int64(4),  # type: ignore[arg-type]
        np.int64(2),  # type: ignore[arg-type]
        np.bool_(True),  # type: ignore[arg-type]
        plan.shard_table.astype(np.int32),
        plan.tile_table.astype(np.int32),
    )
    assert other == plan
    assert Plan.from_json(other.to_json()) == plan


def test_the_digest_is_the_same_in_another_process() -> None:
    plan = two_ranks()
    code = "import sys; from basp.plans import Plan; print(Plan.from_json(sys.stdin.read()).digest)"
    env = {"PYTHONHASHSEED": "7"}
    out = subprocess.run([sys.executable, "-c", code], input=plan.to_json(), capture_output=True, text=True, env=env)
    assert out.stdout.strip() == plan.digest, out.stderr


def test_a_plan_cannot_be_changed() -> None:
    plan = two_ranks()
    with pytest.raises(AttributeError):
        plan.ranks = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        plan.tile_table[0, 0] = 1


def test_a_plans_tables_are_its_own() -> None:
    plan = two_ranks()
    shard_table, tile_table = plan.shard_table.copy(), plan.tile_table.copy()
    copy = Plan(plan.lengths, 2, 4, 2, True, shard_table, tile_table)
    shard_table[:], tile_table[:] = 0, 0
    assert copy == plan


BAD_TEXTS = {
    "no JSON": "basp",
    "a list": "[]",
    "a number": "5",
    "nothing in it": "{}",
    "an unknown part": two_ranks().to_json().replace('"causal"', '"casual"'),
    "a missing table": json.dumps({"lengths": [4], "ranks": 1, "heads": 1, "kv_heads": 1, "causal": True}),
    "rows of unequal width": two_ranks().to_json().replace("[0, 0, 0, 3]", "[0, 0, 3]"),
    "words in a table": two_ranks().to_json().replace("[0, 0, 0, 3]", '[0, 0, 0, "three"]'),
    "a number beyond int64": two_ranks().to_json().replace("[0, 0, 0, 3]", f"[0, 0, 0, {2**70}]"),
    "half a token": two_ranks().to_json().replace("[0, 0, 0, 3]", "[0, 0, 0, 3.5]"),
    "ranks that are no number": two_ranks().to_json().replace('"ranks": 2', '"ranks": null'),
}


@pytest.mark.parametrize("text", BAD_TEXTS.values(), ids=list(BAD_TEXTS))
def test_text_that_holds_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)


def test_a_broken_plan_in_json_keeps_its_own_message() -> None:
    text = two_ranks().to_json().replace("[0, 0, 0, 3]", "[0, 0, 0, 2]")
    with pytest.raises(PlanError, match="shards of sequence 0 leave a gap"):
        Plan.from_json(text)
