"""How long a micro-step's plan and tables take on one core, and how large the tables are.

    python bench/plan_speed.py [--repeats 15] [--out plan_speed.jsonl]

Every line of the first table is ``basp.plan`` + ``compile_exchange`` of one rank + the transposes of its gathers: what
a rank computes on the CPU before the first layer of each micro-step, once for each head configuration. Read the total's
median; min and max over the repeats are its spread. Cases are interleaved, so that a busy machine slows all of them
alike. The rank with the largest tables is timed: all ranks wait for it. Goals, for ``basp``: 20 ms for 64 sequences on
8 ranks, 2 s for 4096 on 1024.

The second table is the bytes that one rank's tables hold for each token that it owns: memory that grows linearly with
local tokens gives the same figure on every line of a strategy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import basp
from basp.exchange import Exchange, Gather, compile_exchange

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


class Case(NamedTuple):
    """A batch on a cluster."""

    name: str
    strategy: str
    lengths: list[int]
    ranks: int
    goal_s: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="times of each small case (a fifth of the large)")
    parser.add_argument("--seed", type=int, default=0, help="of the random lengths")
    parser.add_argument("--out", type=Path, help="JSONL file to write: a line for each case, after the environment")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core: a rank has no more to spare
    stamp = environment()
    print(json.dumps(stamp))
    records = [*time_cases(cases(args.seed), args.repeats), *weigh_tables(args.seed)]
    if args.out:
        args.out.write_text("".join(json.dumps(record) + "\n" for record in (stamp, *records)))


def environment() -> dict[str, Any]:
    return {
        "kind": "environment",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "basp": basp.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def random_lengths(count: int, tokens: int, seed: int) -> list[int]:
    """``count`` lengths that sum to ``tokens``, drawn as long-tailed as documents are."""
    weights = np.random.default_rng(seed).lognormal(sigma=1.2, size=count)
    ends = np.round(np.cumsum(weights) / weights.sum() * (tokens - count)).astype(int) + np.arange(1, count + 1)
    return np.diff(ends, prepend=0).tolist()


def cases(seed: int) -> list[Case]:
    random, equal = random_lengths(64, 262144, seed), [4096] * 64
    return [
        Case("64 random on 8", "basp", random, 8, 0.020),
        Case("64 equal on 8", "basp", equal, 8, 0.020),
        Case("3 equal on 8", "basp", [87381] * 3, 8),
        Case("64 random on 8", "ulysses", random, 8),
        Case("64 equal on 8", "ulysses", equal, 8),
        Case("4096 random on 1024", "basp", random_lengths(4096, 1 << 24, seed), 1024, 2.0),
    ]


def slowest_rank(case: Case) -> int:
    """The rank with the most tokens in tables."""
    plan = basp.plan(case.lengths, ranks=case.ranks, heads=HEADS, kv_heads=KV_HEADS, strategy=case.strategy)
    ranks = range(case.ranks) if case.ranks <= 8 else range(0, case.ranks, 64)
    return max(ranks, key=lambda rank: table_bytes(compile_exchange(plan, rank, head_dim=HEAD_DIM)))


def time_cases(all_cases: list[Case], repeats: int) -> Iterator[dict[str, Any]]:
    print(
        f"\n{'case':<22}{'strategy':<10}{'plan':>9}{'compile':>9}{'transp.':>9}{'total':>9}{'min':>9}{'max':>9}  goal"
    )
    ranks = [slowest_rank(case) for case in all_cases]
    times: list[list[list[float]]] = [[] for _ in all_cases]
    for repeat in range(repeats):
        for number, case in enumerate(all_cases):
            if case.ranks <= 8 or repeat % 5 == 0:
                times[number].append(time_once(case, ranks[number]))
    for case, rank, rows in zip(all_cases, ranks, times, strict=True):
        totals = [sum(row) for row in rows]
        parts = [statistics.median(part) for part in zip(*rows, strict=True)]
        middle = statistics.median(totals)
        shown = "".join(f"{1e3 * seconds:>9.2f}" for seconds in (*parts, middle, min(totals), max(totals)))
        verdict = (
            "" if case.goal_s is None else f"{1e3 * case.goal_s:.0f} {'met' if middle <= case.goal_s else 'MISSED'}"
        )
        print(f"{case.name:<22}{case.strategy:<10}{shown}  {verdict}  (ms)")
        yield {
            "kind": "time",
            "case": case.name,
            "strategy": case.strategy,
            "tokens": sum(case.lengths),
            "rank": rank,
            "goal_s": case.goal_s,
            "plan_s": parts[0],
            "compile_s": parts[1],
            "transpose_s": parts[2],
            "totals_s": totals,
        }


def time_once(case: Case, rank: int) -> list[float]:
    clock = [time.perf_counter()]
    plan = basp.plan(case.lengths, ranks=case.ranks, heads=HEADS, kv_heads=KV_HEADS, strategy=case.strategy)
    clock.append(time.perf_counter())
    exchange = compile_exchange(plan, rank, head_dim=HEAD_DIM)
    clock.append(time.perf_counter())
    for gather in gathers(exchange):
        _ = gather.transpose
    clock.append(time.perf_counter())
    return np.diff(clock).tolist()


def gathers(exchange: Exchange) -> list[Gather]:
    """Those that have a table."""
    routes = [route for route in (exchange.dispatch, exchange.combine) if route is not None]
    return [gather for route in routes for gather in (route.send, route.recv) if gather.index is not None]


def table_bytes(exchange: Exchange) -> int:
    total = 0
    for gather in gathers(exchange):
        assert gather.index is not None
        first, rounds = gather.transpose
        total += gather.index.nbytes + first.nbytes + sum(rows.nbytes + places.nbytes for rows, places in rounds)
    return total


def weigh_tables(seed: int) -> Iterator[dict[str, Any]]:
    header = (
        f"{'tokens':>10}{'ranks':>7}  {'strategy':<10}{'local tokens':>13}{'table MiB':>11}{'bytes / local token':>21}"
    )
    print("\n" + header)
    for strategy in ("basp", "ulysses"):
        for tokens, ranks in ((1 << 15, 8), (1 << 17, 8), (1 << 19, 8), (1 << 19, 32), (1 << 21, 128)):
            lengths = random_lengths(max(2, ranks // 4), tokens, seed)  # long: most of what a rank owns is shared
            plan = basp.plan(lengths, ranks=ranks, heads=HEADS, kv_heads=KV_HEADS, strategy=strategy)
            rank = ranks // 2
            held, own = table_bytes(compile_exchange(plan, rank, head_dim=HEAD_DIM)), int(plan.tokens[rank])
            print(f"{tokens:>10}{ranks:>7}  {strategy:<10}{own:>13}{held / 2**20:>11.2f}{held / own:>21.1f}")
            yield {
                "kind": "memory",
                "strategy": strategy,
                "tokens": tokens,
                "ranks": ranks,
                "local_tokens": own,
                "table_bytes": held,
            }


if __name__ == "__main__":
    main()
