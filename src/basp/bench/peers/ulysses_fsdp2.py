"""Ulysses as yunchang ships it, every sequence over all ranks, under FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from basp.bench.contender import Unavailable, Workload
from basp.bench.peers.padded import (
    Attention,
    FsdpContender,
    build_with,
    check_heads,
    describe_padding,
    read_config,
)

NAME = "fsdp2-ulysses"


def build(workload: Workload, device: torch.device) -> FsdpContender:
    """Called on every rank after ``init_process_group``.

    Raises:
        Unavailable: without yunchang, or with heads that the ranks cannot share.
    """
    group = dist.group.WORLD
    assert group is not None
    ranks = dist.get_world_size()
    config = read_config(workload)
    heads = check_heads(config, ranks)
    return FsdpContender(
        build_with(ulysses_attention(), workload, name="basp_bench_ulysses"),
        workload,
        device,
        name=NAME,
        does=f"yunchang's all-to-all around torch's sdpa, every sequence over all {ranks} ranks; "
        f"{describe_padding([workload.lengths], ranks)}; {heads}",
        own=slice(None),
        group=group,
    )


def ulysses_attention() -> Attention:
    """Attention whose heads the ranks of ``sequence_group`` share, with yunchang's all-to-alls.

    Raises:
        Unavailable: yunchang is not installed.
    """
    try:
        from yunchang.comm import SeqAllToAll4D  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Unavailable(
            f"no yunchang: {error}",
            allowed="yunchang 0.6.4",
            remedy="pip install -r bench/requirements.txt",
        ) from error

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        scaling: float,
        sequence_group: dist.ProcessGroup,
        **_: Any,
    ) -> tuple[Tensor, None]:
        repeats = max(1, dist.get_world_size(sequence_group) // key.shape[1])
        # [B, H, T / N, D] -> [B, T / N, H, D] -> [B, T, H / N, D] -> [B, H / N, T, D]
        q, k, v = (
            SeqAllToAll4D.apply(sequence_group, x.transpose(1, 2), 2, 1).transpose(1, 2)
            for x in (query, key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return SeqAllToAll4D.apply(sequence_group, out.transpose(1, 2), 1, 2), None

    return attention
