"""A static mesh beside one's batches: data parallel over sequences, Ulysses within each group, under FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from basp.bench.contender import Unavailable, Workload
from basp.bench.peers.padded import (
    FsdpContender,
    build_with,
    check_heads,
    describe_padding,
    read_config,
)
from basp.bench.peers.ulysses_fsdp2 import ulysses_attention

NAME = "static"


def build(workload: Workload, device: torch.device) -> FsdpContender:
    """Called on every rank after ``init_process_group``.

    Raises:
        Unavailable: without yunchang, or where neither sequences nor ranks divide the other, or with heads that the
            ranks of a group cannot share.
    """
    ranks, sequences = dist.get_world_size(), len(workload.lengths)
    groups, each = split(ranks, sequences)
    degree = ranks // groups
    config = read_config(workload)
    heads = check_heads(config, degree)
    model = build_with(ulysses_attention(), workload, name="basp_bench_static")
    # Consecutive ranks make a group, as they sit on one node.
    mesh = init_device_mesh(device.type, (groups, degree), mesh_dim_names=("dp", "sp"))
    parts = [slice(first, first + each) for first in range(0, sequences, each)]
    padding = describe_padding([workload.lengths[part] for part in parts], degree)
    return FsdpContender(
        model,
        workload,
        device,
        name=NAME,
        does=f"a fixed mesh of DP = {groups} x SP = {degree} with {each} of the sequences in each group, yunchang's "
        f"all-to-all around torch's sdpa; {padding}; {heads}",
        own=parts[mesh.get_local_rank("dp")],
        group=mesh.get_group("sp"),
    )


def split(ranks: int, sequences: int) -> tuple[int, int]:
    """(groups of ranks, sequences of each group).

    Raises:
        Unavailable: neither divides the other.
    """
    if ranks % sequences and sequences % ranks:
        raise Unavailable(
            f"{sequences} sequences on {ranks} ranks",
            allowed="sequences that divide the ranks, or that the ranks divide",
            remedy="choose another batch: a static mesh has no place for this one",
        )
    groups = min(ranks, sequences)
    return groups, sequences // groups
