"""All ranks of a group were given the same batch: compared by digest, before anything else depends on it.

Cost for each optimizer step: one pass of BLAKE2b over token ids and labels (about 1 GB/s on one core) and one
all-gather of 64 bytes per rank on a CPU group. In each micro-step the first layer of each head configuration compares
32 bytes more: heads, dims, the type of its rows, and its plan where that is not known to be equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from basp.errors import DisagreementError
from basp.plans import Ints

Digest = list[tuple[str, int | str]]
"""(what it is, a count or a hash in hex) in a fixed order."""


def digest_batches(
    batches: Sequence[Sequence[Ints]], labels: Sequence[Sequence[Ints]], *, strategy: str, average_ranks: int
) -> Digest:
    """What the ranks of a group must agree on for one optimizer step.

    Args:
        batches: token ids of each sequence of each micro-batch.
        labels: their labels, alike.
        strategy: its name.
        average_ranks: ranks that gradients are averaged over.
    """
    lengths = [np.asarray([len(sequence) for sequence in batch], dtype=np.int64) for batch in batches]
    return [
        ("number of micro-batches", len(batches)),
        ("number of sequences", sum(len(batch) for batch in batches)),
        ("sequence lengths", _hash(row.tobytes() for row in lengths)),
        ("token ids", _hash(sequence.tobytes() for batch in batches for sequence in batch)),
        ("labels", _hash(sequence.tobytes() for batch in labels for sequence in batch)),
        ("strategy", _hash([strategy.encode()])),
        ("number of ranks to average over", average_ranks),
    ]


def agree(
    digest: Digest,
    group: dist.ProcessGroup,
    refusal: Exception | None = None,
    *,
    allowed: str = "the same batch on every rank of the group: every rank is given all sequences and labels",
    remedy: str = "seed the sampler alike on these ranks, and do not shard the batch before basp does",
) -> None:
    """Compare ``digest`` over ``group``, a group that takes CPU tensors. Every rank raises if any differs.

    Args:
        digest: this rank's; as many entries on every rank.
        group: to compare over.
        refusal: why this rank refuses its own input; it is raised here once the other ranks have been told.
        allowed: what ranks have to have alike; ``remedy``: what to do where they do not.

    Raises:
        DisagreementError: ranks differ, naming which and in what, or another rank refused its input.
        Exception: ``refusal``.
    """
    # 63-bit hashes of the entries, after a flag: 1 where a rank refused, and nothing else of it is compared.
    mine = torch.tensor([int(refusal is not None), *(_number(value) for _, value in digest)], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    if refusal is not None:
        raise refusal
    ranks = dist.get_process_group_ranks(group)
    table = torch.stack(everyone).tolist()
    refused = [rank for rank, row in zip(ranks, table, strict=True) if row[0]]
    if refused:
        raise DisagreementError(
            f"{_ranks(refused)} refused the batch that it was given",
            allowed="the same valid batch on every rank of the group",
            remedy=f"read the error of {_ranks(refused)}",
        )
    for column, (name, _) in enumerate(digest, start=1):
        values = [row[column] for row in table]
        if len(set(values)) > 1:
            raise DisagreementError(_difference(name, values, ranks), allowed=allowed, remedy=remedy)


def _hash(parts: Iterable[bytes]) -> str:
    """A hash of byte strings, their borders included."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def _number(value: int | str) -> int:
    return value if isinstance(value, int) else int(value[:16] or "0", 16) >> 1


def _difference(name: str, values: list[int], ranks: list[int]) -> str:
    """Who is at odds with whom; nobody is singled out unless more than half of the ranks agree against them."""
    sides: dict[int, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        sides.setdefault(value, []).append(rank)
    largest = max(sides.values(), key=len)
    if 2 * len(largest) <= len(ranks):
        return f"{name} that differ between {' and '.join(_ranks(side) for side in sides.values())}"
    odd = [rank for rank in ranks if rank not in largest]
    has = "has" if len(odd) == 1 else "have"
    return f"{_ranks(odd)} {has} other {name} than the rest of the group ({_ranks(largest)})"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def cpu_group(group: dist.ProcessGroup, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """``group`` itself if it takes CPU tensors, else a gloo group of the same ranks.

    Only the ranks of ``group`` need to call this.
    """
    if "gloo" in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(sorted(ranks), backend="gloo", timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
