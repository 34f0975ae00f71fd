"""``basp bench``: from options to ranks that measure, to rows, table and picture."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from transformers.utils import logging as transformers_logging

from basp.bench.contender import Workload
from basp.bench.options import (
    StepOptions,
    check_options,
    labels_of,
    lengths_of,
    local_ranks_of,
    model_of,
)
from basp.bench.plot import draw
from basp.bench.registry import CONTENDERS
from basp.bench.rows import make_rows, read_rows, write_rows
from basp.bench.stamp import interfaces, stamp
from basp.bench.table import heading, markdown, notes, rich_tables
from basp.bench.timing import time_steps
from basp.bench.trials import build_everywhere, make_batch, try_contenders
from basp.errors import ConfigError
from basp.ranks import (
    Launch,
    Place,
    check_devices,
    find_backend,
    run_local,
    run_rank,
    sigterm_as_exit,
    torchrun_place,
    torchrun_rank,
    under_torchrun,
)
from basp.train.settings import check_name

ROWS = "rows.jsonl"


@dataclass(frozen=True)
class Job:
    """What every rank is given.

    Attributes:
        what: title of the tables.
        version: of basp.
        workload: of the steps.
        builders: "module:function" by label; the baseline is first.
        required: labels without which there is no result.
        rounds: timed, and as many with the stopwatch.
        warmup: rounds before.
        nodes: node of each rank, where the launcher does not say; tests lay one machine out as several.
    """

    what: str
    version: str
    workload: Workload
    builders: dict[str, str]
    required: tuple[str, ...]
    rounds: int
    warmup: int
    nodes: tuple[int, ...] | None = None


def run_step(
    options: StepOptions,
    *,
    version: str,
    known: dict[str, str] | None = None,
    nodes: Sequence[int] | None = None,
) -> int:
    """``basp bench step``; returns 0.

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
    for name in labels:
        check_name("a contender", name, builders)
    workload = _workload(options)
    job = Job(
        f"one training step, {_batch_text(workload.lengths)}, {workload.dtype}",
        version,
        workload,
        {label: builders[name] for label, name in zip(_numbered(labels), labels, strict=True)},
        options.require,
        options.rounds,
        options.warmup,
        None if nodes is None else tuple(nodes),
    )
    return _run(job, options)


def _workload(options: StepOptions) -> Workload:
    return Workload(
        model_of(options),
        lengths_of(options),
        options.optimizer,
        options.lr,
        options.dtype,
        options.seed,
        options.replicate,
    )


def _run(job: Job, options: StepOptions) -> int:
    launch = Launch(
        "the benchmark",
        find_backend(options.backend),
        options.timeout,
        lighter="use a smaller model, shorter sequences or fewer contenders",
        preload=("torch", "transformers", "basp.bench.ours"),
    )
    out = None if options.out is None else Path(options.out).expanduser()
    if under_torchrun():
        place = torchrun_place(launch.backend, ranks=options.ranks, setting="--ranks")
        speaks = place.rank == 0
        with torchrun_rank(place), _rows_file(out if speaks else None) as path:
            run_rank(launch, place, measure, job, path)
            if speaks:
                _show(path, out)
        return 0
    ranks = local_ranks_of(options)
    check_devices(launch.backend, ranks)
    with sigterm_as_exit(), _rows_file(out) as path:
        run_local(launch, ranks, measure, job, path)
        _show(path, out)
    return 0


def measure(place: Place, job: Job, path: Path) -> None:
    """On every rank: trials, then times; rank 0 writes the rows."""
    transformers_logging.disable_progress_bar()
    logging.getLogger("basp").addHandler(logging.NullHandler())  # the table says which kernel was taken
    if place.rank != 0:
        transformers_logging.set_verbosity_error()  # every rank would repeat the same warning
    nodes = [0] * place.world
    dist.all_gather_object(nodes, place.node)
    nodes = nodes if job.nodes is None else list(job.nodes)
    backend = dist.get_backend()
    # On a terminal only: a status that moves is no use in a file.
    with Console(stderr=True, quiet=place.rank != 0).status("starting") as status:
        say: Callable[[str], None] = status.update
        trials = try_contenders(job.builders, job.workload, place.device, required=job.required, say=say)
        able = [trial for trial in trials if trial.refusal is None]
        contenders = {trial.label: build_everywhere(trial.builder, job.workload, place.device) for trial in able}
        times = time_steps(
            contenders,
            lambda number: make_batch(job.workload, number),
            rounds=job.rounds,
            warmup=job.warmup,
            nodes=nodes,
            interfaces=interfaces(backend),
            place=place,
            say=say,
        )
    for contender in contenders.values():
        contender.close()
    if place.rank == 0:
        about = {
            "what": job.what,
            "basp": job.version,
            "workload": vars(job.workload),
            "rounds": job.rounds,
            "warmup": job.warmup,
        }
        write_rows(path, [stamp(place, nodes) | about, *make_rows(trials, times)])
    dist.barrier()  # a rank that leaves while another still receives from it may cut that one off


@contextmanager
def _rows_file(out: Path | None) -> Iterator[Path]:
    """Where rows are written: in the user's folder, or in one that goes."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="basp-bench-") as folder:
            yield Path(folder) / ROWS
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {str(out)!r} cannot be made: {error.strerror}",
            allowed="a folder, new or there",
            remedy="choose another",
        ) from error
    if (out / ROWS).exists():
        raise ConfigError(
            f"--out {str(out)!r} holds the rows of another run",
            allowed=f"a folder without {ROWS}",
            remedy="choose another, or move that file away",
        )
    yield out / ROWS


def _show(path: Path, out: Path | None) -> None:
    """Print the tables; with a folder of the user's, write them and the picture there."""
    environment, rows = read_rows(path)
    console = Console(markup=False, highlight=False)
    console.print(heading(environment) + "\n")
    for table in rich_tables(rows):
        console.print(table)
    for note in notes(rows):
        console.print(f"- {note}")
    if out is not None:
        (out / "table.md").write_text(markdown(environment, rows), encoding="utf-8")
        draw(environment, rows, out / "plot.png")
        console.print(f"\nwritten to {out}: {ROWS}, table.md, plot.png")


def _numbered(names: Sequence[str]) -> list[str]:
    """The second "basp" becomes "basp #2"."""
    seen: Counter[str] = Counter()
    labels: list[str] = []
    for name in names:
        seen[name] += 1
        labels.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return labels


def _batch_text(lengths: Sequence[int]) -> str:
    if len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]:,} tokens"
    return f"{len(lengths)} sequences of {sum(lengths):,} tokens"
