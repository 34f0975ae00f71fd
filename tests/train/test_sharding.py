"""How weights are gathered: when, and between whom. What comes of it is in test_equivalence.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from basp.errors import ConfigError
from basp.train.sharding import decoder_layers, shard_mesh, shard_model
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def order_of_gathers(rank: int, world: int, ahead: int) -> list[str]:
    """Of one step of a model with 3 layers: where gathers start ("wait" if they block), and where attention ends."""
    seen: list[str] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)

    def gather(*args: Any, **kwargs: Any) -> Any:
        seen.append("start" if kwargs["async_op"] else "wait")
        return original(*args, **kwargs)

    model = tiny_model("llama", num_hidden_layers=3)
    shard_model(model, shard_mesh(CPU), compute_dtype=torch.float64, gather_ahead=ahead)
    for index, layer in enumerate(decoder_layers(model)):
        layer.self_attn.register_forward_hook(lambda *_, index=index: seen.append(f"{index}"))
        layer.self_attn.register_full_backward_hook(lambda *_, index=index: seen.append(f"-{index}"))
    setattr(dist, name, gather)
    model(input_ids=torch.arange(8)[None], use_cache=False).logits.sum().backward()
    return seen


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        # The root's weights are gathered first, and once. Backward, FSDP2 looks one layer ahead by itself.
        (0, "wait wait 0 wait 1 wait 2 wait wait -2 wait -1 -0"),
        (1, "start start start 0 start 1 2 start start -2 start -1 -0"),
        (2, "start start start start 0 1 2 start start start -2 -1 -0"),
    ],
)
def test_weights_are_on_their_way_before_the_layer_in_front_is_computed(ahead: int, expected: str) -> None:
    for seen in run_ranks(2, order_of_gathers, ahead):
        assert " ".join(seen) == expected


def copies_of_a_rank(rank: int, world: int) -> tuple[Any, list[int], list[int]]:
    mesh = shard_mesh(CPU, replicate=2)
    groups = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp_shard", "dp_replicate")]
    with pytest.raises(ConfigError, match="3 copies of the model on 4 ranks"):
        shard_mesh(CPU, replicate=3)
    return mesh.mesh_dim_names, *groups


def test_neighbours_share_a_copy() -> None:
    told = run_ranks(4, copies_of_a_rank)
    assert [shard for _, shard, _ in told] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [replicate for _, _, replicate in told] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert told[0][0] == ("dp_replicate", "dp_shard")
