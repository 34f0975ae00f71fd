"""The same optimizer step on N ranks, by basp's public calls; each rank leaves its part in a file."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from basp.casts import keep_float64
from basp.checks.subject import Subject, build
from basp.checks.trace import Record, Trace, gradients_of, sgd_step, watched
from basp.hf import prepare
from basp.parallel import SequenceParallel
from basp.ranks import Launch, Place, run_local


@dataclass(frozen=True)
class Job:
    """What every rank is given.

    Attributes:
        subject: the model.
        dtype: of its weights and computation.
        ids: [T] token ids of each sequence.
        labels: [T] of each, not shifted.
        ranks: N.
        strategy: as ``SequenceParallel`` takes it.
        kernel: alike.
        timeout: seconds.
        in_each_rank: "module:function", called with the prepared model and the ``SequenceParallel`` before the run.
            Tests plant faults with it.
    """

    subject: Subject
    dtype: torch.dtype
    ids: Sequence[NDArray[Any]]
    labels: Sequence[NDArray[Any]]
    ranks: int
    strategy: str
    kernel: str
    timeout: float
    in_each_rank: str | None = None


def casts(dtype: torch.dtype) -> AbstractContextManager[None]:
    """In float64 a model's own casts to float32 are removed; any other type runs as shipped."""
    return keep_float64() if dtype is torch.float64 else nullcontext()


def run_parallel(job: Job, folder: Path) -> Trace:
    """One optimizer step on ``job.ranks`` local ranks, put together to whole sequences.

    Args:
        job: what they run.
        folder: empty; for the ranks' files.

    Raises:
        BaspError: the model or a kernel is refused, or a rank failed.
    """
    launch = Launch(
        "a check",
        "gloo",
        job.timeout,
        lighter="use a smaller model or fewer ranks",
        preload=("torch", "torch._dynamo", "transformers", "basp.hf"),
        deadline=job.timeout,
    )
    run_local(launch, job.ranks, _run_rank, job, folder)
    files = [load_file(folder / f"{rank}.safetensors") for rank in range(job.ranks)]
    return Trace(
        losses=torch.stack([tensors["loss"] for tensors in files]),
        records=_whole_records(files, len(job.ids)),
        gradients=_under("parameter_gradient", files[0]),
        stepped=_under("stepped", files[0]),
    )


def _run_rank(place: Place, job: Job, folder: Path) -> None:
    transformers_logging.set_verbosity_error()  # every rank would repeat what the reference has said
    transformers_logging.disable_progress_bar()
    with casts(job.dtype):
        model = build(job.subject, job.dtype)
        sp = SequenceParallel(dist.group.WORLD, strategy=job.strategy, kernel=job.kernel)
        prepare(model, sp)
        if job.in_each_rank is not None:
            module, _, function = job.in_each_rank.partition(":")
            getattr(importlib.import_module(module), function)(model, sp)
        with watched(model) as records:
            step = sp.shard(job.ids, job.labels)
            loss = sp.loss(model, step)
            loss.backward()
        gradients = _mean_over_ranks(gradients_of(model), job.ranks)
    (record,) = records
    shards = [list(shard) for shard in step.context.layout.shards[sp.rank]]
    tensors = {"loss": loss.detach(), "shards": torch.tensor(shards, dtype=torch.int64).view(-1, 3)}
    tensors |= {f"output/{name}": value for name, value in record.outputs.items()}
    # A rank's loss is N times its share, for gradients are averaged over N ranks (basp.losses).
    tensors |= {f"gradient/{name}": value / job.ranks for name, value in record.gradients.items()}
    if sp.rank == 0:
        tensors |= {f"parameter_gradient/{name}": value for name, value in gradients.items()}
        tensors |= {f"stepped/{name}": value for name, value in sgd_step(model, gradients).items()}
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, folder / f"{sp.rank}.safetensors")
    dist.barrier()  # a rank that leaves while another still receives from it may cut that one off


def _mean_over_ranks(gradients: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """Averaged as DDP and FSDP2 do, in at least float32."""
    means: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        dist.all_reduce(total)
        means[name] = (total / ranks).to(gradient.dtype)
    return means


def _under(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{kind}/"): value for name, value in tensors.items() if name.startswith(f"{kind}/")}


def _whole_records(files: list[dict[str, Tensor]], sequences: int) -> list[Record]:
    """Each sequence's record, of the rows that its ranks own."""
    pieces: list[list[tuple[int, dict[str, Tensor]]]] = [[] for _ in range(sequences)]
    for tensors in files:
        row = 0
        for sequence, start, stop in tensors["shards"].tolist():
            rows = slice(row, row + stop - start)
            row = rows.stop
            per_token = {name: value for name, value in tensors.items() if name.startswith(("output/", "gradient/"))}
            pieces[sequence].append((start, {name: value[rows] for name, value in per_token.items()}))
    records: list[Record] = []
    for owned in pieces:
        parts = [tensors for _, tensors in sorted(owned, key=lambda piece: piece[0])]
        shared = set.intersection(*map(set, parts)) if parts else set()
        whole = {name: torch.cat([part[name] for part in parts]) for name in shared}
        records.append(Record(_under("output", whole), _under("gradient", whole)))
    return records
