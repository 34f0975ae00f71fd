"""The load-balancing loss of mixtures of experts: over the whole micro-batch, as one process has it."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import basp
from basp.casts import keep_float64
from basp.errors import ModelError
from tests.support import oracle
from tests.support.models import mean_gradients, random_batch, randomise, tiny_model
from tests.support.ranks import run_ranks

FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss")
# A rank runs a dummy where there are more ranks than tokens; unequal micro-batches weigh by their valid tokens.
STEPS: dict[str, list[tuple[int, ...]]] = {
    "one micro-batch": [(17, 1, 6)],
    "fewer tokens than ranks": [(2,)],
    "accumulation": [(12, 5), (2,), (9, 1, 1, 7)],
    "a micro-batch of one token": [(1,), (3, 4)],
}


def moe(family: str, **more: Any) -> Any:
    return tiny_model(family, output_router_logits=True, **more)


def data(lengths: list[tuple[int, ...]], seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Token ids, and labels of which every third is ignored."""
    batches = [random_batch(size, seed=seed + number) for number, size in enumerate(lengths)]
    labels = [[ids.copy() for ids in batch] for batch in batches]
    for batch in labels:
        for ids in batch:
            ids[2::3] = -100
    return batches, labels


def train(sp: basp.SequenceParallel, model: Any, batches: list[Any], labels: list[Any]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for step in sp.shard_steps(batches, labels):
        loss = sp.loss(model, step)
        loss.backward()
        total += loss.detach()
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_is_transformers_own_definition(family: str) -> None:
    model = moe(family)
    ids = torch.as_tensor(random_batch((13,))[0])[None]
    with keep_float64():
        out = model(input_ids=ids, labels=ids, use_cache=False)
        mine = oracle.balance_loss(out.router_logits, model.config.num_experts_per_tok)
        experts = out.router_logits[0].shape[-1]
        loss, _ = oracle.run_model(model, [[ids[0]]])
    assert len(out.router_logits) == 2
    theirs = load_balancing_loss_func(out.router_logits, experts, model.config.num_experts_per_tok)
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert mine.item() == pytest.approx(out.aux_loss.item(), rel=1e-6)
    assert loss.item() == pytest.approx(out.loss.item(), rel=1e-6)


def hold(rank: int, world: int, family: str, strategy: str) -> None:
    sp = basp.SequenceParallel(dist.group.WORLD, strategy=strategy)
    with keep_float64():
        for name, lengths in STEPS.items():
            batches, labels = data(lengths)
            right_loss, right = oracle.run_model(moe(family), batches, labels)
            model = basp.prepare(moe(family), sp)
            loss = train(sp, model, batches, labels)
            oracle.assert_close(loss, right_loss, f"{name}: loss")
            oracle.assert_same_grads(mean_gradients(model), right, f"{name}: gradient")
            with torch.no_grad():
                evaluated = sum(sp.loss(model, step) for step in sp.shard_steps(batches, labels))
            oracle.assert_close(evaluated, right_loss, f"{name}: evaluation loss")
            without, _ = oracle.run_model(tiny_model(family), batches, labels)
            assert oracle.relative_error(loss, without) > 1e-2


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_kf06_router_loss_equals_one_process(family: str, ranks: int) -> None:
    run_ranks(ranks, hold, family, "ulysses" if ranks == 3 else "basp")


def hold_on_mesh(rank: int, world: int, family: str, names: tuple[str, str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    sp = basp.SequenceParallel(mesh)
    groups = [data([(9, 4), (2,)], seed=10), data([(1, 1), (16, 5, 1)], seed=20)]
    batches, labels = ([batch for group in groups for batch in group[part]] for part in (0, 1))
    with keep_float64():
        right_loss, right = oracle.run_model(moe(family), batches, labels)
        model = basp.prepare(moe(family), sp)
        loss = train(sp, model, *groups[mesh.get_local_rank("dp_shard")])
        oracle.assert_close(loss, right_loss, "loss")
        oracle.assert_same_grads(mean_gradients(model), right)


@pytest.mark.parametrize("names", [("dp_shard", "sp"), ("sp", "dp_shard")], ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_kf04_kf06_each_data_parallel_group_has_the_router_loss_of_its_own_micro_batches(
    family: str, names: tuple[str, str]
) -> None:
    run_ranks(4, hold_on_mesh, family, names)


def lora(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT's own about transformers' deprecations
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).double()
    randomise(wrapped, seed=1)
    return wrapped


def wrapped(rank: int, world: int, family: str) -> None:
    """Under DDP, FSDP2 and LoRA: the micro-batches of "accumulation", and one without a valid label."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))
    sp = basp.SequenceParallel(mesh)
    batches, labels = data([*STEPS["accumulation"], (3, 5)])
    for ids in labels[-1]:
        ids[:] = -100
    with keep_float64():
        right_loss, right = oracle.run_model(moe(family), batches, labels)
        model = basp.prepare(moe(family), sp)
        oracle.assert_close(train(sp, DistributedDataParallel(model), batches, labels), right_loss, "DDP: loss")
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        oracle.assert_same_grads(grads, right, "DDP: gradient")
        model = fully_shard(basp.prepare(moe(family), sp), mesh=mesh)
        oracle.assert_close(train(sp, model, batches, labels), right_loss, "FSDP2: loss")
        grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        oracle.assert_same_grads(grads, right, "FSDP2: gradient")
        right_loss, right = oracle.run_model(lora(moe(family)), batches, labels)
        model = basp.prepare(lora(moe(family)), sp)
        oracle.assert_close(train(sp, model, batches, labels), right_loss, "LoRA: loss")
        adapters = {name: grad for name, grad in right.items() if "lora" in name}
        oracle.assert_same_grads(mean_gradients(model), adapters, "LoRA: gradient")


@pytest.mark.parametrize("family", FAMILIES)
def test_router_loss_of_wrapped_models_equals_one_process(family: str) -> None:
    run_ranks(3, wrapped, family)


def checkpointed(rank: int, world: int, family: str) -> None:
    sp = basp.SequenceParallel(dist.group.WORLD)
    batches, labels = data([(12, 5), (2,)])
    with keep_float64():
        right_loss, right = oracle.run_model(moe(family), batches, labels)
        model = basp.prepare(moe(family), sp)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        with pytest.raises(ModelError, match="router logits without a gradient") as refused:
            train(sp, model, batches, labels)
        assert "reentrant" in str(refused.value)
        assert '"use_reentrant": False' in str(refused.value)
        assert all(parameter.grad is None for parameter in model.parameters())
        with torch.no_grad():  # evaluation needs no gradient
            evaluated = sum(sp.loss(model, step) for step in sp.shard_steps(batches, labels))
        oracle.assert_close(evaluated, right_loss, "evaluation loss")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        oracle.assert_close(train(sp, model, batches, labels), right_loss, "loss")
        oracle.assert_same_grads(mean_gradients(model), right)


@pytest.mark.parametrize("family", FAMILIES)
def test_reentrant_checkpointing_with_a_router_loss_is_refused_and_the_other_is_exact(family: str) -> None:
    run_ranks(2, checkpointed, family)


def only_the_head(rank: int, world: int) -> None:
    sp = basp.SequenceParallel(dist.group.WORLD)
    batches, labels = data([(12, 5)])
    with keep_float64():
        right_loss, right = oracle.run_model(moe("mixtral"), batches, labels)
        model = basp.prepare(moe("mixtral"), sp)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lm_head" in name)
        oracle.assert_close(train(sp, model, batches, labels), right_loss, "loss")
        oracle.assert_same_grads(mean_gradients(model), {"lm_head.weight": right["lm_head.weight"]})


def test_frozen_routers_have_no_gradient_and_are_no_reason_to_refuse() -> None:
    run_ranks(2, only_the_head)


@pytest.mark.parametrize("coefficient", [None, 0.5])
def test_a_family_without_a_router_loss_is_refused_one(coefficient: float | None) -> None:
    """DeepSeek-V3 hands its router logits out and trains on no auxiliary loss, whatever its config holds."""
    sp = basp.SequenceParallel()
    model = basp.prepare(tiny_model("deepseek-v3", kv_heads=4, router_aux_loss_coef=coefficient), sp)
    step = sp.shard(random_batch((9, 4)))
    assert bool(torch.isfinite(sp.loss(model, step)))
    if coefficient is None:
        del model.config.router_aux_loss_coef
    model.config.output_router_logits = True
    with pytest.raises(ModelError, match="DeepseekV3ForCausalLM with output_router_logits"):
        sp.loss(model, step)
