"""FSDP2, HSDP and DDP around sequence parallelism against one process (known failures 1, 4-6, 10, 30)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import basp
from basp import collectives
from basp.casts import keep_float64
from basp.errors import DisagreementError, ModelError
from basp.plans import Plan, Shard, Tile
from tests.support import oracle
from tests.support.models import mean_gradients, random_batch, tiny_model
from tests.support.ranks import run_ranks

STRATEGIES = ("basp", "ulysses")
Batches = list[list[np.ndarray]]


def batches_of(*lengths: Sequence[int], seed: int = 0) -> Batches:
    return [random_batch(size, seed=seed + number) for number, size in enumerate(lengths)]


def shard(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def checkpoint(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def full_gradients(model: Any) -> dict[str, torch.Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        grads[name] = parameter.grad.full_tensor()
    return grads


def step_of(model: Any, sp: basp.SequenceParallel, batches: Batches) -> torch.Tensor:
    """One optimizer step's forwards and backwards; the sum of its shares."""
    total = torch.zeros((), dtype=torch.float64)
    for step in sp.shard_steps(batches):
        loss = sp.loss(model, step)
        loss.backward()
        total += loss.detach()
    return total


def _fsdp(rank: int, world: int, family: str, checkpointing: bool, sizes: list[tuple[int, ...]]) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
    for strategy, lengths in product(STRATEGIES, sizes):
        with keep_float64():
            model, batches = tiny_model(family), batches_of(lengths)
            right_loss, right = oracle.run_model(model, batches)
            sp = basp.SequenceParallel(mesh, strategy=strategy)
            basp.prepare(model, sp)
            if checkpointing:
                checkpoint(model)
            shard(model, mesh)
            oracle.assert_close(step_of(model, sp, batches), right_loss, f"loss of {lengths}")
            oracle.assert_same_grads(full_gradients(model), right, f"{strategy} gradient for {lengths}")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_kf01_fsdp2_gradients_equal_one_process(ranks, checkpointing):
    sizes = [(8, 8), (13, 1, 6), (2,)]  # 2 tokens: with 3 and 4 ranks some have none
    run_ranks(ranks, _fsdp, "qwen3", checkpointing, sizes)


def test_kf01_fsdp2_with_tied_embeddings_and_biases():
    run_ranks(2, _fsdp_tied)


def _fsdp_tied(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
    for family in ("llama", "qwen2"):
        with keep_float64():
            model, batches = tiny_model(family, tied=True), batches_of((9, 4))
            _, right = oracle.run_model(model, batches)
            sp = basp.SequenceParallel(mesh)
            shard(basp.prepare(model, sp), mesh)
            step_of(model, sp, batches)
            oracle.assert_same_grads(full_gradients(model), right)


def _accumulate(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
    batches = batches_of((20, 7), (1,), (2,), (9, 1, 1, 4))
    for strategy, every_sync in product(STRATEGIES, (True, False)):
        with keep_float64():
            model = tiny_model("llama")
            right_loss, right = oracle.run_model(model, batches)
            sp = basp.SequenceParallel(mesh, strategy=strategy)
            shard(basp.prepare(model, sp), mesh)
            steps, total = sp.shard_steps(batches), 0.0
            for number, step in enumerate(steps):
                model.set_requires_gradient_sync(every_sync or number == len(steps) - 1)
                loss = sp.loss(model, step)
                loss.backward()
                total = total + loss.detach()
            oracle.assert_close(total, right_loss, "loss")
            oracle.assert_same_grads(full_gradients(model), right, f"{strategy} gradient")


def test_kf06_accumulating_unequal_micro_batches_equals_one_mean():
    run_ranks(3, _accumulate)


# -- data parallelism beside it ----------------------------------------------------------------------------------

GROUP_BATCHES = [batches_of((15, 4, 1), (6,)), batches_of((3,), (9, 2), seed=7)]
"""What each of two data-parallel groups is given for one step: other numbers of sequences and of tokens."""


def _arranged(rank: int, world: int, names: tuple[str, ...]) -> float:
    """Four ranks; gradients are averaged over all of them, however they are arranged."""
    shape = (world,) if names == ("sp",) else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    everything = [first + second for first, second in zip(*GROUP_BATCHES, strict=True)]
    mine = everything if names == ("sp",) else GROUP_BATCHES[mesh.get_local_rank(names[0])]
    with keep_float64():
        model = tiny_model("llama")
        right_loss, right = oracle.run_model(model, everything)
        sp = basp.SequenceParallel(mesh)
        over = mesh[names]._flatten("all") if names == ("dp_shard", "sp") else mesh
        shard(basp.prepare(model, sp), over)
        loss = step_of(model, sp, mine)
        oracle.assert_close(loss, right_loss, "loss")
        oracle.assert_same_grads(full_gradients(model), right)
    return loss.item()


@pytest.mark.parametrize("names", [("dp_shard", "sp"), ("dp_replicate", "sp"), ("sp",)])
def test_kf04_any_arrangement_of_the_ranks_equals_one_process(names):
    assert len(set(run_ranks(4, _arranged, names))) == 1


def _ddp(rank: int, world: int, names: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", (world,) if len(names) == 1 else (2, 2), mesh_dim_names=names)
    everything = [first + second for first, second in zip(*GROUP_BATCHES, strict=True)]
    mine = everything if len(names) == 1 else GROUP_BATCHES[mesh.get_local_rank(names[0])]
    for strategy, checkpointing in product(STRATEGIES, (False, True)):
        with keep_float64():
            model = tiny_model("qwen2")
            right_loss, right = oracle.run_model(model, everything)
            sp = basp.SequenceParallel(mesh, strategy=strategy)
            basp.prepare(model, sp)
            if checkpointing:
                checkpoint(model)
            parallel = DistributedDataParallel(model)
            oracle.assert_close(step_of(parallel, sp, mine), right_loss, "loss")
            grads = {name: parameter.grad for name, parameter in model.named_parameters()}
            oracle.assert_same_grads(grads, right, f"{strategy} gradient")


@pytest.mark.parametrize(("ranks", "names"), [(3, ("sp",)), (4, ("dp_replicate", "sp"))])
def test_kf05_ddp_over_all_ranks_equals_one_process(ranks, names):
    run_ranks(ranks, _ddp, names)


def _over_some_ranks(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "sp"))
    sp = basp.SequenceParallel(mesh)
    step = sp.shard(GROUP_BATCHES[mesh.get_local_rank("dp_shard")][0])
    for name in ("dp_shard", "sp"):
        ddp = DistributedDataParallel(basp.prepare(tiny_model("qwen2"), sp), process_group=mesh.get_group(name))
        sharded = shard(basp.prepare(tiny_model("qwen2"), sp), mesh[name])
        for model in (ddp, sharded):
            with pytest.raises(ModelError, match="averaged over 2 ranks") as refused:
                sp.loss(model, step)
            assert "the 4 that share a step" in str(refused.value)


def test_kf05_averaging_over_some_of_the_ranks_is_refused():
    run_ranks(4, _over_some_ranks)


# -- gradient norm, bfloat16 -------------------------------------------------------------------------------------


def _clip(rank: int, world: int) -> float:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
    with keep_float64():
        model, batches = tiny_model("llama"), batches_of((13, 1, 6))
        _, right = oracle.run_model(model, batches)
        right_norm = math.sqrt(sum(float((grad**2).sum()) for grad in right.values()))
        sp = basp.SequenceParallel(mesh)
        shard(basp.prepare(model, sp), mesh)
        step_of(model, sp, batches)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), right_norm / 2)
        assert isinstance(norm, DTensor)
        oracle.assert_close(norm.full_tensor(), torch.tensor(right_norm, dtype=torch.float64), "gradient norm")
        clipped = {name: grad / 2 for name, grad in right.items()}
        for name, grad in full_gradients(model).items():  # torch adds 1e-6 to the norm that it divides by
            oracle.assert_close(grad, clipped[name], name, tolerance=1e-5)
    return norm.full_tensor().item()


@pytest.mark.parametrize("ranks", [2, 3])
def test_kf10_gradient_norm_equals_one_process(ranks):
    assert len(set(run_ranks(ranks, _clip))) == 1


def _distance(grads: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(((grads[name].double() - right[name].double()) ** 2).sum()) for name in right))


def _bfloat16(rank: int, world: int, strategy: str) -> tuple[float, float, float, float]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
    batches = batches_of((40, 9), (23,))
    model = tiny_model("llama", dtype=torch.float32, layers=4)
    exact_loss, exact = oracle.run_model(model, batches)
    one_loss, one = oracle.run_model(tiny_model("llama", dtype=torch.bfloat16, layers=4), batches)
    sp = basp.SequenceParallel(mesh, strategy=strategy)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(basp.prepare(model, sp), mesh, mp_policy=policy)
    loss = step_of(model, sp, batches)
    grads = full_gradients(model)
    assert all(grad.dtype is torch.float32 for grad in grads.values())
    assert all(bool(torch.isfinite(grad).all()) for grad in grads.values())
    return (
        abs(float(loss - exact_loss)),
        abs(float(one_loss - exact_loss)),
        _distance(grads, exact),
        _distance(one, exact),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kf30_bfloat16_error_is_that_of_one_process(strategy):
    for loss_error, _, grad_error, one_grad_error in run_ranks(4, _bfloat16, strategy):
        assert 0 < loss_error < 2e-2  # a bfloat16 logit of about 4 is known to 2 ** -7
        assert 0 < grad_error < 2 * one_grad_error


def owner_computes_nothing(lengths, *, ranks, heads, kv_heads, causal=True) -> Plan:
    """All tokens on rank 0, all attention on the last: one rank without tiles, and one (or more) without tokens."""
    tokens = [Shard(sequence, 0, length) for sequence, length in enumerate(lengths)]
    work = [Tile(sequence, 0, heads, 0, length) for sequence, length in enumerate(lengths)]
    nothing: list[list[Any]] = [[]] * (ranks - 1)
    return Plan.of(
        lengths, heads=heads, kv_heads=kv_heads, shards=[tokens, *nothing], tiles=[*nothing, work], causal=causal
    )


@contextmanager
def types_sent() -> Iterator[list[torch.dtype]]:
    """The type of the rows of each exchange of this rank."""
    real, seen = collectives.exchange_in_pairs, []

    def noting(out: torch.Tensor, rows: torch.Tensor, *args: Any, **named: Any) -> None:
        seen.append(rows.dtype)
        real(out, rows, *args, **named)

    collectives.exchange_in_pairs = noting
    try:
        yield seen
    finally:
        collectives.exchange_in_pairs = real


def _autocast(rank: int, world: int, family: str) -> None:
    """Rotary embeddings make float32 of the queries and keys; sinks are float32 already."""

    def made() -> Any:  # of all experts, so that rounding does not change which are chosen
        return tiny_model(family, dtype=torch.float32, **({"num_experts_per_tok": 5} if family == "gpt-oss" else {}))

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
    batches, layers = batches_of((40, 20)), 2
    exact_loss, exact = oracle.run_model(made(), batches)
    for kind in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", kind):
            one_loss, one = oracle.run_model(made(), batches)
        policies = (None, MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32))
        for policy, strategy in product(policies, ("basp", owner_computes_nothing)):
            case = f"{kind}, {policy}, {strategy}"
            sp = basp.SequenceParallel(mesh, strategy=strategy)
            model = made()
            with torch.autocast("cpu", kind):
                basp.prepare(model, sp)
            if policy is not None:
                shard(model, mesh, mp_policy=policy)
            (step,) = sp.shard_steps(batches)
            with types_sent() as sent:
                with torch.autocast("cpu", kind):
                    loss = sp.loss(model, step)
                loss.backward()
            assert set(sent) == {kind}, case
            assert len(sent) == 4 * layers, case
            (shape,) = step.context.shapes
            traffic = step.plan(4, 2).traffic(shape.head_dim, kind.itemsize, shape.value_head_dim)
            assert sp.counter.forward.tolist() == (layers * traffic[rank]).tolist(), case
            assert sp.counter.backward.tolist() == (layers * traffic[:, rank]).tolist(), case
            grads = mean_gradients(model) if policy is None else full_gradients(model)
            assert {grad.dtype for grad in grads.values()} == {torch.float32}, case
            assert abs(float(loss.detach() - exact_loss)) <= 2 * abs(float(one_loss - exact_loss)) + 2e-3, case
            assert 0 < _distance(grads, exact) < 2 * _distance(one, exact), case


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_under_autocast_every_rank_sends_its_type(ranks, family):
    run_ranks(ranks, _autocast, family)


def _odd_autocast(rank: int, world: int) -> list[str]:
    """One rank in another type, in the first step and in a later one that has types which were equal before."""
    said = []
    model, batches = tiny_model("llama", dtype=torch.float32), batches_of((40, 20))
    sp = basp.SequenceParallel(dist.group.WORLD)
    basp.prepare(model, sp)
    for odd in (False, True, False, True):
        kind = torch.float16 if rank == 1 and odd else torch.bfloat16
        with torch.autocast("cpu", kind):
            try:
                sp.loss(model, sp.shard(batches[0])).backward()
            except DisagreementError as error:
                said.append(str(error))
    odd = pytest.raises(DisagreementError, match="rank 1 has other types of attention's rows")
    with torch.autocast("cpu", torch.bfloat16, enabled=rank != 1), odd:
        sp.loss(model, sp.shard(batches[0]))
    return said


def test_a_rank_of_another_type_is_named_on_every_rank():
    for rank, said in enumerate(run_ranks(3, _odd_autocast)):
        assert len(said) == 2
        for message in said:
            assert "rank 1 has other types of attention's rows" in message
            assert f"({'float16' if rank == 1 else 'bfloat16'} here)" in message


def _no_gradient_left_behind(rank: int, world: int) -> None:
    """Without any wrapper: the hand-written mean is what FSDP2 and DDP compute."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
    with keep_float64():
        batches = batches_of((11, 5))
        model, sharded = tiny_model("qwen3"), tiny_model("qwen3")
        sp = basp.SequenceParallel(mesh)
        step_of(basp.prepare(model, sp), sp, batches)
        step_of(shard(basp.prepare(sharded, sp), mesh), sp, batches)
        oracle.assert_same_grads(full_gradients(sharded), mean_gradients(model))


def test_kf01_averaging_by_hand_equals_fsdp2():
    run_ranks(3, _no_gradient_left_behind)
