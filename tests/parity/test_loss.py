"""One loss: shares of the mean over all valid tokens of a step, against one process."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from basp import SequenceParallel
from basp.attention import attend
from basp.losses import share_of_mean, sum_token_losses
from tests.parity.test_groups import Batch, assert_equals_one_process, batch_of, train_step
from tests.support import oracle
from tests.support.ranks import run_ranks

WORLDS = [1, 2, 3, 4]


def worked_example(rank: int, world: int) -> list[tuple[float, float]]:
    """(share, its gradient in this rank's sum) of both micro-batches of the example in ``basp.losses``."""
    results: list[tuple[float, float]] = []
    for sums in ((6.0, 2.0), (0.0, 9.0)):
        local_sum = torch.tensor(sums[rank], dtype=torch.float64, requires_grad=True)
        share = share_of_mean(local_sum, valid_tokens=10, groups=[dist.group.WORLD])
        share.backward()
        results.append((share.item(), local_sum.grad.item()))
    return results


def test_the_worked_example_of_the_docstring() -> None:
    for shares in run_ranks(2, worked_example):
        assert [share for share, _ in shares] == pytest.approx([0.8, 0.9], abs=1e-15)
        assert sum(share for share, _ in shares) == pytest.approx(1.7, abs=1e-15)
        assert [gradient for _, gradient in shares] == pytest.approx([2 / 10, 2 / 10], abs=1e-15)


def test_a_single_process_needs_no_group() -> None:
    local_sum = torch.tensor(17.0, requires_grad=True)
    share = share_of_mean(local_sum, valid_tokens=10, groups=[])
    share.backward()
    assert share.item() == pytest.approx(1.7)
    assert local_sum.grad.item() == pytest.approx(0.1)


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = torch.zeros(3000, 8, dtype=torch.bfloat16, requires_grad=True)
    total = sum_token_losses(logits, torch.zeros(3000, dtype=torch.int64))
    total.backward()
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(3000 * torch.tensor(8.0).log().item(), rel=1e-5)
    assert logits.grad.dtype == torch.bfloat16


# -- steps -----------------------------------------------------------------------------------------------------------

UNEQUAL = [batch_of((11, 3), 1), batch_of((1,), 2), batch_of((2, 7, 1, 4), 3), batch_of((24,), 4)]


def _masked(batches: list[Batch], keep: Any) -> list[Batch]:
    """Labels equal to the ids where ``keep(batch, sequence, position)``, -100 elsewhere."""
    return [
        [
            [token if keep(b, s, position) else -100 for position, token in enumerate(sequence)]
            for s, sequence in enumerate(batch)
        ]
        for b, batch in enumerate(batches)
    ]


STEPS: dict[str, tuple[list[Batch], list[Batch] | None]] = {
    "one micro-batch": ([batch_of((9, 4), 5)], None),
    "unequal micro-batches": (UNEQUAL, None),
    "sparse labels": (UNEQUAL, _masked(UNEQUAL, lambda b, s, p: (b + s + p) % 3 == 0)),
    "prompt ignored": ([batch_of((16,), 6)], _masked([batch_of((16,), 6)], lambda b, s, p: p >= 13)),
    "one label in all": (UNEQUAL, _masked(UNEQUAL, lambda b, s, p: (b, s, p) == (2, 1, 3))),
    "a micro-batch without labels": (UNEQUAL, _masked(UNEQUAL, lambda b, s, p: b != 3)),
    "labels of their own": ([batch_of((9, 4), 7)], [batch_of((9, 4), 8)]),
    "no valid label": (UNEQUAL, _masked(UNEQUAL, lambda b, s, p: False)),
    "only first labels, which nothing predicts": (UNEQUAL, _masked(UNEQUAL, lambda b, s, p: p == 0)),
    "one-token sequences": ([batch_of((1, 1, 1), 9)], None),
}


NOTHING_TO_LEARN = ("no valid label", "only first labels, which nothing predicts", "one-token sequences")


def run_steps(rank: int, world: int, strategy: str) -> None:
    sp = SequenceParallel(dist.group.WORLD, strategy=strategy)
    for name, (batches, labels) in STEPS.items():
        got = train_step(sp, batches, labels)
        assert_equals_one_process(got, batches, labels, what=f"rank {rank} of {world}, {name}:")
        if name in NOTHING_TO_LEARN:
            assert got["loss"].item() == 0.0
            assert not any(bool(grad.any()) for grad in got["grads"].values())


@pytest.mark.parametrize("strategy", ["basp", "ulysses"])
@pytest.mark.parametrize("world", WORLDS)
def test_kf01_kf03_kf06_every_step_has_the_loss_and_gradient_of_one_process(world: int, strategy: str) -> None:
    run_ranks(world, run_steps, strategy)


def test_the_oracle_is_transformers_own_definition() -> None:
    """Mean over tokens of cross entropy with labels shifted by one and -100 ignored: not a convention of ours."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (4, 1, 3)]
    labels = [torch.tensor([0, 1, -100, 4]), torch.tensor([2]), torch.tensor([-100, 3, 0])]
    pairs = [(row, label) for x, y in zip(logits, labels, strict=True) for row, label in zip(x, y[1:], strict=False)]
    losses = [row.logsumexp(0) - row[label] for row, label in pairs if label != -100]
    assert len(losses) == 4
    oracle.assert_close(oracle.token_mean(logits, labels), torch.stack(losses).mean(), "mean")


# -- counts and labels -----------------------------------------------------------------------------------------------


def describe_steps(rank: int, world: int) -> list[tuple[int, list[int], list[int], list[int]]]:
    sp = SequenceParallel(dist.group.WORLD if world > 1 else None)
    return [
        (step.valid_tokens, step.input_ids[0].tolist(), step.targets[0].tolist(), step.position_ids[0].tolist())
        for step in sp.shard_steps(UNEQUAL)
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_kf02_kf09_tokens_are_counted_once_for_the_whole_step(world: int) -> None:
    expected = sum(len(sequence) - 1 for batch in UNEQUAL for sequence in batch)
    for steps in run_ranks(world, describe_steps):
        assert {valid for valid, *_ in steps} == {expected}


@pytest.mark.parametrize("world", WORLDS)
def test_kf13_kf17_no_label_is_lost_at_a_border_and_positions_are_the_sequences_own(world: int) -> None:
    results = run_ranks(world, describe_steps)
    for number, batch in enumerate(UNEQUAL):
        seen = [
            token
            for rank in results
            for token in zip(*(values for values in rank[number][1:]), strict=True)
            if sum(map(len, batch)) >= world or token != (0, -100, 0)
        ]
        expected = [
            (token, following, position)
            for sequence in batch
            for position, (token, following) in enumerate(itertools.pairwise([*sequence, -100]))
        ]
        assert seen == expected


def evaluate(rank: int, world: int) -> tuple[float, float]:
    """(loss under no_grad, what training would print)."""
    sp = SequenceParallel(dist.group.WORLD)
    model = oracle.TinyLM(attend=attend)
    (step,) = sp.shard_steps([batch_of((9, 4), 5)])
    with torch.no_grad():
        evaluated = sp.loss(model, step)
    assert not evaluated.requires_grad
    return evaluated.item(), sp.loss(model, step).item()


@pytest.mark.parametrize("world", WORLDS)
def test_kf07_kf08_eval_loss_and_logged_loss_are_those_of_one_process(world: int) -> None:
    loss, _ = oracle.run_model(oracle.TinyLM(), [batch_of((9, 4), 5)])
    for evaluated, trained in run_ranks(world, evaluate):
        assert evaluated == pytest.approx(loss.item(), rel=1e-12, abs=0)
        assert trained == pytest.approx(loss.item(), rel=1e-12, abs=0)


def logits_of_all(rank: int, world: int, batch: Batch) -> list[list[float]]:
    sp = SequenceParallel(dist.group.WORLD)
    with torch.no_grad():
        return oracle.TinyLM(attend=attend)(**sp.shard(batch).inputs).logits[0].tolist()


def test_kf12_changing_one_document_leaves_the_next_ones_logits_bit_identical() -> None:
    first, other, second = *batch_of((7, 7), 20), batch_of((6,), 21)[0]
    before = functools.reduce(operator.iadd, run_ranks(3, logits_of_all, [first, second]), [])
    after = functools.reduce(operator.iadd, run_ranks(3, logits_of_all, [other, second]), [])
    assert before[7:] == after[7:]
    assert before[:7] != after[:7]


def test_loss_of_logits_computed_outside() -> None:
    sp = SequenceParallel()
    step = sp.shard([[1, 2, 3]], [[-100, 4, 5]])
    logits = torch.randn(1, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = oracle.token_mean([logits[0]], [torch.tensor([-100, 4, 5])])
    oracle.assert_close(sp.loss_of_logits(logits, step), want, "loss")
