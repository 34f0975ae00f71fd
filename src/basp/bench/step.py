"""``basp bench step``: one training step, by several contenders in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from basp.bench.contender import Workload
from basp.bench.launching import gather_nodes, leave_rows, progress, run_job
from basp.bench.options import (
    StepOptions,
    check_options,
    labels_of,
    lengths_of,
    model_of,
    number_labels,
    read_label,
    text_of,
)
from basp.bench.registry import CONTENDERS
from basp.bench.rows import make_rows
from basp.bench.stamp import interfaces
from basp.bench.timing import time_steps
from basp.bench.trials import COMPARISON, Entrant, build_everywhere, make_batch, try_contenders
from basp.ranks import Place
from basp.train.settings import check_name


@dataclass(frozen=True)
class Job:
    """What every rank is given.

    Attributes:
        about: what the rows' first line tells beside the environment.
        entrants: by label; the baseline is first.
        required: labels without which there is no result.
        rounds: timed, and as many with the stopwatch.
        warmup: rounds before.
        nodes: node of each rank, where the launcher does not say; tests lay one machine out as several.
    """

    about: dict[str, Any]
    entrants: dict[str, Entrant]
    required: tuple[str, ...]
    rounds: int
    warmup: int
    nodes: tuple[int, ...] | None


def run_step(
    options: StepOptions,
    *,
    version: str,
    known: dict[str, str] | None = None,
    nodes: Sequence[int] | None = None,
) -> int:
    """Run ``basp bench step``; returns 0.

    Args:
        options: as parsed.
        version: of basp, for the stamp.
        known: builders of more contenders, by name.
        nodes: node of each rank, instead of what the launcher says.

    Raises:
        ConfigError: options that are refused.
        BaspError: what a rank raised; then every rank has ended.
    """
    check_options(options)
    builders = {name: each.builder for name, each in CONTENDERS.items()} | (known or {})
    labels = labels_of(options)
    asked = [read_label(label) for label in labels]
    for name, _ in asked:
        check_name("a contender", name, builders)
    workload = Workload(
        model_of(options),
        lengths_of(options),
        options.optimizer,
        options.lr,
        options.dtype,
        options.seed,
        options.replicate,
        options.gather_ahead,
    )
    about: dict[str, Any] = {
        "what": f"one training step, {text_of(workload.lengths)}, {workload.dtype}",
        "basp": version,
    }
    about |= {"workload": vars(workload), "compared": COMPARISON}
    about |= {"rounds": options.rounds, "warmup": options.warmup}
    job = Job(
        about,
        {
            label: Entrant(builders[name], replace(workload, **own))
            for label, (name, own) in zip(number_labels(labels), asked, strict=True)
        },
        options.require,
        options.rounds,
        options.warmup,
        None if nodes is None else tuple(nodes),
    )
    return run_job(measure, job, options)


def measure(place: Place, job: Job, path: Path) -> None:
    """On every rank: trials, then times; rank 0 writes the rows."""
    nodes = gather_nodes(place, job.nodes)
    with progress(place) as say:
        trials = try_contenders(job.entrants, place.device, required=job.required, say=say)
        able = [trial.label for trial in trials if trial.refusal is None]
        contenders = {label: build_everywhere(job.entrants[label], place.device) for label in able}
        workload = job.entrants[able[0]].workload
        times = time_steps(
            {label: contender.step for label, contender in contenders.items()},
            lambda number: make_batch(workload, number),
            rounds=job.rounds,
            warmup=job.warmup,
            nodes=nodes,
            interfaces=interfaces(dist.get_backend()),
            place=place,
            say=say,
        )
    for contender in contenders.values():
        contender.close()
    leave_rows(path, place, nodes, job.about, make_rows(trials, times))
