"""From a benchmark's job to ranks that measure it, and from their rows to tables and a picture."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from transformers.utils import logging as transformers_logging

from basp.bench.options import RunOptions, local_ranks_of
from basp.bench.plot import draw
from basp.bench.rows import read_rows, write_rows
from basp.bench.stamp import stamp
from basp.bench.table import heading, markdown, notes, rich_tables
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

ROWS = "rows.jsonl"

Measure = Callable[[Place, Any, Path], None]
"""What every rank does with a job; rank 0 writes rows to the path."""


def run_job(measure: Measure, job: Any, options: RunOptions) -> int:
    """Measure on local ranks, or as one rank of torchrun's; show what came of it; return 0."""
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


@contextmanager
def progress(place: Place) -> Iterator[Callable[[str], None]]:
    """Shows on rank 0's terminal what is done at the moment; what libraries have to say is left out."""
    transformers_logging.disable_progress_bar()
    if place.rank != 0:
        transformers_logging.set_verbosity_error()  # every rank would repeat the same warning
    logging.getLogger("basp").addHandler(logging.NullHandler())  # the table says which kernel was taken
    # On a terminal only: a status that moves is no use in a file.
    with Console(stderr=True, quiet=place.rank != 0).status("starting") as status:
        yield status.update


def gather_nodes(place: Place, given: tuple[int, ...] | None) -> list[int]:
    """Node of each rank: as given, or as each rank knows its own."""
    nodes = [0] * place.world
    dist.all_gather_object(nodes, place.node)
    return nodes if given is None else list(given)


def leave_rows(path: Path, place: Place, nodes: list[int], about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Rank 0 writes where this ran, what it was about, and the rows. All ranks call this last, and leave together."""
    if place.rank == 0:
        write_rows(path, [stamp(place, nodes) | about, *rows])
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
    for note in notes(environment, rows):
        console.print(f"- {note}")
    if out is not None:
        (out / "table.md").write_text(markdown(environment, rows), encoding="utf-8")
        draw(environment, rows, out / "plot.png")
        console.print(f"\nwritten to {out}: {ROWS}, table.md, plot.png")
