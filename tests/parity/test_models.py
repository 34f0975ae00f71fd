"""Whole models on N ranks against one process: loss, logits and every gradient (known failures 1-4, 6, 12, 17-26)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import basp
from basp.casts import keep_float64
from tests.support import oracle
from tests.support.models import (
    FAMILIES,
    HEAD_SHAPES,
    mean_gradients,
    random_batch,
    randomise,
    tiny_config,
    tiny_model,
)
from tests.support.ranks import run_ranks

BATCHES = {1: (1,), 2: (1, 2), 3: (2,), 4: (1, 2, 3, 4, 8)}
"""Numbers of sequences that are tried on each number of ranks."""
STRATEGIES = ("basp", "ulysses")
UNEQUAL = (17, 1, 6, 1, 11, 3, 1, 9)

Labels = list[list[np.ndarray]]


@dataclass(frozen=True)
class Case:
    """One optimizer step: its micro-batches' lengths, and which labels count (None: all)."""

    lengths: tuple[tuple[int, ...], ...]
    family: str = "llama"
    heads: tuple[int, int] = (4, 2)
    tied: bool = False
    strategy: str = "basp"
    ignore: Callable[[list[np.ndarray]], list[np.ndarray]] | None = None
    dtype: torch.dtype = torch.float64
    train: tuple[str, ...] = ("",)
    checkpointing: bool | None = None

    def data(self) -> tuple[list[list[np.ndarray]], Labels | None]:
        batches = [random_batch(lengths, seed=number) for number, lengths in enumerate(self.lengths)]
        labels = None if self.ignore is None else [self.ignore([ids.copy() for ids in batch]) for batch in batches]
        return batches, labels

    def model(self) -> Any:
        heads, kv_heads = self.heads
        model = tiny_model(self.family, heads=heads, kv_heads=kv_heads, tied=self.tied, dtype=self.dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in self.train))
        return model


def hold(rank: int, world: int, cases: Sequence[Case]) -> None:
    """On one rank: every case equals the oracle. Run by ``run_ranks``."""
    for case in cases:
        try:
            with keep_float64() if case.dtype is torch.float64 else nullcontext():
                _hold(rank, world, case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


def _hold(rank: int, world: int, case: Case) -> None:
    batches, labels = case.data()
    model = case.model()
    right_loss, right = oracle.run_model(model, batches, labels)
    right_logits = _oracle_logits(model, batches)
    sp = basp.SequenceParallel(dist.group.WORLD, strategy=case.strategy)
    basp.prepare(model, sp)
    if case.checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.checkpointing})
    total = 0.0
    for step, lengths, logits_of in zip(sp.shard_steps(batches, labels), case.lengths, right_logits, strict=True):
        assert step.input_ids.shape == step.position_ids.shape == step.targets.shape
        logits = model(**step.inputs).logits
        shards = step.plan(*case.heads).shards[rank]
        assert sum(stop - start for _, start, stop in shards) <= -(-sum(lengths) // world) + len(lengths)
        if shards:
            rows = torch.cat([logits_of[sequence][start:stop] for sequence, start, stop in shards])
            oracle.assert_close(logits.detach()[0], rows, "logits")
        loss = sp.loss_of_logits(logits, step)
        assert loss.shape == ()
        loss.backward()
        total = total + loss.detach()
    oracle.assert_close(total, right_loss.to(total.dtype), "loss")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    oracle.assert_same_grads(mean_gradients(model), {name: right[name] for name in right if name in trained})


@torch.no_grad()
def _oracle_logits(model: Any, batches: list[list[np.ndarray]]) -> list[list[torch.Tensor]]:
    with oracle.oracle_attention(model):
        return [[oracle.logits_of(model, torch.as_tensor(ids)) for ids in batch] for batch in batches]


# -- which labels count ------------------------------------------------------------------------------------------


def every_other(batch: list[np.ndarray]) -> list[np.ndarray]:
    for ids in batch:
        ids[::2] = -100
    return batch


def only_last_sequence(batch: list[np.ndarray]) -> list[np.ndarray]:
    for ids in batch[:-1]:
        ids[:] = -100
    return batch


def last_quarter(batch: list[np.ndarray]) -> list[np.ndarray]:
    for ids in batch:
        ids[: -max(1, len(ids) // 4)] = -100
    return batch


def none(batch: list[np.ndarray]) -> list[np.ndarray]:
    for ids in batch:
        ids[:] = -100
    return batch


# -- the tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", BATCHES)
def test_kf01_kf25_gradients_equal_one_process_for_every_batch_size(ranks, family):
    lengths = [size for count in BATCHES[ranks] for size in ((12,) * count, UNEQUAL[:count])]
    cases = [
        Case((size,), family, strategy=strategy, tied=tied)
        for (number, size), strategy in product(enumerate(lengths), STRATEGIES)
        for tied in ([False, True] if number < 2 else [False])
    ]
    run_ranks(ranks, hold, cases)


@pytest.mark.parametrize("family", FAMILIES)
def test_kf22_kf23_any_head_counts_on_four_ranks(family):
    cases = [
        Case((lengths,), family, heads, strategy=strategy)
        for heads, strategy, lengths in product(HEAD_SHAPES.values(), STRATEGIES, [(13,), (5, 1, 18), (9, 4, 1, 1, 7)])
    ]
    run_ranks(4, hold, cases)


def test_kf20_kf21_any_length():
    run_ranks(3, hold, [Case((lengths,), strategy=s) for s in STRATEGIES for lengths in [(31,), (32,), (33,), (7, 30)]])


@pytest.mark.parametrize("ranks", [2, 4])
def test_kf03_ranks_without_a_valid_label(ranks):
    cases = [
        Case((lengths,), strategy=strategy, ignore=ignore)
        for strategy in STRATEGIES
        for lengths in [(17, 1, 6), (3, 3, 3, 3)]
        for ignore in (every_other, only_last_sequence, last_quarter, none)
    ]
    run_ranks(ranks, hold, cases)


def test_kf29_more_ranks_than_tokens():
    lengths = [(2,), (3,), (2, 1), (1, 2), (1,), (1, 1), (1, 1, 1)]
    run_ranks(
        4, hold, [Case((size,), family, strategy=s) for size in lengths for s in STRATEGIES for family in FAMILIES]
    )


def test_kf06_unequal_micro_batches_are_one_mean():
    cases = [
        Case(((12, 5), (1,), (9, 9, 2)), strategy=strategy, ignore=ignore)
        for strategy, ignore in product(STRATEGIES, (None, last_quarter))
    ] + [Case(((2,), (20, 3)), strategy=strategy) for strategy in STRATEGIES]
    run_ranks(3, hold, cases)


@dataclass(frozen=True)
class OnlyLabel:
    """Ignore all labels but one."""

    position: int

    def __call__(self, batch: list[np.ndarray]) -> list[np.ndarray]:
        kept = batch[0][self.position]
        none(batch)
        batch[0][self.position] = kept
        return batch


def test_kf17_no_label_is_lost_at_a_border():
    """Each label in turn is the only one: those at the borders of the slices, too, reach the loss."""
    run_ranks(4, hold, [Case(((11, 2),), strategy=s, ignore=OnlyLabel(at)) for s in STRATEGIES for at in range(1, 11)])


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_as_shipped(family):
    cases = [
        Case((lengths,), family, heads, strategy=strategy, dtype=torch.float32)
        for strategy, lengths, heads in product(STRATEGIES, [(16, 16), (17, 1, 6)], [(4, 2), (7, 7)])
    ]
    run_ranks(4, hold, cases)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(use_reentrant, family):
    cases = [
        Case((lengths,), family, strategy=strategy, checkpointing=use_reentrant)
        for strategy, lengths in product(STRATEGIES, [(12, 12), (17, 1, 6), (2,)])
    ]
    run_ranks(3, hold, cases)


@pytest.mark.parametrize("checkpointing", [None, False])
def test_frozen_parameters(checkpointing):
    parts = [
        ("layers.1",),
        ("lm_head",),
        ("embed_tokens",),
        ("layers.0.self_attn.q_proj",),
        ("layers.1.self_attn.v_proj.bias", "layers.1.self_attn.k_proj.bias"),
        ("layers.1.self_attn.o_proj",),
    ]
    cases = [
        Case((lengths,), strategy=strategy, train=train, checkpointing=checkpointing)
        for train, strategy, lengths in product(parts, STRATEGIES, [(17, 1, 6), (2,)])
    ]
    run_ranks(3, hold, cases)


def _two_models(rank: int, world: int) -> None:
    batches, others = [random_batch((9, 8))], [random_batch((5, 5, 5), seed=1)]
    sp = basp.SequenceParallel(dist.group.WORLD)
    with keep_float64():
        models = [tiny_model("llama", heads=4, kv_heads=1), tiny_model("qwen3", heads=6, kv_heads=3, seed=1)]
        rights = [oracle.run_model(models[0], batches), oracle.run_model(models[1], others)]
        steps = [sp.shard_steps(batches)[0], sp.shard_steps(others)[0]]
        losses = [sp.loss(basp.prepare(model, sp), step) for model, step in zip(models, steps, strict=True)]
        for loss in losses:
            loss.backward()
        for model, loss, (right_loss, right) in zip(models, losses, rights, strict=True):
            oracle.assert_close(loss, right_loss, "loss")
            oracle.assert_same_grads(mean_gradients(model), right)


def test_kf24_two_models_with_other_head_counts_in_one_process():
    run_ranks(3, _two_models)


def _layers_of_other_heads(rank: int, world: int) -> None:
    """A model whose layers have 4/2, 6/3 and 2/1 heads."""
    batch = random_batch((9, 1, 8))
    sp = basp.SequenceParallel(dist.group.WORLD)
    with keep_float64():
        model = tiny_model("qwen3", heads=4, kv_heads=2, layers=3)
        for layer, (heads, kv_heads) in ((1, (6, 3)), (2, (2, 1))):
            config = tiny_config("qwen3", heads=heads, kv_heads=kv_heads, layers=3)
            model.model.layers[layer].self_attn = Qwen3Attention(config, layer_idx=layer).double()
            model.model.layers[layer].self_attn.config = model.config  # which says what attention to call
        randomise(model, seed=2)
        right_loss, right = oracle.run_model(model, [batch])
        loss = sp.loss(basp.prepare(model, sp), sp.shard(batch))
        loss.backward()
        oracle.assert_close(loss, right_loss, "loss")
        oracle.assert_same_grads(mean_gradients(model), right)


def test_kf24_layers_with_other_head_counts_in_one_model():
    run_ranks(3, _layers_of_other_heads)


def _evaluate(rank: int, world: int) -> None:
    sp = basp.SequenceParallel(dist.group.WORLD)
    with keep_float64():
        model = tiny_model("qwen2")
        for lengths in [(16, 16), (5,), (9, 1, 1, 30, 2)]:
            batch = random_batch(lengths, seed=len(lengths))
            right, _ = oracle.run_model(model, [batch])
            basp.prepare(model, sp).eval()
            with torch.no_grad():
                oracle.assert_close(sp.loss(model, sp.shard(batch)), right, f"evaluation loss of {lengths}")


def test_kf08_kf26_kf35_evaluation_equals_one_process_for_any_batch():
    run_ranks(4, _evaluate)


def _other_first_document(rank: int, world: int, strategy: str, lengths: tuple[int, ...]) -> list[np.ndarray]:
    sp = basp.SequenceParallel(dist.group.WORLD, strategy=strategy)
    model = basp.prepare(tiny_model("llama", dtype=torch.float32), sp)
    batch = random_batch(lengths)
    logits = []
    for first in (batch[0], (batch[0] + 1) % 37):
        step = sp.shard([first, *batch[1:]])
        with torch.no_grad():
            logits.append(model(**step.inputs).logits[0])
    shards = step.plan(4, 2).shards[rank]
    document = np.repeat([sequence for sequence, _, _ in shards], [stop - start for _, start, stop in shards])
    changed = (logits[0] != logits[1]).any(-1).numpy()
    return [changed[document == number] for number in range(len(lengths))]


@pytest.mark.parametrize("lengths", [(8, 14, 3), (5,) * 6])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kf12_documents_do_not_see_each_other(strategy, lengths):
    """Another first document: its own logits all change, every other logit keeps every bit.

    Shared documents, and under basp two whole ones of the same length on each rank.
    """
    ranks = run_ranks(3, _other_first_document, strategy, lengths)
    changed = [np.concatenate(parts) for parts in zip(*ranks, strict=True)]
    assert tuple(len(part) for part in changed) == lengths
    assert changed[0].all()
    assert not any(part.any() for part in changed[1:])
