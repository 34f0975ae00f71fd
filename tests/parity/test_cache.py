"""Generation with a model that is prepared for several ranks: every rank refuses it, and nobody waits for another."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import DynamicCache

from basp import SequenceParallel, prepare
from basp.errors import ModelError
from tests.support.models import random_batch, tiny_model
from tests.support.ranks import run_ranks


def refusal(call: Callable[..., Any], **arguments: Any) -> str:
    with pytest.raises(ModelError) as refused:
        call(**arguments)
    return str(refused.value)


def generate_and_cache(rank: int, world: int, lengths: tuple[int, ...]) -> tuple[list[str], bool]:
    warnings.simplefilter("ignore")  # of transformers' own
    sp = SequenceParallel(dist.group.WORLD)
    model = prepare(tiny_model("qwen3"), sp)
    step, again = (sp.shard(random_batch(lengths)) for _ in range(2))
    ids = torch.tensor([[3, 4, 5]])
    messages = [refusal(model.generate, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)]
    cache = DynamicCache(config=model.config)
    plain = model(**step.inputs).logits
    filled = model(**step.inputs | {"use_cache": True, "cache": cache}).logits
    messages.append(refusal(model, **again.inputs | {"use_cache": True, "cache": cache}))
    loss = sp.loss(model, again)  # the ranks are still in step
    loss.backward()
    model.set_attn_implementation("sdpa")
    assert model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2).shape == (1, 5)
    return messages, bool(torch.isfinite(loss)) and torch.equal(plain, filled)


@pytest.mark.parametrize(("ranks", "lengths"), [(1, (9, 4)), (2, (9, 4)), (3, (13,)), (3, (2,))])
def test_generating_and_a_filled_cache_are_refused_on_every_rank(ranks: int, lengths: tuple[int, ...]) -> None:
    for messages, well in run_ranks(ranks, generate_and_cache, lengths):
        assert well
        assert "Qwen3Attention of layer 0 without a basp step" in messages[0]
        assert "queries in Qwen3Attention of layer 0" in messages[1]
        assert all("to generate, or to use the model without basp, call model.set_attn_impl" in m for m in messages)
