"""What a model has no position or no embedding for: every rank refuses it before the forward, and nobody waits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from basp import SequenceParallel, prepare
from basp.errors import BatchError
from tests.support.models import random_batch
from tests.support.ranks import run_ranks

LIMIT = 16
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": LIMIT,
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": LIMIT}
UNDROPPED = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}


def make(kind: str, sp: SequenceParallel) -> Any:
    if kind == "GPT2":
        return prepare(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **UNDROPPED)), sp)
    if kind == "Gemma3 with images":
        config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION)
        return prepare(transformers.Gemma3ForConditionalGeneration(config), sp)
    model = prepare(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), sp)
    if kind == "Llama under DDP":
        return DistributedDataParallel(model)
    if kind == "Llama under PEFT":
        import peft

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    return model


def attempt(sp: SequenceParallel, model: Any, batches: list[Any]) -> str:
    """What each loss of a step says: "" where it is finite."""
    said = []
    for step in sp.shard_steps(batches):
        try:
            said.append("" if torch.isfinite(sp.loss(model, step)) else "not finite")
        except BatchError as error:
            said.append(str(error))
    return "; ".join(said)


def too_long(rank: int, world: int, kind: str) -> list[str]:
    torch.manual_seed(0)
    sp = SequenceParallel(dist.group.WORLD)
    model = make(kind, sp)
    return [attempt(sp, model, [random_batch(lengths)]) for lengths in ((LIMIT, 3), (5, LIMIT + 1), (5, LIMIT))]


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Llama under DDP", "Llama under PEFT", "Gemma3 with images"])
def test_a_sequence_longer_than_the_models_positions_is_refused_on_every_rank(kind: str) -> None:
    if kind == "Llama under PEFT":
        pytest.importorskip("peft")
    for fits, exceeds, after in run_ranks(3, too_long, kind):
        assert (fits, after) == ("", "")
        assert exceeds == (
            "a sequence of 17 tokens for a model of max_position_embeddings 16. Allowed: at most 16. "
            "To do: shorten it, or raise max_position_embeddings (with rope scaling) in the model's config."
        )


def of_one_group_only(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "sp"))
    sp = SequenceParallel(mesh)
    model = make("GPT2", sp)
    short, long, strange = random_batch((4, 3)), random_batch((LIMIT + 1, 3)), [[3, 4, 64]]
    first = mesh.get_local_rank("dp_shard") == 0
    return [attempt(sp, model, [short, other if first else short]) for other in (long, strange, short)]


def test_what_one_data_parallel_group_cannot_run_no_group_runs() -> None:
    """Else the others would wait for its gradients."""
    for long, strange, short in run_ranks(4, of_one_group_only):
        assert long.count("a sequence of 17 tokens for a model of max_position_embeddings 16") == 2
        assert strange.count("token id or label 64 for a vocabulary of 64") == 2
        assert short == "; "
