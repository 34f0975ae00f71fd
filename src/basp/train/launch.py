"""Start a training run, on local ranks of our own or as one rank of torchrun's, and leave its folder whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers.utils import logging as transformers_logging

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
from basp.train.config import ParallelConfig, TrainConfig
from basp.train.loop import train_rank
from basp.train.run_dir import RunDir, claim_run_dir
from basp.train.settings import dump_settings


def run(config: TrainConfig) -> int:
    """Train as ``config`` says; returns 0.

    Under torchrun (its RANK is set) this process is one rank, and ends here; else it starts
    ``config.parallel.ranks`` of them.

    Raises:
        BaspError: what the first failing rank raised; then every rank has ended and nothing is half-written.
    """
    launch = _launch(config.parallel)
    if under_torchrun():
        _run_under_torchrun(config, launch)
    else:
        ranks = config.parallel.ranks
        check_devices(launch.backend, ranks)
        claimed = _claim(config)
        with sigterm_as_exit():
            _finish_or_abandon(claimed, lambda: run_local(launch, ranks, _train, config, claimed))
    return 0


def _launch(parallel: ParallelConfig) -> Launch:
    return Launch(
        "the run",
        find_backend(parallel.backend),
        parallel.timeout,
        lighter="lower batch.sequences or data.max_length, or turn on model.gradient_checkpointing",
        preload=("torch", "transformers", "basp.train.loop"),
    )


def _run_under_torchrun(config: TrainConfig, launch: Launch) -> None:
    asked = None if config.parallel.ranks == 1 else config.parallel.ranks
    place = torchrun_place(launch.backend, ranks=asked, setting="parallel.ranks")
    with torchrun_rank(place):
        # Rank 0 claims before it joins the others, who wait for it in init_process_group.
        resolved = replace(config, parallel=replace(config.parallel, ranks=place.world))
        mine = _claim(resolved) if place.rank == 0 else None
        claimed = mine or RunDir(Path(config.run_dir).expanduser().resolve())
        _finish_or_abandon(mine, lambda: run_rank(launch, place, _train, config, claimed))


def _train(place: Place, config: TrainConfig, claimed: RunDir) -> None:
    transformers_logging.disable_progress_bar()  # this process is ours, and has a progress bar of its own
    if place.rank != 0:
        transformers_logging.set_verbosity_error()  # every rank would repeat the same warning
    train_rank(config, place, claimed)


def _claim(config: TrainConfig) -> RunDir:
    claimed = claim_run_dir(config.run_dir, overwrite=config.overwrite)
    claimed.config.write_text(dump_settings(config), encoding="utf-8")
    return claimed


def _finish_or_abandon(claimed: RunDir | None, train: Callable[[], None]) -> None:
    try:
        train()
    except BaseException:
        if claimed is not None and not claimed.abandon():
            print(f"basp: the run that was to be replaced is kept in {claimed.replaced}", file=sys.stderr)
        raise
    if claimed is not None:
        claimed.finish()
