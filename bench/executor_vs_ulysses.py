"""basp's executor against a Ulysses layer written by hand, on 4 local gloo ranks with one thread each.

    python bench/executor_vs_ulysses.py [--pairs 8] [--tokens 2048] [--out executor.jsonl] [--profile]

Forward and backward of one attention layer over one sequence, which lies on all ranks: there the plan of ``basp`` *is*
Ulysses, and a general executor can only lose. First, outputs and gradients are compared. Then the two layers run
A B B A A B B A ... in the same processes after a warm-up, and every pair gives two ratios, basp / by hand:

- ``ratio``, of the time of the slowest rank: read the median and its spread (min, quartiles, max), never a single time.
  Ranks outnumber the cores of a small machine, and whatever else runs on it shows here. Goal: a median of at most 1.05.
- ``cpu``, of the processor seconds of all ranks together: what the executor itself costs, waiting left out. It hardly
  moves with load.

Rows of the table:

- ``attention``: sdpa inside, the whole layer. Attention dominates, so that differences are diluted as in training.
- ``exchange``: q + k + v inside in place of attention: packing, collectives, unpacking and nothing else.

Against ``three`` (q, k and v each in an all-to-all, as usual implementations do) and ``one`` (all three packed into
one, the best that a person writes by hand). ``--profile`` prints where rank 0's time goes in each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import basp
from basp.attention import AttentionSpec, Context, attend

RANKS, HEADS, KV_HEADS, HEAD_DIM = 4, 16, 4, 64

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [T, H, D], k [T, K, D], v [T, K, D] of this rank -> [T, H, D]"""

Kernel = Callable[..., Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=spec.causal, scale=spec.scale, enable_gqa=True)


def add(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Reads everything that was exchanged, and next to no time."""
    return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)


INSIDE: dict[str, Kernel] = {"attention": attention, "exchange": add}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="pairs with attention (4 times as many without)")
    parser.add_argument("--inside", choices=INSIDE, nargs="+", default=list(INSIDE), help="rows of the table")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each rank")
    parser.add_argument("--out", type=Path, help="JSONL file to write: a line for each row, after the environment")
    parser.add_argument("--profile", action="store_true", help="print torch.profiler's table of rank 0")
    args = parser.parse_args()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch", "torch.distributed", "basp.parallel"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            processes.Process(target=run_rank, args=(rank, f"file://{folder}/store", args)) for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; its traceback is above")


def run_rank(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    stamp = environment(args.tokens)
    say(json.dumps(stamp))
    say(f"\n{'inside':<15}{'plan':<9}{'against':<9}{'pairs':>6}{'basp ms':>9}{'hand ms':>9}", end="")
    say(f"{'ratio':>8}{'min':>7}{'q1':>7}{'q3':>7}{'max':>7}{'cpu':>8}{'min':>7}{'max':>7}")
    records = [stamp]
    for inside in args.inside:
        kernel, pairs = INSIDE[inside], args.pairs * (1 if inside == "attention" else 4)
        for strategy, against in (("ulysses", "three"), ("basp", "three"), ("ulysses", "one")):
            ours, theirs = layers(strategy, against, kernel, args.tokens)
            check(ours, theirs, args.tokens)
            record = {"kind": "ratio", "inside": inside, "strategy": strategy, "against": against}
            records.append(record | compare(ours, theirs, args.tokens, pairs))
            show(records[-1])
            if args.profile:
                profile(f"basp, {inside}", ours, args.tokens)
                profile(f"by hand ({against}), {inside}", theirs, args.tokens)
    if rank == 0 and args.out:
        args.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    dist.destroy_process_group()


def environment(tokens: int) -> dict[str, Any]:
    return {
        "kind": "environment",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "basp": basp.__version__,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "ranks": RANKS,
        "tokens_per_rank": tokens,
        "heads": f"{HEADS}/{KV_HEADS} of {HEAD_DIM}",
        "dtype": "float32",
    }


# ---- the two layers


def layers(strategy: str, against: str, kernel: Kernel, tokens: int) -> tuple[Layer, Layer]:
    sp = basp.SequenceParallel(dist.group.WORLD, strategy=strategy)
    context: Context = sp.shard([range(RANKS * tokens)]).context
    by_hand = ulysses_three if against == "three" else ulysses_one
    return lambda q, k, v: attend(q, k, v, context, kernel), lambda q, k, v: by_hand(q, k, v, kernel)


class AllToAll(torch.autograd.Function):
    """[N, ...] -> [N, ...]: block i to rank i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: D102
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: D102
        out = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, grads[0].contiguous())
        return out


def scatter_heads(x: Tensor) -> Tensor:
    """[T, H, D] -> [N * T, H / N, D]"""
    return AllToAll.apply(x.unflatten(1, (RANKS, -1)).transpose(0, 1).contiguous()).flatten(0, 1)


def gather_heads(x: Tensor) -> Tensor:
    """[N * T, H / N, D] -> [T, H, D]"""
    return AllToAll.apply(x.unflatten(0, (RANKS, -1)).contiguous()).transpose(0, 1).flatten(1, 2)


def attend_head_first(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return kernel(q, k, v, AttentionSpec(HEAD_DIM**-0.5))[0].transpose(0, 1)


def ulysses_three(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """One all-to-all for each of q, k and v."""
    return gather_heads(attend_head_first(scatter_heads(q), scatter_heads(k), scatter_heads(v), kernel))


def ulysses_one(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """q, k and v packed into one all-to-all."""
    packed = torch.cat([x.unflatten(1, (RANKS, -1)) for x in (q, k, v)], dim=2)  # [T, N, (H + 2 K) / N, D]
    received = AllToAll.apply(packed.transpose(0, 1).contiguous()).flatten(0, 1)
    parts = received.split([HEADS // RANKS, KV_HEADS // RANKS, KV_HEADS // RANKS], dim=1)
    return gather_heads(attend_head_first(*parts, kernel))


# ---- comparing them


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient, strided as a model's: views of one projection."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(tokens, 2 * (HEADS + KV_HEADS), HEAD_DIM, generator=generator)
    q, k, v, grad = x.split([HEADS, KV_HEADS, KV_HEADS, HEADS], dim=1)
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_(), grad.contiguous()


def step(layer: Layer, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    *qkv, grad = tensors
    out = layer(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def check(ours: Layer, theirs: Layer, tokens: int) -> None:
    tensors = inputs(tokens)
    for name, a, b in zip(("out", "dq", "dk", "dv"), step(ours, tensors), step(theirs, tensors), strict=True):
        error = float((a - b).abs().max() / b.abs().max())
        if error > 1e-5:
            raise AssertionError(f"{name} differs by {error:.1e}: times would compare different things")


def time_step(layer: Layer, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[float, float]:
    """Seconds until the slowest rank is through, from when all are here; and processor seconds of all of them."""
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    step(layer, tensors)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    cpu = torch.tensor(time.process_time() - start_cpu, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return seconds.item(), cpu.item()


def compare(ours: Layer, theirs: Layer, tokens: int, pairs: int) -> dict[str, Any]:
    tensors = inputs(tokens)
    for layer in (ours, theirs):
        time_step(layer, tensors)
    basp_times, hand_times = [], []
    for pair in range(pairs):
        order = [(ours, basp_times), (theirs, hand_times)]
        for layer, times in order[:: -1 if pair % 2 else 1]:  # whoever goes first gains or loses by it as often
            times.append(time_step(layer, tensors))
    both = list(zip(basp_times, hand_times, strict=True))
    return {
        "basp_s": [seconds for seconds, _ in basp_times],
        "hand_s": [seconds for seconds, _ in hand_times],
        "ratios": [a[0] / b[0] for a, b in both],
        "cpu_ratios": [a[1] / b[1] for a, b in both],
    }


def show(record: dict[str, Any]) -> None:
    ratios, cpu = record["ratios"], record["cpu_ratios"]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    times = "".join(f"{1e3 * statistics.median(record[name]):>9.1f}" for name in ("basp_s", "hand_s"))
    spread = "".join(f"{x:>7.3f}" for x in (min(ratios), low, high, max(ratios)))
    of_cpu = f"{statistics.median(cpu):>8.3f}{min(cpu):>7.3f}{max(cpu):>7.3f}"
    say(f"{record['inside']:<15}{record['strategy']:<9}{record['against']:<9}{len(ratios):>6}{times}", end="")
    say(f"{middle:>8.3f}{spread}{of_cpu}")


def profile(title: str, layer: Layer, tokens: int, repeats: int = 5) -> None:
    tensors = inputs(tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            dist.barrier()
            step(layer, tensors)
    say(f"\n{title}\n{profiler.key_averages().table(sort_by='self_cpu_time_total', row_limit=14)}")


def say(text: str, end: str = "\n") -> None:
    if dist.get_rank() == 0:
        print(text, end=end, flush=True)


if __name__ == "__main__":
    main()
