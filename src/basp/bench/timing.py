"""Steps in turns: timed, and once more with a stopwatch around their collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from basp.bench.stamp import sent_bytes
from basp.bench.stopwatch import Stopwatch, wait_for
from basp.ranks import Place


@dataclass
class Times:
    """One contender's steps, the same numbers on every rank; an entry for each round.

    Attributes:
        seconds: of the slowest rank, from when all were there.
        cpu: processor seconds of all ranks together; waiting may burn some.
        interface: bytes that the named interfaces of all nodes sent; empty without any.
        exchanging: seconds inside attention's collectives, in a step with the stopwatch, of the rank that was longest
            in them; ``gathering``: inside the collectives of weights and gradients.
        inside: bytes that attention's collectives sent between ranks of one node; ``across``: of two.
        calls: of attention's collectives, on rank 0.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    interface: list[int] = field(default_factory=list)
    exchanging: list[float] = field(default_factory=list)
    gathering: list[float] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    across: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


Batch = Callable[[int], Sequence[np.ndarray]]
"""The batch of a round."""

Step = Callable[[Sequence[np.ndarray]], object]
"""A contender's, of a batch."""


def time_steps(
    steps: Mapping[str, Step],
    batch: Batch,
    *,
    rounds: int,
    warmup: int,
    nodes: Sequence[int],
    interfaces: list[str],
    place: Place,
    say: Callable[[str], None],
) -> dict[str, Times]:
    """The times of every contender's steps. All ranks call this together.

    Args:
        steps: by label.
        batch: gives the token ids of a round.
        rounds: timed ones, and as many with the stopwatch.
        warmup: rounds before.
        nodes: node of each rank.
        interfaces: whose counters to read.
        place: of this rank.
        say: shows progress.
    """
    times = {label: Times() for label in steps}
    for number in range(warmup):
        say(f"warm-up {number + 1}/{warmup}")
        for step in steps.values():
            step(batch(number))
    for number in range(rounds):
        say(f"round {number + 1}/{rounds}")
        for label in turns(list(steps), number):
            _time_step(times[label], steps[label], batch(warmup + number), interfaces, place)
    for number in range(rounds):
        say(f"with stopwatch {number + 1}/{rounds}")
        for label in turns(list(steps), number):
            _watch_step(times[label], steps[label], batch(warmup + rounds + number), nodes, place.device)
    return times


def turns(labels: list[str], number: int) -> Iterator[str]:
    """A B C, then C B A, and so on: whoever goes first, or while a machine grows slower, gains by it as often."""
    return reversed(labels) if number % 2 else iter(labels)


def _time_step(times: Times, step: Step, batch: Sequence[np.ndarray], interfaces: list[str], place: Place) -> None:
    reads = interfaces if place.local_rank == 0 else []  # one rank of each node
    wait_for(place.device)
    before = sent_bytes(reads)
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    step(batch)
    wait_for(place.device)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    dist.barrier()  # other ranks of this node may still be sending
    after = sent_bytes(reads)
    slowest, total = _reduced([seconds], [cpu, (after or 0) - (before or 0)], place.device)
    times.seconds.append(slowest[0])
    times.cpu.append(total[0])
    if interfaces:
        times.interface.append(round(total[1]))


def _watch_step(
    times: Times, step: Step, batch: Sequence[np.ndarray], nodes: Sequence[int], device: torch.device
) -> None:
    wait_for(device)
    dist.barrier()
    with Stopwatch(device) as watch:
        step(batch)
        wait_for(device)
    same = np.asarray(nodes) == nodes[dist.get_rank()]
    sent = [int(watch.sent[same].sum()), int(watch.sent[~same].sum())]
    slowest, total = _reduced([watch.tokens.seconds, watch.weights.seconds], sent, device)
    times.exchanging.append(slowest[0])
    times.gathering.append(slowest[1])
    times.inside.append(round(total[0]))
    times.across.append(round(total[1]))
    times.calls.append(watch.tokens.calls)


def _reduced(
    largest: Sequence[float], summed: Sequence[float], device: torch.device
) -> tuple[list[float], list[float]]:
    """The largest over ranks of the first numbers, the sums over ranks of the others. float64 holds bytes exactly."""
    most = torch.tensor(largest, dtype=torch.float64, device=device)
    total = torch.tensor(summed, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return most.tolist(), total.tolist()
