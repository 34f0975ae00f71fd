"""The benchmark's parts: the stopwatch, memory, interface counters, spreads."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import basp
from basp.bench import stamp
from basp.bench.memory import PeakMemory
from basp.bench.rows import read_rows, spread
from basp.bench.stopwatch import Stopwatch
from basp.bench.timing import turns
from basp.errors import DataError
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def exchange_in_every_form(rank: int, world: int) -> list[Any]:
    """Rows of 12 bytes: rank r sends r + 1 rows to each; evenly; to the next rank; in a group of the last two ranks."""
    pair = dist.new_group([1, 2])
    before = (dist.all_to_all_single, dist.batch_isend_irecv, dist.all_reduce)
    with Stopwatch(CPU) as watch:
        uneven = torch.empty(sum(range(1, world + 1)), 3)
        mine = torch.full((world * (rank + 1), 3), 1.0 * rank)
        dist.all_to_all_single(uneven, mine, list(range(1, world + 1)), [rank + 1] * world)
        even = torch.empty(world, 3)
        work: Any = dist.all_to_all_single(output=even, input=torch.full((world, 3), 1.0 * rank), async_op=True)
        assert work.wait()
        assert work.wait()
        passed = torch.empty(3)
        operations = [
            dist.P2POp(dist.isend, torch.full((3,), 1.0 * rank), (rank + 1) % world),
            dist.P2POp(dist.irecv, passed, (rank - 1) % world),
        ]
        for each in dist.batch_isend_irecv(operations):
            each.wait()
        if rank:
            dist.all_to_all_single(torch.empty(2, 3), torch.ones(2, 3), group=pair)
        assert watch.weights.calls == 0
        summed, gathered, mine = torch.ones(3), torch.empty(world), torch.full((1,), 1.0 * rank)
        dist.all_reduce(summed)
        dist.all_reduce(summed, dist.ReduceOp.MAX, async_op=True).wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for these two
            dist.all_gather_into_tensor(gathered, mine)
            dist.reduce_scatter_tensor(mine, gathered, group=dist.group.WORLD)
    assert (dist.all_to_all_single, dist.batch_isend_irecv, dist.all_reduce) == before
    assert (summed.tolist(), gathered.tolist(), mine.item()) == ([world] * 3, list(range(world)), rank * world)
    assert watch.weights.calls == 4
    assert watch.weights.seconds > 0
    assert even[:, 0].tolist() == list(range(world))
    assert uneven[:, 0].tolist() == [source for source in range(world) for _ in range(source + 1)]
    assert passed.tolist() == [(rank - 1) % world] * 3
    assert watch.tokens.seconds > 0
    return [watch.sent.tolist(), watch.tokens.calls]


def test_the_stopwatch_counts_every_form_by_rank_of_the_world() -> None:
    told = run_ranks(3, exchange_in_every_form)
    row = 3 * 4
    assert told[0] == [[0, (1 + 1 + 1) * row, (1 + 1) * row], 3]
    assert told[1] == [[(2 + 1) * row, 0, (2 + 1 + 1 + 1) * row], 4]
    assert told[2] == [[(3 + 1 + 1) * row, (3 + 1 + 1) * row, 0], 4]


def wait_for_the_last(rank: int, world: int) -> float:
    with Stopwatch(CPU) as watch:
        time.sleep(0.5 if rank else 0.0)
        dist.all_to_all_single(torch.empty(world, 1), torch.ones(world, 1))
    return watch.tokens.seconds


def test_waiting_for_a_late_rank_is_no_time_of_the_exchange() -> None:
    assert max(run_ranks(2, wait_for_the_last)) < 0.4


def train_a_step(rank: int, world: int) -> bool:
    """Whether the stopwatch and basp's own counter agree, on the ids of an uneven batch."""
    sp = basp.SequenceParallel(dist.group.WORLD)
    model = basp.prepare(tiny_model("llama"), sp)
    step = sp.shard([np.arange(1, 9), np.arange(1, 4), np.arange(1, 6)])
    with Stopwatch(CPU) as watch:
        sp.loss(model, step).backward()
    assert watch.sent.sum() > 0
    return watch.sent.tolist() == (sp.counter.forward + sp.counter.backward).tolist()


def test_the_stopwatch_and_basps_counter_agree() -> None:
    assert all(run_ranks(3, train_a_step))


def measure_memory(rank: int, world: int) -> tuple[int | None, int | None]:
    memory = PeakMemory(CPU)
    kept = torch.ones(8 << 20, dtype=torch.uint8)
    torch.ones(256 << 20, dtype=torch.uint8)  # freed at once, before
    memory.restart()
    quiet = memory.peak()
    torch.ones(64 << 20, dtype=torch.uint8)
    return quiet, memory.peak() if kept[0] else None


def test_peak_memory_is_that_of_the_step_with_what_is_kept() -> None:
    ((quiet, peak),) = run_ranks(1, measure_memory)
    assert quiet is not None
    assert peak is not None
    assert 8 <= quiet / 2**20 < 40
    assert 72 <= peak / 2**20 < 110


@pytest.mark.parametrize(
    ("backend", "named", "found"),
    [
        ("gloo", "eth0", ["eth0"]),
        ("gloo", "eth", []),
        ("gloo", "eth0,eth10", ["eth0", "eth10"]),
        ("nccl", "eth", ["eth0", "eth1", "eth10"]),
        ("nccl", "=eth1", ["eth1"]),
        ("nccl", "^lo", []),
        ("nccl", "", []),
    ],
)
def test_interfaces_are_those_that_the_environment_names(
    backend: str, named: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{backend.upper()}_SOCKET_IFNAME", named)
    assert stamp.interfaces(backend, ["lo", "eth0", "eth1", "eth10"]) == found


def test_without_an_interface_nothing_is_read() -> None:
    assert stamp.sent_bytes([]) is None


def test_spreads_and_turns() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "min": 1.0, "q1": 2.0, "q3": 4.0, "max": 5.0}
    assert spread([2.0]) == {"median": 2.0, "min": 2.0, "q1": 2.0, "q3": 2.0, "max": 2.0}
    assert ["".join(turns(["A", "B", "C"], number)) for number in range(3)] == ["ABC", "CBA", "ABC"]


@pytest.mark.parametrize("text", ["", "{", '{"kind": "contender"}\n', json.dumps({"kind": "environment"}) + "\n[]\n"])
def test_files_that_are_no_rows_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"rows\.jsonl' cannot be read"):
        read_rows(tmp_path / "rows.jsonl")
