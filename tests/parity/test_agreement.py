"""Ranks that were given different batches all raise, within seconds, and say who has what."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from basp import SequenceParallel
from basp.agreement import digest_batches
from basp.attention import attend
from basp.errors import BatchError, DisagreementError
from basp.plans import Plan
from basp.strategies import basp as basp_strategy
from tests.parity.test_attend import first_owns_last_computes
from tests.support.ranks import run_ranks

SECONDS = 10
BATCH = [[[1, 2, 3, 4], [5, 6, 7]], [[8, 9]]]
LABELS = [[[1, 2, 3, 4], [5, 6, 7]], [[8, 9]]]


def _changed(value: list[Any], path: tuple[int, ...], new: Any) -> list[Any]:
    if not path:
        return new
    return [*value[: path[0]], _changed(value[path[0]], path[1:], new), *value[path[0] + 1 :]]


# What the odd ranks are given: micro-batches, labels, and what the message must name.
OTHERS: dict[str, tuple[list[Any], list[Any], str]] = {
    "token ids": (_changed(BATCH, (0, 1, 2), 99), LABELS, "token ids"),
    "labels": (BATCH, _changed(LABELS, (0, 1, 2), -100), "labels"),
    "a longer sequence": ([BATCH[0], [[8, 9, 10]]], [LABELS[0], [[8, 9, 10]]], "sequence lengths"),
    "a moved border": ([[[1, 2, 3], [4, 5, 6, 7]], BATCH[1]], [[[1, 2, 3], [4, 5, 6, 7]], LABELS[1]], "lengths"),
    "one sequence less": ([BATCH[0][:1], BATCH[1]], [LABELS[0][:1], LABELS[1]], "number of sequences"),
    "one micro-batch less": (BATCH[:1], LABELS[:1], "number of micro-batches"),
    "sequences in another order": ([BATCH[0][::-1], BATCH[1]], [LABELS[0][::-1], LABELS[1]], "sequence lengths"),
    "a sequence in the other micro-batch": (
        [BATCH[0][:1], [BATCH[0][1], *BATCH[1]]],
        [LABELS[0][:1], [LABELS[0][1], *LABELS[1]]],
        "sequence lengths",
    ),
    "its own shard only": ([[[1, 2], [5, 6, 7]], BATCH[1]], [[[1, 2], [5, 6, 7]], LABELS[1]], "sequence lengths"),
}

Outcome = tuple[str, str, float]


def attempt(sp: SequenceParallel, batches: Any, labels: Any = None) -> Outcome:
    """(kind of error, its message, seconds) of ``shard_steps``."""
    started = time.monotonic()
    try:
        sp.shard_steps(batches, labels)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


def give_others(rank: int, world: int, odd: Sequence[int]) -> list[Outcome]:
    sp = SequenceParallel(dist.group.WORLD)
    given = [(other, labels) if rank in odd else (BATCH, LABELS) for other, labels, _ in OTHERS.values()]
    outcomes = [attempt(sp, *batch) for batch in given]
    assert attempt(sp, BATCH, LABELS)[0] == "nothing"  # a refusal leaves the group usable
    return outcomes


def assert_everywhere(outcomes: Sequence[Outcome], *words: str) -> None:
    for rank, (kind, message, seconds) in enumerate(outcomes):
        assert kind == DisagreementError.__name__, f"rank {rank}: {kind} {message}"
        assert seconds < SECONDS
        for word in words:
            assert word in message


@pytest.mark.parametrize(("world", "odd"), [(3, 1), (3, 0), (4, 3)])
def test_kf28_kf11_every_rank_names_the_odd_one_and_what_differs(world: int, odd: int) -> None:
    for (what, (_, _, word)), outcomes in zip(
        OTHERS.items(), zip(*run_ranks(world, give_others, [odd]), strict=True), strict=True
    ):
        assert_everywhere(outcomes, f"rank {odd} has", word)
        assert len({message for _, message, _ in outcomes}) == 1, what


@pytest.mark.parametrize(("world", "odd", "sides"), [(2, [1], ("0", "1")), (4, [1, 3], ("0, 2", "1, 3"))])
def test_kf28_without_a_majority_no_rank_is_blamed(world: int, odd: list[int], sides: tuple[str, str]) -> None:
    for (_, _, word), outcomes in zip(
        OTHERS.values(), zip(*run_ranks(world, give_others, odd), strict=True), strict=True
    ):
        assert_everywhere(outcomes, word, *sides)
        for _, message, _ in outcomes:
            assert "than the rest" not in message


WHOLE = [list(range(12)), list(range(12, 24)), list(range(24, 36))]


def give_what_is_cut_already(rank: int, world: int) -> list[Outcome]:
    """Slices of equally many tokens, as a loader that knows of sequence parallelism gives them, and ``shard``'s own."""
    sp = SequenceParallel(dist.group.WORLD)
    slices = [sequence[4 * rank : 4 * rank + 4] for sequence in WHOLE]
    step = sp.shard(WHOLE)
    cut = [slices, {"input_ids": slices}, step.input_ids, {"input_ids": step.input_ids}]
    return [attempt(sp, [batch]) for batch in cut]


def test_kf11_a_batch_that_is_cut_already_is_refused_everywhere() -> None:
    for outcomes in zip(*run_ranks(3, give_what_is_cut_already), strict=True):
        assert_everywhere(outcomes, "token ids")


def give_each_its_own(rank: int, world: int) -> list[Outcome]:
    """What a sampler that shares a data set out over all ranks gives: another document to each, or other numbers."""
    sp = SequenceParallel(dist.group.WORLD)
    outcomes = [attempt(sp, [batch]) for batch in ([WHOLE[rank]], WHOLE[rank:])]
    assert attempt(sp, [WHOLE])[0] == "nothing"
    return outcomes


def test_kf33_ranks_that_are_each_given_their_own_documents_raise_everywhere() -> None:
    own, fewer = zip(*run_ranks(3, give_each_its_own), strict=True)
    assert_everywhere(own, "token ids")
    assert_everywhere(fewer, "number of sequences")


def give_all_the_same(rank: int, world: int) -> tuple[list[int], int]:
    step = SequenceParallel(dist.group.WORLD).shard(WHOLE)
    return step.input_ids[0].tolist(), step.valid_tokens


def test_kf33_what_all_ranks_are_given_is_trained_on_once() -> None:
    ids, valid = zip(*run_ranks(3, give_all_the_same), strict=True)
    assert [*chain(*ids)] == [*chain(*WHOLE)]
    assert set(valid) == {33}


# -- strategies and plans --------------------------------------------------------------------------------------------


def other_strategy(rank: int, world: int) -> Outcome:
    return attempt(SequenceParallel(dist.group.WORLD, strategy="ulysses" if rank == 2 else "basp"), BATCH)


def test_kf28_another_strategy() -> None:
    assert_everywhere(run_ranks(3, other_strategy), "rank 2 has", "strategy")


class Fickle:
    """A strategy of one name whose plan differs by rank."""

    def __init__(self, odd: bool) -> None:
        self.odd = odd

    def __call__(self, lengths: Sequence[int], **sizes: Any) -> Plan:
        return (first_owns_last_computes if self.odd else basp_strategy)(lengths, **sizes)


class FickleTiles(Fickle):
    """Differs only where heads can be shared: by its tiles, and not for the layout's single head."""

    def __call__(self, lengths: Sequence[int], **sizes: Any) -> Plan:
        plan = basp_strategy(lengths, **sizes)
        if not self.odd or sizes["heads"] == 1:
            return plan
        turned = [plan.tiles[(rank + 1) % plan.ranks] for rank in range(plan.ranks)]
        return Plan.of(
            lengths, heads=plan.heads, kv_heads=plan.kv_heads, shards=plan.shards, tiles=turned, causal=plan.causal
        )


def other_plan(rank: int, world: int, strategy: type[Fickle]) -> Outcome:
    sp = SequenceParallel(dist.group.WORLD, strategy=strategy(rank == 1))
    started = time.monotonic()
    try:
        step = sp.shard([list(range(12))])
        tokens = step.input_ids.shape[1]
        q, k, v = (torch.ones(tokens, 6, 4) for _ in range(3))
        attend(q, k, v, step.context)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


@pytest.mark.parametrize("strategy", [Fickle, FickleTiles])
def test_kf28_plans_that_differ_under_one_name(strategy: type[Fickle]) -> None:
    assert_everywhere(run_ranks(3, other_plan, strategy, timeout=20), "rank 1 has", "plan")


class Failing(Fickle):
    """Raises on the odd rank, already for the layout."""

    def __call__(self, lengths: Sequence[int], **sizes: Any) -> Plan:
        if self.odd:
            raise ValueError("no such layout")
        return basp_strategy(lengths, **sizes)


def test_kf28_a_strategy_that_fails_on_one_rank() -> None:
    outcomes = run_ranks(3, other_plan, Failing, timeout=20)
    assert outcomes[1][:2] == ("ValueError", "no such layout")
    assert_everywhere([outcomes[0], outcomes[2]], "rank 1 refused")


# -- a rank that refuses its own input -------------------------------------------------------------------------------

BAD: dict[str, Any] = {
    "an empty sequence": [[[1, 2, 3, 4], []], [[8, 9]]],
    "no micro-batch": [],
    "an empty micro-batch": [[[1, 2]], []],
    "ids below 0": [[[1, -2]], [[8, 9]]],
    "a ragged list": [[[1, [2, 3]]], [[8, 9]]],
    "a number for a batch": [7, [[8, 9]]],
    "None for a batch": [None, [[8, 9]]],
    "None": None,
    "words": [[["a", "b"]], [[8, 9]]],
    "too big for int64": [[[2**70]], [[8, 9]]],
}


def give_bad(rank: int, world: int) -> list[Outcome]:
    sp = SequenceParallel(dist.group.WORLD)
    outcomes = [attempt(sp, bad if rank == 1 else BATCH) for bad in BAD.values()]
    assert attempt(sp, BATCH)[0] == "nothing"
    return outcomes


def test_kf28_a_rank_that_refuses_its_own_input_tells_the_others() -> None:
    results = run_ranks(3, give_bad, timeout=20)
    for what, outcomes in zip(BAD, zip(*results, strict=True), strict=True):
        assert outcomes[1][0] == BatchError.__name__, what
        assert_everywhere([outcomes[0], outcomes[2]], "rank 1 refused")


def give_bad_alone(rank: int, world: int) -> list[str]:
    sp = SequenceParallel(dist.group.WORLD, check_agreement=False)
    return [attempt(sp, bad)[0] for bad in BAD.values()]


def test_bad_input_is_refused_without_a_comparison_too() -> None:
    for kinds in run_ranks(2, give_bad_alone):
        assert set(kinds) == {BatchError.__name__}


# -- what is compared ------------------------------------------------------------------------------------------------


def not_compared(rank: int, world: int) -> int:
    calls = 0

    def counting(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1

    dist.all_gather = dist.all_reduce = dist.all_gather_object = counting
    sp = SequenceParallel(dist.group.WORLD, check_agreement=False)
    sp.shard_steps([[[rank + 1] * 4]])
    return calls


def test_check_agreement_off_compares_nothing() -> None:
    assert run_ranks(2, not_compared) == [0, 0]


def _digest(*batches: list[list[int]]) -> dict[str, int]:
    arrays = [[np.asarray(sequence, dtype=np.int64) for sequence in batch] for batch in batches]
    return dict(digest_batches(arrays, arrays, strategy="basp", average_ranks=2))


def test_the_digest_sees_borders() -> None:
    together = [_digest([[1, 2], [3]]), _digest([[1], [2, 3]]), _digest([[1, 2, 3]]), _digest([[1, 2]], [[3]])]
    assert len({tuple(digest.values()) for digest in together}) == len(together)
    assert _digest([[1, 2], [3]]) == _digest([[1, 2], [3]])
    for digest in together:
        assert len(digest) == 7


def test_types_of_one_and_the_same_batch_agree() -> None:
    sp = SequenceParallel()
    forms = [[1, 2, 3], np.array([1, 2, 3], dtype=np.int32), torch.tensor([1, 2, 3]), (1, 2, 3)]
    steps = [sp.shard([form]) for form in forms]
    assert {(tuple(step.input_ids[0].tolist()), step.input_ids.dtype) for step in steps} == {((1, 2, 3), torch.int64)}
