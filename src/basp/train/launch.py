"""Start a training run: on local ranks of our own, or as one rank of torchrun's. A rank that fails ends all of them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes
from transformers.utils import logging as transformers_logging

from basp.errors import BaspError, ConfigError, TrainingError
from basp.processes import end_with_parent, threads_for
from basp.train.config import ParallelConfig, TrainConfig
from basp.train.loop import Place, train_rank
from basp.train.run_dir import RunDir, claim_run_dir
from basp.train.settings import dump_settings

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_GRACE_SECONDS = 1
"""Between asking the other ranks to end and killing them."""


def run(config: TrainConfig) -> int:
    """Train as ``config`` says; returns 0.

    Under torchrun (its RANK is set) this process is one rank, and ends here; else it starts
    ``config.parallel.ranks`` of them.

    Raises:
        BaspError: what the first failing rank raised; then every rank has ended and nothing is half-written.
    """
    if "RANK" in os.environ:
        _run_under_torchrun(config)
        # As processes of our own do: torch's threads may still run, and the interpreter's teardown would abort on them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    else:
        _check_backend(config.parallel, config.parallel.ranks)
        claimed = _claim(config)
        with _sigterm_as_exit():
            _finish_or_abandon(claimed, lambda: _run_local(config, claimed))
    return 0


def _run_under_torchrun(config: TrainConfig) -> None:
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing:
        raise ConfigError(
            f"RANK in the environment, but not {', '.join(missing)}",
            allowed="all of torchrun's variables, or no RANK",
            remedy="start with torchrun, or unset RANK and use --ranks",
        )
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if config.parallel.ranks not in (1, world):
        raise ConfigError(
            f"parallel.ranks is {config.parallel.ranks} under a torchrun of {world}",
            allowed=f"{world}, or leave it out",
            remedy="torchrun's --nproc-per-node and --nnodes decide the number of ranks",
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    _check_backend(config.parallel, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    place = Place(rank, world, local_rank, int(os.environ.get("GROUP_RANK", 0)), _device(config.parallel, local_rank))
    # Rank 0 claims before it joins the others, who wait for it in init_process_group.
    resolved = replace(config, parallel=replace(config.parallel, ranks=world))
    claimed = _claim(resolved) if rank == 0 else RunDir(Path(config.run_dir).expanduser().resolve())
    try:
        with _sigterm_as_exit():  # which torchrun sends to the others when one rank fails
            mine = claimed if rank == 0 else None
            _finish_or_abandon(mine, lambda: _join_and_train(config, place, claimed, "env://"))
    except BaspError as error:
        if rank != 0:  # the command prints rank 0's errors; one that only this rank has would go unseen
            print(f"basp: error on rank {rank}: {error}", file=sys.stderr, flush=True)
        raise


def _run_local(config: TrainConfig, claimed: RunDir) -> None:
    """Start ranks as processes and wait for them; the first failure ends all."""
    ranks = config.parallel.ranks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "basp.train.loop"])
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # ending ranks is no news
    failures: Any = context.SimpleQueue()
    others = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="basp-") as folder:
        store = f"file://{folder}/store"
        try:
            processes = start_processes(
                _local_rank, (config, claimed, store, failures), nprocs=ranks, join=False, start_method="forkserver"
            )
            assert processes is not None
            try:
                while not processes.join(timeout=1.0, grace_period=_GRACE_SECONDS):
                    pass
            except ProcessException as failure:
                raise _first_failure(failure, failures, processes.processes) from None
        finally:  # on Ctrl-C, also while ranks are being started, or anything else that ends the wait
            left = [process for process in multiprocessing.active_children() if process not in others]
            for process in left:
                process.kill()
            for process in left:  # what they write must not come after the tidying up
                process.join(_GRACE_SECONDS)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Within it, SIGTERM (a batch system's notice) unwinds like Ctrl-C: ranks end, the run folder is tidied."""

    def leave(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _local_rank(rank: int, config: TrainConfig, claimed: RunDir, store: str, failures: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends the ranks
    end_with_parent()
    device = _device(config.parallel, rank)
    if device.type == "cpu":
        torch.set_num_threads(threads_for(config.parallel.ranks))
    try:
        _join_and_train(config, Place(rank, config.parallel.ranks, rank, 0, device), claimed, store)
    except BaspError as error:
        failures.put((rank, error))
        raise SystemExit(1) from None


def _join_and_train(config: TrainConfig, place: Place, claimed: RunDir, init_method: str) -> None:
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    dist.init_process_group(
        _backend(config.parallel),
        init_method=init_method,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=config.parallel.timeout),
        device_id=place.device if place.device.type == "cuda" else None,
    )
    transformers_logging.disable_progress_bar()  # this process is ours, and has a progress bar of its own
    if place.rank != 0:
        transformers_logging.set_verbosity_error()  # every rank would repeat the same warning
    train_rank(config, place, claimed)
    dist.destroy_process_group()


def _claim(config: TrainConfig) -> RunDir:
    claimed = claim_run_dir(config.run_dir, overwrite=config.overwrite)
    claimed.config.write_text(dump_settings(config), encoding="utf-8")
    return claimed


def _finish_or_abandon(claimed: RunDir | None, train: Any) -> None:
    try:
        train()
    except BaseException:
        if claimed is not None and not claimed.abandon():
            print(f"basp: the run that was to be replaced is kept in {claimed.replaced}", file=sys.stderr)
        raise
    if claimed is not None:
        claimed.finish()


def _first_failure(failure: ProcessException, reported: Any, processes: list[Any]) -> BaspError:
    """What to tell: a rank that a signal ended, else the refusal of the lowest rank, else the first traceback."""
    for rank, process in enumerate(processes):
        # The rank that fails first need not be the one that was killed: its peers lose the connection within
        # milliseconds. SIGTERM is what the others get from us afterwards.
        signalled = -(process.exitcode or 0)
        if signalled > 0 and (rank == failure.error_index or signalled != signal.SIGTERM):
            return TrainingError(
                f"rank {rank} (process {process.pid}) was ended by {signal.Signals(signalled).name}",
                allowed="ranks that run until the end",
                remedy="SIGKILL is often the system running out of memory: lower batch.sequences or data.max_length, "
                "or turn on model.gradient_checkpointing",
            )
    refusals: list[tuple[int, BaspError]] = []
    while not reported.empty():
        refusals.append(reported.get())
    if refusals:
        return min(refusals, key=lambda refusal: refusal[0])[1]
    return TrainingError(
        f"rank {failure.error_index} failed:\n{failure}",
        allowed="ranks that run until the end",
        remedy="this is a fault in basp or in what it calls: report it with the traceback above",
    )


def _backend(parallel: ParallelConfig) -> str:
    if parallel.backend != "auto":
        return parallel.backend
    return "nccl" if torch.cuda.is_available() else "gloo"


def _device(parallel: ParallelConfig, local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if _backend(parallel) == "nccl" else torch.device("cpu")


def _check_backend(parallel: ParallelConfig, local_ranks: int) -> None:
    if _backend(parallel) == "nccl" and local_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{local_ranks} ranks with backend nccl on {torch.cuda.device_count()} CUDA devices",
            allowed="one device for each local rank",
            remedy='start fewer ranks, or set parallel.backend = "gloo" to run on the CPU',
        )
