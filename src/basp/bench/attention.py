"""``basp bench attention``: one attention layer, forward and backward, by several contenders in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from basp.bench.contender import Unavailable
from basp.bench.launching import gather_nodes, leave_rows, progress, run_job
from basp.bench.layers import LAYERS, Layer, Shape
from basp.bench.options import AttentionOptions, check_options, lengths_of, number_labels, text_of, with_required
from basp.bench.rows import make_rows
from basp.bench.stamp import interfaces
from basp.bench.timing import Step, time_steps
from basp.bench.trials import TOLERANCE, Trial, on_all_ranks, required_but_wrong
from basp.errors import ConfigError
from basp.ranks import Place
from basp.train.model import DTYPES
from basp.train.settings import check_name

_COMPARISON = (
    "Outputs and gradients of q, k and v are compared by a random projection of all their elements, against their "
    "norm; the largest difference is shown."
)


@dataclass(frozen=True)
class Job:
    """What every rank is given.

    Attributes:
        about: what the rows' first line tells beside the environment.
        shape: of the layer.
        names: of contenders, by label; the baseline is first.
        options: as parsed.
        nodes: node of each rank, where the launcher does not say; tests lay one machine out as several.
    """

    about: dict[str, Any]
    shape: Shape
    names: dict[str, str]
    options: AttentionOptions
    nodes: tuple[int, ...] | None


def run_attention(options: AttentionOptions, *, version: str, nodes: Sequence[int] | None = None) -> int:
    """Run ``basp bench attention``; returns 0.

    Args:
        options: as parsed.
        version: of basp, for the stamp.
        nodes: node of each rank, instead of what the launcher says.

    Raises:
        ConfigError: options that are refused.
        BaspError: what a rank raised; then every rank has ended.
    """
    check_options(options)
    if options.heads % options.kv_heads:
        raise ConfigError(
            f"{options.heads} query heads with {options.kv_heads} kv heads",
            allowed="query heads that are a multiple of the kv heads",
            remedy="change --heads or --kv-heads",
        )
    names = with_required(options.contenders, options.require)
    for name in names:
        check_name("a contender", name, LAYERS)
    shape = Shape(lengths_of(options), options.heads, options.kv_heads, options.head_dim, options.inside)
    what = "one attention layer" if shape.inside == "attention" else "the exchange of one attention layer"
    heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}"
    about: dict[str, Any] = {"what": f"{what}, {text_of(shape.lengths)}, {heads}, {options.dtype}", "basp": version}
    labels = dict(zip(number_labels(names), names, strict=True))
    about |= {"shape": vars(shape), "compared": _COMPARISON, "rounds": options.rounds, "warmup": options.warmup}
    return run_job(measure, Job(about, shape, labels, options, None if nodes is None else tuple(nodes)), options)


def measure(place: Place, job: Job, path: Path) -> None:
    """On every rank: comparison, then times; rank 0 writes the rows."""
    nodes, options = gather_nodes(place, job.nodes), job.options
    with progress(place) as say:
        trials, steps = _compare_all(job, place, say)
        times = time_steps(
            steps,
            lambda _: [],
            rounds=options.rounds,
            warmup=options.warmup,
            nodes=nodes,
            interfaces=interfaces(dist.get_backend()),
            place=place,
            say=say,
        )
    leave_rows(path, place, nodes, job.about, make_rows(trials, times))


def _compare_all(job: Job, place: Place, say: Callable[[str], None]) -> tuple[list[Trial], dict[str, Step]]:
    """What became of each contender, and the steps of those that compute what the first one does."""
    options = job.options
    data = _make_data(job.shape, dtype=DTYPES[options.dtype], seed=options.seed)
    trials: list[Trial] = []
    steps: dict[str, Step] = {}
    expected: list[Projection] | None = None
    for label, name in job.names.items():
        say(f"{label}: outputs and gradients")
        must = not trials or label in options.require
        trial, layer = _build(label, name, job.shape, must=must)
        trials.append(trial)
        if layer is None:
            continue
        step = partial(_step, layer, _own(data, layer, job.shape, place.device))
        found = [_project(tensor, layer.rows, len(data)) for tensor in step([])]
        if expected is None:
            expected = found
        else:
            _compare(trial, found, expected, tolerance=TOLERANCE[options.dtype], baseline=trials[0].label)
        if trial.refusal is None:
            steps[label] = step
        elif must:
            raise required_but_wrong(trial, f"the results of {trials[0].label}", options.dtype)
    return trials, steps


def _build(label: str, name: str, shape: Shape, *, must: bool) -> tuple[Trial, Layer | None]:
    try:
        layer = on_all_ranks(lambda: LAYERS[name](shape))
    except Unavailable as error:
        if must:
            raise
        return Trial(label, refusal=str(error)), None
    tokens = [0] * dist.get_world_size()
    dist.all_gather_object(tokens, len(layer.rows))
    return Trial(label, does=layer.does, tokens=tokens), layer


def _make_data(shape: Shape, *, dtype: torch.dtype, seed: int) -> Tensor:
    """[all tokens, H + K + K + H, D]: q, k, v and the output's gradient side by side, as one projection gives them."""
    generator = torch.Generator().manual_seed(seed)
    width = 2 * (shape.heads + shape.kv_heads)
    return torch.randn(sum(shape.lengths), width, shape.head_dim, generator=generator).to(dtype)


def _own(data: Tensor, layer: Layer, shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v of this rank's tokens, strided as a model's, and the output's gradient; a dummy token for none."""
    rows = torch.from_numpy(layer.rows)
    own = data[rows].to(device) if len(rows) else torch.zeros_like(data[:1], device=device)
    q, k, v, grad = own.split([shape.heads, shape.kv_heads, shape.kv_heads, shape.heads], dim=1)
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_(), grad.contiguous()


def _step(layer: Layer, tensors: tuple[Tensor, ...], _: object) -> list[Tensor]:
    """Output, and gradients of q, k and v."""
    *qkv, grad = tensors
    out = layer.forward(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


class Projection(NamedTuple):
    """A whole tensor over all ranks, whoever holds which rows: in a random direction, and its norm."""

    value: float
    norm: float


def _project(tensor: Tensor, rows: np.ndarray, tokens: int) -> Projection:
    """Of [T, H, D] whose rows are these of the whole batch's tokens. A tensor that is off by d is off by about |d|."""
    generator = torch.Generator().manual_seed(0)
    sizes = (tokens, *tensor.shape[1:])
    of_token, of_head, of_dim = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    own = tensor[: len(rows)].cpu().double()
    value = torch.einsum("thd,t,h,d->", own, of_token[torch.from_numpy(rows)], of_head, of_dim)
    sums = torch.stack([value, own.square().sum()]).to(tensor.device)
    dist.all_reduce(sums)
    return Projection(float(sums[0]), float(sums[1]) ** 0.5)


def _compare(
    trial: Trial, found: list[Projection], expected: list[Projection], *, tolerance: float, baseline: str
) -> None:
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    off = [abs(mine.value - its.value) / its.norm for mine, its in zip(found, expected, strict=True)]
    off = [each if math.isfinite(each) else math.inf for each in off]
    trial.difference = max(off)
    if trial.difference > tolerance:
        where = names[off.index(trial.difference)]
        trial.refusal = f"its {where} differs from {baseline}'s by {trial.difference:.1e} relative"
