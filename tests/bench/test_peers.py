"""The peers against one process: plain transformers, one sequence at a time, the mean over all tokens."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from basp.bench.contender import Unavailable, Workload
from basp.bench.peers import ring
from basp.bench.peers.context_parallel import ContextParallelContender
from basp.bench.peers.padded import check_heads, cut, read_config
from basp.bench.peers.static_dp_sp import split
from basp.bench.registry import CONTENDERS, load_builder
from tests.support.ranks import run_ranks

RANKS, STEPS, VOCABULARY = 4, 4, 97
NEEDS = {"fsdp2-ulysses": "yunchang", "static": "yunchang", "deepspeed": "deepspeed", "ring": "torch"}

PEERS = [name for name, known in CONTENDERS.items() if known.builder.startswith("basp.bench.peers.")]


def workload(lengths: tuple[int, ...], *, heads: int = 4, kv_heads: int = 2, **more: Any) -> Workload:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8 * heads, "intermediate_size": 24, "num_hidden_layers": 2}
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "initializer_range": 0.3}
    # A rate with which each of few steps shows in the next loss.
    return Workload({"model_type": "llama", **sizes, **shape}, lengths, **{"optimizer": "sgd", "lr": 0.1, **more})


WORKLOADS = {
    "two": workload((64, 64)),
    "two, adamw": workload((64, 64), optimizer="adamw", lr=1e-2),
    "four, all kv heads": workload((64,) * 4, kv_heads=4),
    "unequal": workload((64, 40, 23)),
    "unequal, adamw": workload((64, 40, 23), optimizer="adamw", lr=1e-2, kv_heads=4),
    "a rank with padding alone": workload((5,)),
    "more sequences than ranks": workload((16, 9, 16, 16, 16, 16, 16, 3)),
    "hybrid sharding": workload((64, 64), replicate=2),
    "gathered ahead": workload((64, 64), gather_ahead=1),
}
CANNOT = {
    "static": {"unequal", "unequal, adamw"},  # 3 sequences on 4 ranks
    "deepspeed": {"hybrid sharding"},
}


def batches_of(work: Workload) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(1)
    return [[rng.integers(0, VOCABULARY, size=length) for length in work.lengths] for _ in range(STEPS)]


def losses_of_one_process(work: Workload) -> list[float]:
    torch.manual_seed(work.seed)
    config = AutoConfig.for_model(**work.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = kinds[work.optimizer](model.parameters(), lr=work.lr, weight_decay=0.0)
    losses = []
    for batch in batches_of(work):
        predicted = sum(len(ids) - 1 for ids in batch)
        total = 0.0
        for ids in map(torch.from_numpy, batch):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            loss = F.cross_entropy(logits[:-1], ids[1:], reduction="sum") / predicted
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _run(rank: int, world: int, peer: str, works: dict[str, Workload]) -> dict[str, Any]:
    """Of each workload (losses, tokens), or None where the peer cannot do it; all in one process, one after another."""
    linear, seen = F.linear, {}
    for name, work in works.items():
        try:
            contender = load_builder(CONTENDERS[peer].builder)(work, torch.device("cpu"))
        except Unavailable:
            seen[name] = None
            continue
        assert contender.name == peer
        losses = []
        for batch in batches_of(work):
            assert F.linear is linear, "others that are timed between its steps must not run what it has replaced"
            losses.append(contender.step(batch))
        seen[name] = losses, contender.tokens
        contender.close()
        assert F.linear is linear
    return seen


@pytest.mark.timeout(400)  # DeepSpeed compiles an operator when it is first used on a machine
@pytest.mark.parametrize("peer", PEERS)
def test_losses_are_those_of_one_process(peer: str) -> None:
    if find_spec(NEEDS[peer]) is None:
        pytest.skip(f"{NEEDS[peer]} is not installed")
    ranks = run_ranks(RANKS, _run, peer, WORKLOADS, timeout=380)
    assert {name for name, seen in ranks[0].items() if seen is None} == CANNOT.get(peer, set())
    for name in WORKLOADS.keys() - CANNOT.get(peer, set()):
        expected = losses_of_one_process(WORKLOADS[name])
        assert np.ptp(expected) > 0.05, f"{name}: steps that change nothing prove nothing"
        losses = [seen[name][0] for seen in ranks]
        assert all(own == losses[0] for own in losses), f"{name}: ranks differ"
        np.testing.assert_allclose(losses[0], expected, rtol=1e-5, err_msg=name)
        assert sum(seen[name][1] for seen in ranks) >= sum(WORKLOADS[name].lengths)


def _refusals_without_packages(rank: int, world: int) -> dict[str, str]:
    sys.modules.update(dict.fromkeys(("yunchang", "deepspeed")))  # None: importing it fails
    refusals = {}
    for peer in PEERS:
        try:
            load_builder(CONTENDERS[peer].builder)(WORKLOADS["two"], torch.device("cpu"))
        except Unavailable as error:
            refusals[peer] = str(error)
    return refusals


def test_without_its_package_a_peer_says_how_to_install_it() -> None:
    refusals = run_ranks(2, _refusals_without_packages)[0]
    assert {peer: "bench/requirements.txt" in said for peer, said in refusals.items()} == {
        peer: True for peer in PEERS if peer != "ring"
    }


def test_a_static_mesh_needs_sequences_or_ranks_that_divide() -> None:
    assert [split(8, sequences) for sequences in (1, 2, 8, 16)] == [(1, 1), (2, 1), (8, 1), (8, 2)]
    with pytest.raises(Unavailable, match="3 sequences on 8 ranks"):
        split(8, 3)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(6, 3, 4), (12, 3, 4), (8, 6, 4)])
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, ranks: int) -> None:
    config = read_config(workload((8,), heads=heads, kv_heads=kv_heads))
    with pytest.raises(Unavailable, match=f"{heads} query and {kv_heads} kv heads on {ranks} ranks"):
        check_heads(config, ranks)


def test_attention_that_is_not_plain_is_refused() -> None:
    plain = workload((8,))
    with pytest.raises(Unavailable, match="sliding_window"):
        read_config(replace(plain, model=plain.model | {"model_type": "mistral", "sliding_window": 4}))


def test_a_slice_has_its_positions_and_the_labels_that_follow() -> None:
    sequences = [np.arange(10, 16), np.arange(20, 23)]
    first, second = (cut(sequences, ranks=2, rank=rank, device=torch.device("cpu")) for rank in (0, 1))
    assert first.input_ids.tolist() == [[10, 11, 12], [20, 21, 22]]
    assert first.targets.tolist() == [[11, 12, 13], [21, 22, -100]]
    assert second.input_ids.tolist() == [[13, 14, 15], [0, 0, 0]]
    assert second.targets.tolist() == [[14, 15, -100], [-100] * 3]
    assert second.position_ids.tolist() == [[3, 4, 5]] * 2


# ---- torch's ring


def _part_of_torchs_ring(rank: int, world: int, work: Workload, batch: list[np.ndarray]) -> list[Any]:
    contender = ContextParallelContender(work, torch.device("cpu"), name="ring")
    with contender.part(batch) as part:
        tables = [part.position_ids.tolist(), part.input_ids.tolist(), part.targets.tolist()]
    return [contender.tokens, *tables]


def test_torchs_ring_is_given_its_zig_zag_of_the_whole_batch() -> None:
    batch = [np.arange(10, 26), np.arange(40, 51)]
    told = run_ranks(2, _part_of_torchs_ring, workload((16, 11)), batch)
    assert [tokens for tokens, *_ in told] == [16, 16]
    assert told[0][1] == [[0, 1, 2, 3, 12, 13, 14, 15]] * 2  # the front and the back, on the first rank
    for row, sequence in enumerate(batch):
        whole = {}
        for _, positions, ids, targets in told:
            whole |= {
                at: (token, target) for at, token, target in zip(positions[row], ids[row], targets[row], strict=True)
            }
        following = [*sequence[1:], -100]
        assert [whole[at] for at in range(len(sequence))] == list(zip(sequence, following, strict=True))
        assert [whole[at][1] for at in range(len(sequence), 16)] == [-100] * (16 - len(sequence))


# ---- our ring's blocks


def tensors(seed: int, *, kv_heads: int = 4) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, 6, 8, generator=generator) for heads in (4, kv_heads, kv_heads, 4))


@pytest.mark.parametrize("causal", [True, False])
def test_a_block_in_plain_arithmetic_is_the_kernels(causal: bool) -> None:
    q, k, v, grad = tensors(0)
    options: Any = {"scale": 0.3, "causal": causal}
    out, lse = ring.attend_plainly(q, k, v, **options)
    torch.testing.assert_close(ring.attend_block(q, k, v, **options), (out, lse))
    plain = ring.differentiate_plainly(grad, q, k, v, out, lse, **options)
    torch.testing.assert_close(ring.differentiate_block(grad, q, k, v, out, lse, **options), plain)


def test_blocks_merge_into_attention_over_all_their_keys() -> None:
    (q, *near, _), (_, *far, _) = tensors(0, kv_heads=2), tensors(1, kv_heads=2)
    blocks = [ring.attend_block(q, *keys, scale=0.3, causal=False) for keys in (near, far)]
    k, v = (torch.cat(pair, dim=2) for pair in zip(near, far, strict=True))
    torch.testing.assert_close(ring.merge(*blocks[0], *blocks[1]), ring.attend_block(q, k, v, scale=0.3, causal=False))
