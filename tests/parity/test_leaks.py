"""Documents of one batch do not see each other: by every kernel, whatever a layer asks for (known failure 12)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import basp
from basp.attention import KERNELS
from basp.errors import ModelError
from tests.support.models import VOCABULARY, random_batch, tiny_model
from tests.support.ranks import run_ranks

# One expert, or none: which rows an expert multiplies together, and so their bits, would follow the others' tokens.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "window": ("mistral", {"window": 4}),
    "window in some layers": ("qwen2", {"window": 4}),
    "soft cap and window": ("gemma2", {"window": 4}),
    "sinks and window": ("gpt-oss", {"window": 4, "num_local_experts": 1, "num_experts_per_tok": 1}),
    "values of another dim": ("deepseek-v3", {"kv_heads": 4, "first_k_dense_replace": 2}),
}
BATCHES = [(8, 14, 3), (5,) * 6, (1, 9, 1)]


def leaks(rank: int, world: int, name: str, kernel: str) -> list[str]:
    """Where a document's change is seen in another's logits, or not in its own."""
    found: list[str] = []
    for strategy in ("basp", "ulysses"):
        model = build(name, kernel)
        sp = basp.SequenceParallel(dist.group.WORLD, strategy=strategy, kernel=kernel, device=model.device)
        basp.prepare(model, sp)
        for lengths in BATCHES[:1] if kernel == "flex" else BATCHES:  # flex takes half a second for each new shape
            batch = random_batch(lengths)
            before, owner = logits_of(model, sp, batch)
            for changed in range(len(lengths)):
                other = [(ids + 1) % VOCABULARY if i == changed else ids for i, ids in enumerate(batch)]
                moved = (logits_of(model, sp, other)[0] != before).any(-1).cpu().numpy()
                wrong = moved != (owner == changed)
                if wrong[owner >= 0].any():
                    found.append(f"{strategy} {lengths}: document {changed}, seen by {moved}, owners {owner}")
    return found


def build(name: str, kernel: str) -> Any:
    """Without gradients, which flex has on a GPU only; in half precision on a GPU for kernels that run nowhere else."""
    family, more = MODELS[name]
    model = tiny_model(family, dtype=torch.float32, **more).requires_grad_(False)
    types = KERNELS[kernel].abilities.types
    return model if types is None or "cpu" in types else model.to("cuda", torch.bfloat16)


@torch.no_grad()
def logits_of(model: Any, sp: basp.SequenceParallel, batch: list[np.ndarray]) -> tuple[torch.Tensor, np.ndarray]:
    """[T, V], and the document of each row: -1 for a dummy."""
    step = sp.shard(batch)
    shards = step.context.layout.shards[sp.rank]
    owner = np.repeat([sequence for sequence, _, _ in shards], [stop - start for _, start, stop in shards])
    logits = model(**step.inputs).logits[0]
    return logits, owner if len(owner) else np.full(len(logits), -1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_kf12_changing_a_document_leaves_every_bit_of_the_others_logits(name: str, kernel: str, ranks: int) -> None:
    if reason := KERNELS[kernel].missing():
        pytest.skip(reason)
    if ranks == 3 and kernel == "flex":
        pytest.skip("two ranks show it, and each shape takes flex half a second")
    model = build(name, kernel)
    if ranks > 1 and model.device.type == "cuda":
        pytest.skip("ranks over gloo exchange tensors of the CPU")
    try:
        basp.prepare(model, basp.SequenceParallel(kernel=kernel, device=model.device))
    except ModelError as error:
        if f"with kernel {kernel!r}" not in error.arrived:  # nothing else may keep these models from being prepared
            raise
        pytest.skip(str(error))
    assert run_ranks(ranks, leaks, name, kernel) == [[]] * ranks
