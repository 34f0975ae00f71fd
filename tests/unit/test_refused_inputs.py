"""What a prepared model refuses beside ``step.inputs``, by the layer's name: a cache, a mask, an image's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from basp import SequenceParallel, prepare
from basp.casts import keep_float64
from basp.errors import BatchError, ModelError
from basp.parallel import Step
from tests.support import oracle
from tests.unit.test_refusals import GEMMA3, build

BATCH = [[3, 4, 5, 6, 7], [8, 9, 10]]
TO_GENERATE = 'model.set_attn_implementation("sdpa")'


@pytest.fixture
def sp() -> SequenceParallel:
    return SequenceParallel()


@pytest.fixture
def llama(sp: SequenceParallel) -> PreTrainedModel:
    return prepare(build("Llama"), sp)


@pytest.fixture
def step(sp: SequenceParallel) -> Step:
    return sp.shard(BATCH)


# -- a cache of keys and values ---------------------------------------------------------------------------------------


def test_generate_is_refused_and_the_remedy_works(llama: PreTrainedModel) -> None:
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(ModelError, match="LlamaAttention of layer 0 without a basp step") as refused:
        llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
    assert f"to generate, or to use the model without basp, call {TO_GENERATE}" in str(refused.value)
    with pytest.raises(ModelError, match="masked tokens, for the layers of Llama") as refused:
        llama.generate(ids, attention_mask=torch.tensor([[0, 1, 1]]), max_new_tokens=2)
    assert TO_GENERATE in str(refused.value)
    llama.set_attn_implementation("sdpa")
    assert llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2).shape == (1, 5)


def test_keys_of_a_filled_cache_are_refused_by_layer(sp: SequenceParallel, step: Step) -> None:
    for name, changes in (("Llama", {}), ("Mistral", {"sliding_window": 4})):
        model = prepare(build(name, **changes), sp)
        inputs = step.inputs | {"use_cache": True, "cache": DynamicCache(config=model.config)}
        assert torch.equal(model(**inputs).logits, model(**step.inputs).logits)  # an empty one adds nothing yet
        with pytest.raises(ModelError, match=rf"keys for 8 queries in {name}Attention of layer 0") as refused:
            model(**inputs)
        assert TO_GENERATE in str(refused.value)


def test_a_cache_of_a_fixed_size_is_refused_by_layer(llama: PreTrainedModel, step: Step) -> None:
    cache = StaticCache(config=llama.config, max_cache_len=32)
    with pytest.raises(ModelError, match="32 keys for 8 queries in LlamaAttention of layer 0"):
        llama(**step.inputs | {"use_cache": True, "cache": cache})


# -- masks and other tensors ------------------------------------------------------------------------------------------

ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "a mask of four dimensions": (
        {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()},
        r"LlamaAttention of layer 0 asks for an attention mask of shape \(1, 1, 8, 8\)",
    ),
    "an added mask of four dimensions": (
        {"attention_mask": torch.zeros(1, 1, 8, 8)},
        r"LlamaAttention of layer 0 asks for an attention mask of shape \(1, 1, 8, 8\)",
    ),
    "a mask with holes": (
        {"attention_mask": torch.tensor([[True, False, True, True, True, True, True, True]])},
        r"attention_mask of shape \(1, 8\) with masked tokens, for the layers of Llama",
    ),
    "an argument that basp does not know": (
        {"block_indices": torch.zeros(1, 2, 8, 1)},
        r"LlamaAttention of layer 0 asks for a tensor that basp does not know \(block_indices\)",
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_is_given_beside_the_step_is_refused(step: Step, llama: PreTrainedModel, case: str) -> None:
    more, words = ASKED[case]
    with pytest.raises(ModelError, match=words) as refused:
        llama(**step.inputs, **more)
    assert "To do: pass " in str(refused.value)


def test_a_batch_with_a_mask_that_is_more_than_padding_is_refused(sp: SequenceParallel) -> None:
    ids = torch.tensor([[3, 4, 5]])
    for mask, words in (
        (torch.ones(1, 1, 3, 3, dtype=torch.bool), "attention_mask of shape \\(1, 1, 3, 3\\)"),
        (torch.zeros(1, 3), "attention_mask of shape \\(1, 3\\) and type float32"),
        (torch.tensor([[True, False, True]]), "attention_mask with holes in row 0"),
    ):
        with pytest.raises(BatchError, match=words):
            sp.shard({"input_ids": ids, "attention_mask": mask})


# -- models for text and images ---------------------------------------------------------------------------------------

MULTIMODAL = {
    "Gemma3": GEMMA3,
    "Llava": {},
    "Mistral3": {"head_dim": 8},
}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_multimodal_model_without_axes_trains_on_text_exactly(sp: SequenceParallel, step: Step, name: str) -> None:
    with keep_float64():
        model = build(f"{name}ForConditionalGeneration", **MULTIMODAL[name]).double()
        with torch.no_grad():
            theirs = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in BATCH]
        right_loss, right = oracle.run_model(model, [BATCH])
        loss = sp.loss(prepare(model, sp), step)
        loss.backward()
        oracle.assert_close(model(**step.inputs).logits[0], torch.cat(theirs), "logits")
        oracle.assert_close(loss, right_loss, "loss")
        text = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert text.keys() == {name for name in right if "vision" not in name and "projector" not in name}
        oracle.assert_same_grads(text, {name: right[name] for name in text})


@pytest.mark.parametrize("name", MULTIMODAL)
def test_an_image_does_not_reach_the_model(sp: SequenceParallel, step: Step, name: str) -> None:
    model = prepare(build(f"{name}ForConditionalGeneration", **MULTIMODAL[name]), sp)
    image = torch.randn(1, 3, 28, 28)
    with pytest.raises(BatchError, match="a batch with 'pixel_values'"):
        sp.shard({"input_ids": [[3, 4, 5]], "pixel_values": image})
    more = {"image_sizes": torch.tensor([[28, 28]])} if name == "Mistral3" else {}
    with pytest.raises(ModelError, match="Attention"):
        model(**step.inputs, pixel_values=image, **more)


def test_tokens_of_an_image_that_see_each_other_are_refused(sp: SequenceParallel, step: Step) -> None:
    model = prepare(build("Gemma3ForConditionalGeneration", **GEMMA3), sp)
    with pytest.raises(ModelError, match="a mask rule of its own for the layers of Gemma3Text"):
        model(**step.inputs, token_type_ids=torch.tensor([[0, 1, 1, 0, 0, 0, 0, 0]]))
