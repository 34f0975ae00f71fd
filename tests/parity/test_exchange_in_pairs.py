"""Messages between ranks that have rows for one another are the collective with its uneven splits."""

from __future__ import annotations

import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from basp.collectives import exchange_in_pairs
from tests.support.ranks import run_ranks


def exchange_both_ways(rank: int, world: int) -> int:
    """How many random exchanges were compared, in a group of some ranks."""
    group = dist.new_group([1, 2, 3])
    chance = np.random.default_rng(0)
    compared = 0
    for _ in range(40):
        splits = chance.integers(0, 4, size=(3, 3)) * chance.integers(0, 2, size=(3, 3))
        if rank == 0:
            continue
        own = dist.get_rank(group)
        send, recv = splits[own].tolist(), splits[:, own].tolist()
        rows = torch.randn(sum(send), 5, dtype=torch.float64)
        expected, got = (torch.full((sum(recv), 5), torch.nan, dtype=torch.float64) for _ in range(2))
        dist.all_to_all_single(expected, rows, recv, send, group=group)
        exchange_in_pairs(got, rows, recv, send, group=group)
        assert torch.equal(got, expected)
        compared += 1
    return compared


def test_messages_carry_what_the_collective_carries() -> None:
    assert run_ranks(4, exchange_both_ways) == [0, 40, 40, 40]


def exchange_beside_a_late_rank(rank: int, world: int) -> float:
    """Seconds of an exchange between ranks 0 and 1, while rank 2, which has nothing to exchange, comes late."""
    rows, out = torch.ones(1, 1), torch.empty(1 if rank < 2 else 0, 1)
    splits = [[0, 1, 0], [1, 0, 0], [0, 0, 0]][rank]
    dist.barrier()
    if rank == 2:
        time.sleep(2.0)
    start = time.perf_counter()
    exchange_in_pairs(out, rows[: sum(splits)], splits, splits, group=dist.group.WORLD)
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds


def test_nobody_waits_for_a_rank_that_has_nothing_to_exchange() -> None:
    assert max(run_ranks(3, exchange_beside_a_late_rank)) < 1.0


def wait_for_one_that_never_comes(rank: int, world: int) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    assert group is not None
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            exchange_in_pairs(torch.empty(1, 1), torch.ones(1, 1), [0, 1], [0, 1], group=group)
        return str(caught.value)
    time.sleep(3.0)
    return ""


def test_waiting_for_a_message_ends_at_the_groups_timeout() -> None:
    assert "imed out" in run_ranks(2, wait_for_one_that_never_comes)[0]
