"""``attend`` on N ranks against the one-process oracle: output, gradients, bytes and calls, on every rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from basp import collectives
from basp.attention import AttentionSpec, Context, attend, find_kernel
from basp.collectives import ByteCounter
from basp.plans import Plan, Shard, Tile
from basp.strategies import find_strategy
from tests.support import oracle
from tests.support.ranks import run_ranks

LAYOUTS = ("token first", "transformers", "fused")


@dataclass(frozen=True)
class Case:
    """One call of ``attend`` on every rank."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 4
    value_dim: int = 4
    strategy: str | Callable[..., Plan] = "basp"
    kernel: str = "sdpa"
    causal: bool = True
    dtype: torch.dtype = torch.float64
    layout: str = "transformers"

    def __str__(self) -> str:
        name = self.strategy if isinstance(self.strategy, str) else self.strategy.__name__
        return (
            f"{name}/{self.kernel} lengths {self.lengths} heads {self.heads}/{self.kv_heads} dims {self.head_dim}/"
            f"{self.value_dim} {'causal' if self.causal else 'non-causal'} {self.dtype} {self.layout}"
        )

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.head_dim**-0.5, self.causal)

    def context(self, group: dist.ProcessGroup | None) -> Context:
        ranks = 1 if group is None else dist.get_world_size(group)
        return Context(
            self.lengths,
            strategy=find_strategy(self.strategy) if isinstance(self.strategy, str) else self.strategy,
            group=group,
            kernel=find_kernel(self.kernel),
            counter=ByteCounter(ranks),
        )


# -- hand-made plans -------------------------------------------------------------------------------------------------


def query_split(lengths, *, ranks, heads, kv_heads, causal=True) -> Plan:
    """Shards in order; each rank computes all heads of a slice of the queries, and not of those that it owns."""
    shards: list[list[Shard]] = [[] for _ in range(ranks)]
    tiles: list[list[Tile]] = [[] for _ in range(ranks)]
    for sequence, length in enumerate(lengths):
        for rank in range(ranks):
            start, stop = rank * length // ranks, (rank + 1) * length // ranks
            if start < stop:
                shards[rank].append(Shard(sequence, start, stop))
                tiles[(rank + 1) % ranks].append(Tile(sequence, 0, heads, start, stop))
    return Plan.of(lengths, heads=heads, kv_heads=kv_heads, shards=shards, tiles=tiles, causal=causal)


def zig_zag(lengths, *, ranks, heads, kv_heads, causal=True) -> Plan:
    """2N chunks of each sequence; rank r owns chunks r and 2N - 1 - r and computes a share of the heads."""
    shards: list[list[Shard]] = [[] for _ in range(ranks)]
    tiles: list[list[Tile]] = [[] for _ in range(ranks)]
    for sequence, length in enumerate(lengths):
        for chunk in range(2 * ranks):
            start, stop = chunk * length // (2 * ranks), (chunk + 1) * length // (2 * ranks)
            if start < stop:
                shards[min(chunk, 2 * ranks - 1 - chunk)].append(Shard(sequence, start, stop))
        for rank in range(ranks):
            first, last = rank * heads // ranks, (rank + 1) * heads // ranks
            if first < last:
                tiles[rank].append(Tile(sequence, first, last, 0, length))
    return Plan.of(lengths, heads=heads, kv_heads=kv_heads, shards=shards, tiles=tiles, causal=causal)


def first_owns_last_computes(lengths, *, ranks, heads, kv_heads, causal=True) -> Plan:
    """Rank 0 has tokens and no tile, the last rank has tiles and no token, those between have nothing."""
    everything = [Shard(sequence, 0, length) for sequence, length in enumerate(lengths)]
    work = [Tile(sequence, 0, heads, 0, length) for sequence, length in enumerate(lengths)]
    nothing: list[list[Any]] = [[]] * (ranks - 1)
    return Plan.of(
        lengths, heads=heads, kv_heads=kv_heads, shards=[everything, *nothing], tiles=[*nothing, work], causal=causal
    )


def split_at_home(lengths, *, ranks, heads, kv_heads, causal=True) -> Plan:
    """Sequence s whole on rank s mod N, but described by two shards and one tile for each head and half."""
    shards: list[list[Shard]] = [[] for _ in range(ranks)]
    tiles: list[list[Tile]] = [[] for _ in range(ranks)]
    for sequence, length in enumerate(lengths):
        borders = sorted({0, length // 2, length})
        for start, stop in itertools.pairwise(borders):
            shards[sequence % ranks].append(Shard(sequence, start, stop))
            tiles[sequence % ranks] += [Tile(sequence, head, head + 1, start, stop) for head in range(heads)]
    return Plan.of(lengths, heads=heads, kv_heads=kv_heads, shards=shards, tiles=tiles, causal=causal)


def scrambled(lengths, *, ranks, heads, kv_heads, causal=True) -> Plan:
    """Any valid plan: tokens and (head, query) rectangles cut and dealt at random, the tokens by the lengths only."""
    by_lengths, by_all = random.Random(str((*lengths, ranks))), random.Random(str((*lengths, ranks, heads, kv_heads)))
    shards: list[list[Shard]] = [[] for _ in range(ranks)]
    tiles: list[list[Tile]] = [[] for _ in range(ranks)]
    for sequence, length in enumerate(lengths):
        for start, stop in _pieces(length, by_lengths):
            by_lengths.choice(shards).append(Shard(sequence, start, stop))
        for first, last in _pieces(heads, by_all):
            for start, stop in _pieces(length, by_all):
                by_all.choice(tiles).append(Tile(sequence, first, last, start, stop))
    return Plan.of(lengths, heads=heads, kv_heads=kv_heads, shards=shards, tiles=tiles, causal=causal)


def _pieces(size: int, chance: random.Random) -> list[tuple[int, int]]:
    cuts = sorted({0, size, *(chance.randrange(size + 1) for _ in range(chance.randrange(4)))})
    return list(itertools.pairwise(cuts))


# -- running a case on one rank --------------------------------------------------------------------------------------


def tensors(case: Case) -> list[list[Tensor]]:
    """For each sequence q, k, v and the weights of its output in the loss: the same on every rank."""
    generator = torch.Generator().manual_seed(len(str(case)))
    shapes = [
        (case.heads, case.head_dim),
        (case.kv_heads, case.head_dim),
        (case.kv_heads, case.value_dim),
        (case.heads, case.value_dim),
    ]
    return [
        [
            torch.randn(length, *shape, generator=generator, dtype=torch.float64).to(case.dtype).double()
            for shape in shapes
        ]
        for length in case.lengths
    ]


def oracle_rows(case: Case, given: list[list[Tensor]]) -> list[list[Tensor]]:
    """For each sequence, in float64: output and the gradients of q, k and v."""
    rows: list[list[Tensor]] = []
    for *qkv, weights in given:
        q, k, v = (x.clone().requires_grad_() for x in qkv)
        out = oracle.attention(q, k, v, case.causal, case.head_dim**-0.5)
        out.backward(weights)
        rows.append([out.detach(), *(x.grad for x in (q, k, v))])  # type: ignore[list-item]
    return rows


def local(pieces: list[Tensor], shards: tuple[Shard, ...]) -> Tensor:
    """This rank's rows, in the order of its shards."""
    return torch.cat([pieces[sequence][start:stop] for sequence, start, stop in shards])


def lay_out(layout: str, parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Token-first q, k, v as leaves of one memory layout: (what attend is given, the leaves' gradient readers)."""
    if layout == "token first":
        given = [x.contiguous().requires_grad_() for x in parts]
        return given, given
    if layout == "transformers":  # [1, H, T, D], transposed
        leaves = [x.transpose(0, 1)[None].contiguous().requires_grad_() for x in parts]
        return [x[0].transpose(0, 1) for x in leaves], leaves
    sizes = [x.shape[1] * x.shape[2] for x in parts]  # one fused projection [T, all], split
    leaf = torch.cat([x.flatten(1) for x in parts], dim=1).requires_grad_()
    views = [x.unflatten(1, part.shape[1:]) for x, part in zip(leaf.split(sizes, 1), parts, strict=True)]
    return views, [leaf]


def token_first(layout: str, leaves: list[Tensor], parts: list[Tensor]) -> list[Tensor | None]:
    """Gradients of q, k, v, [T, heads, dim] each."""
    grads = [leaf.grad for leaf in leaves]
    if layout == "token first" or any(grad is None for grad in grads):
        return grads if len(grads) == 3 else grads * 3
    if layout == "transformers":
        return [grad[0].transpose(0, 1) for grad in grads if grad is not None]
    assert grads[0] is not None
    sizes = [x.shape[1] * x.shape[2] for x in parts]
    return [x.unflatten(1, part.shape[1:]) for x, part in zip(grads[0].split(sizes, 1), parts, strict=True)]


@contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """Counts exchanges on this rank."""
    real, calls = collectives.exchange_in_pairs, [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return real(*args, **kwargs)

    collectives.exchange_in_pairs = counting
    try:
        yield calls
    finally:
        collectives.exchange_in_pairs = real


def is_local(plan: Plan) -> bool:
    """Whether every sequence has all its tokens and all its attention on one rank."""
    seen: dict[int, set[int]] = {}
    for parts in (plan.shards, plan.tiles):
        for rank, entries in enumerate(parts):
            for entry in entries:
                seen.setdefault(entry.sequence, set()).add(rank)
    return all(len(ranks) == 1 for ranks in seen.values())


def run_case(case: Case, group: dist.ProcessGroup | None) -> list[str]:
    """What is wrong on this rank. Every rank runs the collectives to the end, whatever is wrong."""
    context, given = case.context(group), tensors(case)
    shards = context.layout.shards[context.rank]
    dummy = [[x[:1] for x in given[0]]] if not shards else []
    parts = [local([row[i] for row in given], shards) if shards else dummy[0][i] for i in range(4)]
    parts = [x.to(case.dtype) for x in parts]
    qkv, leaves = lay_out(case.layout, parts[:3])
    with counted_collectives() as calls:
        out = attend(*qkv, context, spec=case.spec)
        forward_calls = calls[0]
        out.backward(parts[3])
    grads = token_first(case.layout, leaves, parts[:3])
    faults = [] if out.is_contiguous() else [f"an output of strides {out.stride()}"]
    faults += _compare(case, [out.detach(), *grads], shards, given)
    plan = context.plan(case.heads, case.kv_heads, causal=case.causal)
    return faults + _accounts(case, context, plan, (forward_calls, calls[0] - forward_calls))


def _compare(case: Case, got: list[Tensor | None], shards: tuple[Shard, ...], given: list[list[Tensor]]) -> list[str]:
    faults: list[str] = []
    want = oracle_rows(case, given)
    for index, name in enumerate(("output", "q's gradient", "k's gradient", "v's gradient")):
        mine = got[index]
        if mine is None:
            faults.append(f"{name} is None")
        elif not shards:
            if len(mine) != 1 or not bool(torch.isfinite(mine).all()):
                faults.append(f"{name} of the dummy token: {mine}")
        else:
            try:
                # relative to the whole tensor, of which a rank may hold a few small rows
                scale = max(float(row[index].abs().max()) for row in want) or 1.0
                expected = local([row[index] for row in want], shards).to(case.dtype)
                assert mine.shape == expected.shape, f"shape {tuple(mine.shape)} for {tuple(expected.shape)}"
                assert mine.dtype == expected.dtype, f"{mine.dtype}"
                error = float((mine - expected).abs().max()) / scale
                assert error <= oracle.TOLERANCE[case.dtype], f"error {error:.3g}"
            except AssertionError as fault:
                faults.append(f"{name}: {fault}")
    return faults


def _accounts(case: Case, context: Context, plan: Plan, calls: tuple[int, int]) -> list[str]:
    traffic = plan.traffic(case.head_dim, case.dtype.itemsize, case.value_dim)
    faults: list[str] = []
    for name, count, expected in (
        ("forward", context.counter.forward, traffic[context.rank]),
        ("backward", context.counter.backward, traffic[:, context.rank]),
    ):
        if not np.array_equal(count, expected):
            faults.append(f"{name} sent {count.tolist()} bytes, the plan says {expected.tolist()}")
    expected_calls = (0, 0) if is_local(plan) else (2, 2)
    if calls != expected_calls:
        faults.append(f"{calls} collectives forward and backward, expected {expected_calls}")
    return faults


def run_cases(rank: int, world: int, cases: list[Case]) -> list[str]:
    """On one rank: the faults of all cases, each named by its case."""
    faults: list[str] = []
    for number, case in enumerate(cases):
        try:
            faults += [f"rank {rank} of {world}, case {number}: {case}: {x}" for x in run_case(case, dist.group.WORLD)]
        except Exception as error:
            raise AssertionError(f"rank {rank} of {world}, case {number}: {case}") from error
    return faults


def run_cases_as_on_gpus(rank: int, world: int, cases: list[Case]) -> list[str]:
    """``run_cases``, with one collective for each exchange in the place of messages."""
    collectives.exchange_in_pairs = dist.all_to_all_single
    return run_cases(rank, world, cases)


def check(world: int, cases: list[Case], timeout: float = 60.0, run: Callable[..., list[str]] = run_cases) -> None:
    faults = [fault for rank in run_ranks(world, run, cases, timeout=timeout) for fault in rank]
    assert not faults, f"{len(faults)} faults, first of them:\n" + "\n".join(faults[:12])


# -- batches ---------------------------------------------------------------------------------------------------------


def grid(world: int, batch: int) -> list[Case]:
    """Equal and unequal lengths, all head groupings, both strategies and kernels, the three memory layouts."""
    equal = (8,) * batch
    unequal = tuple((13, 5, 1, 9, 7, 1, 3, 11)[:batch])
    heads = [(4, 4), (4, 2), (4, 1), (7, 7), (6, 3)]
    cases = [
        Case(lengths, heads=h, kv_heads=k, strategy=strategy)
        for lengths in (equal, unequal)
        for h, k in heads
        for strategy in ("basp", "ulysses")
    ]
    cases = [
        replace(case, kernel=("sdpa", "eager")[i // 2 % 2], layout=LAYOUTS[i % 3], causal=i % 7 != 6)
        for i, case in enumerate(cases)
    ]
    return cases + [replace(cases[i], kernel=("eager", "sdpa")[i // 2 % 2], value_dim=6) for i in (0, 3, 12, 15)]


@pytest.mark.parametrize(
    "shape", [(1, 1), (2, 1), (2, 2), (3, 2), (4, 1), (4, 2), (4, 3), (4, 4), (4, 8)], ids=lambda s: f"N{s[0]}-B{s[1]}"
)
def test_kf25_every_batch_size_is_exact(shape: tuple[int, int]) -> None:
    check(shape[0], grid(*shape))


def test_kf20_kf21_any_length_on_any_number_of_ranks() -> None:
    cases = [
        Case(lengths, heads=4, kv_heads=2, strategy=strategy)
        for lengths in [(1,), (2,), (3,), (17,), (1, 1), (1, 1, 1, 1, 1), (1, 30), (30, 1), (1533 % 64, 2)]
        for strategy in ("basp", "ulysses", query_split, zig_zag, first_owns_last_computes)
    ]
    check(4, cases)


def test_kf22_kf23_any_heads_on_any_number_of_ranks() -> None:
    for world, heads in ((4, [(7, 7), (7, 1), (6, 3), (1, 1), (3, 3), (5, 1), (12, 4)]), (3, [(20, 20), (20, 4)])):
        cases = [
            Case(lengths, heads=h, kv_heads=k, strategy=strategy, kernel=kernel)
            for h, k in heads
            for lengths in ((9,), (10, 6))
            for strategy, kernel in (("basp", "sdpa"), ("ulysses", "eager"), (zig_zag, "sdpa"))
        ]
        check(world, cases)


def test_more_ranks_than_tokens_and_other_value_dims() -> None:
    cases = [
        Case(lengths, heads=h, kv_heads=k, value_dim=value_dim, strategy=strategy, layout=layout)
        for lengths in ((1,), (2,), (1, 1), (2, 1))
        for h, k, value_dim in ((4, 4, 4), (4, 2, 6), (2, 1, 3), (3, 3, 1))
        for strategy, layout in (("basp", "transformers"), ("ulysses", "fused"), (query_split, "token first"))
    ]
    check(4, cases)


@pytest.mark.parametrize("strategy", [query_split, zig_zag, first_owns_last_computes, split_at_home])
def test_hand_made_plans(strategy: Callable[..., Plan]) -> None:
    cases = [
        Case(lengths, heads=h, kv_heads=k, value_dim=v, strategy=strategy, kernel=kernel, causal=causal, layout=layout)
        for lengths in ((12,), (11, 5), (1, 8, 3))
        for h, k, v in ((4, 2, 4), (6, 3, 2), (7, 1, 4))
        for kernel, layout in (("sdpa", "transformers"), ("eager", "fused"))
        for causal in (True, False)
    ]
    check(3, cases)


@pytest.mark.parametrize("run", [run_cases, run_cases_as_on_gpus])
@pytest.mark.parametrize("world", [3, 4])
def test_random_sweep(world: int, run: Callable[..., list[str]]) -> None:
    chance = random.Random(20240 + world)
    cases: list[Case] = []
    for _ in range(90):
        kv_heads = chance.randint(1, 4)
        cases.append(
            Case(
                lengths=tuple(chance.choice((1, 2, chance.randint(3, 24))) for _ in range(chance.randint(1, 6))),
                heads=kv_heads * chance.randint(1, 4),
                kv_heads=kv_heads,
                head_dim=chance.choice((2, 4, 6)),
                value_dim=chance.choice((2, 3, 4, 6)),
                strategy=chance.choice(("basp", "ulysses", zig_zag, query_split, scrambled, scrambled, scrambled)),
                kernel=chance.choice(("sdpa", "eager")),
                causal=chance.random() < 0.8,
                layout=chance.choice(LAYOUTS),
            )
        )
    check(world, cases, run=run)


def test_float32() -> None:
    cases = [
        Case((48, 17), heads=h, kv_heads=k, head_dim=8, value_dim=8, strategy=s, kernel=kernel, dtype=torch.float32)
        for h, k in ((4, 4), (8, 2), (8, 1))
        for s, kernel in (("basp", "sdpa"), ("ulysses", "eager"), (query_split, "sdpa"))
    ]
    check(4, cases)


# -- what is not done ------------------------------------------------------------------------------------------------


def count_calls(rank: int, world: int, case: Case) -> tuple[list[dict[str, Any]], int, list[str]]:
    """Kernel calls of one ``attend`` on this rank, collectives, and which of dispatch's received gathers exist."""
    context = case.context(dist.group.WORLD if world > 1 else None)
    shards = context.layout.shards[rank]
    q, k, v = (local([row[i] for row in tensors(case)], shards).to(case.dtype).contiguous() for i in range(3))
    seen: list[dict[str, Any]] = []

    def spy(q_: Tensor, k_: Tensor, v_: Tensor, spec: AttentionSpec) -> Tensor:
        qkv = (q_, k_, v_)
        views = [
            x.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
            for x, given in zip(qkv, (q, k, v), strict=True)
        ]
        seen.append({"q": tuple(qkv[0].shape), "k": tuple(qkv[1].shape), "views": views})
        return context.kernel(*qkv, spec)

    with counted_collectives() as calls:
        attend(q, k, v, context, kernel=spy)
    (compiled,) = context._compiled.values()
    route = compiled.exchange.dispatch
    gathers = [] if route is None or route.recv.index is None else ["recv"]
    assert calls[0] == (0 if route is None else 2)
    return seen, context.counter.total, gathers


@pytest.mark.parametrize(("world", "batch"), [(1, 1), (1, 3), (2, 2), (4, 4), (4, 8)])
def test_whole_sequences_stay_where_they_are(world: int, batch: int) -> None:
    case = Case((8,) * batch, heads=4, kv_heads=2)
    for seen, sent, _ in run_ranks(world, count_calls, case):
        assert sent == 0
        assert seen == [{"q": (batch // world, 4, 8, 4), "k": (batch // world, 2, 8, 4), "views": [True] * 3}]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_equal_lengths_under_ulysses_are_one_kernel_call_and_no_second_gather(batch: int) -> None:
    for seen, _, gathers in run_ranks(4, count_calls, Case((8,) * batch, heads=4, strategy="ulysses")):
        assert [call["q"] for call in seen] == [(batch, 1, 8, 4)]
        assert gathers == []


def test_paper_basp_is_one_kernel_call_and_no_second_gather() -> None:
    for seen, _, gathers in run_ranks(4, count_calls, Case((8, 8), heads=4, kv_heads=2)):
        assert [(call["q"], call["k"]) for call in seen] == [((1, 2, 8, 4), (1, 1, 8, 4))]
        assert gathers == []


# -- low precision ---------------------------------------------------------------------------------------------------


def errors_in_bf16(rank: int, world: int, cases: list[Case]) -> list[list[tuple[float, float]]]:
    """For each case, for output and gradients: largest and summed squared error against the float64 oracle."""
    return [_errors(case, rank, dist.group.WORLD if world > 1 else None) for case in cases]


def _errors(case: Case, rank: int, group: dist.ProcessGroup | None) -> list[tuple[float, float]]:
    context, given = case.context(group), tensors(case)
    shards = context.layout.shards[rank]
    parts = [local([row[i] for row in given], shards).to(case.dtype) for i in range(4)]
    qkv, leaves = lay_out(case.layout, parts[:3])
    out = attend(*qkv, context, spec=case.spec)
    out.backward(parts[3])
    want = oracle_rows(case, given)
    errors: list[tuple[float, float]] = []
    for index, mine in enumerate([out.detach(), *token_first(case.layout, leaves, parts[:3])]):
        assert mine is not None
        assert mine.dtype == torch.bfloat16
        off = mine.double() - local([row[index] for row in want], shards)
        errors.append((float(off.abs().max()), float(off.square().sum())))
    return errors


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (7, 1), (8, 2)])
def test_kf30_bf16_error_does_not_grow_with_the_degree(heads: int, kv_heads: int, kernel: str) -> None:
    """Gradients of a kv head that 4 ranks read are summed over ranks.

    The norm of the error is what grows with the degree; the largest entry is one draw from a tail, so it is compared
    over several batches together.
    """
    cases = [
        Case(
            (96 + i, 64),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=16,
            value_dim=16,
            strategy="ulysses",
            kernel=kernel,
            dtype=torch.bfloat16,
        )
        for i in range(4)
    ]
    (alone,) = run_ranks(1, errors_in_bf16, cases)
    together = run_ranks(4, errors_in_bf16, cases)
    for index, name in enumerate(("output", "q's gradient", "k's gradient", "v's gradient")):
        for case in range(len(cases)):
            squared = sum(rank[case][index][1] for rank in together)
            assert squared <= 1.25**2 * alone[case][index][1], name
        largest = max(errors[index][0] for rank in together for errors in rank)
        assert largest <= 2 * max(errors[index][0] for errors in alone), name
