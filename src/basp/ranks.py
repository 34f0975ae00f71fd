"""Ranks: processes that this one starts, or this one as one of torchrun's. The first that fails ends all of them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from basp.errors import BaspError, ConfigError, TrainingError
from basp.processes import end_with_parent, threads_for

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_TOLD_CHARACTERS = 20_000
"""Of a traceback's end: what a dead rank's pipe can hold until it is read."""


@dataclass(frozen=True)
class Place:
    """Where this rank is: in the world, on its node, and on which device."""

    rank: int
    world: int
    local_rank: int
    node: int
    device: torch.device


@dataclass(frozen=True)
class Launch:
    """How a command's ranks run, and what it says of them when they fail.

    Attributes:
        what: they are ranks of: "a check".
        backend: of the default group, "nccl" or "gloo".
        timeout: seconds that a collective waits for the other ranks.
        lighter: what to do when memory runs out: "use a smaller model".
        preload: modules that local ranks import, loaded once for all of them.
        deadline: seconds for all that local ranks do; None: as long as it takes.
    """

    what: str
    backend: str
    timeout: float
    lighter: str
    preload: tuple[str, ...]
    deadline: float | None = None


def find_backend(asked: str) -> str:
    """``asked``, or for "auto" nccl where CUDA is available, else gloo."""
    if asked != "auto":
        return asked
    return "nccl" if torch.cuda.is_available() else "gloo"


def check_devices(backend: str, local_ranks: int) -> None:
    """Refuse more ranks on this node than it has devices for."""
    if backend == "nccl" and local_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{local_ranks} ranks with backend nccl on {torch.cuda.device_count()} CUDA devices",
            allowed="one device for each local rank",
            remedy="start fewer ranks, or choose backend gloo to run on the CPU",
        )


# ---- local ranks ---------------------------------------------------------------------------------------------------


def run_local(launch: Launch, ranks: int, function: Callable[..., None], *args: Any) -> None:
    """``function(place, *args)`` on ``ranks`` processes with a default group; returns when all have ended.

    They end with this process, however that ends, and on anything that interrupts the wait (Ctrl-C).

    Args:
        launch: how.
        ranks: number of processes.
        function: importable by name.
        args: picklable; results go to files.

    Raises:
        BaspError: what the lowest rank that refused raised.
        TrainingError: a rank failed, was ended by a signal or did not end in time. Then, too, every rank has ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(launch.preload))
    with tempfile.TemporaryDirectory(prefix="basp-") as folder:
        store = f"file://{folder}/store"
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_local_rank, args=(launch, rank, ranks, store, sender, function, args))
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            _wait(launch, processes, [receiver for receiver, _ in pipes])
        finally:  # on Ctrl-C, also while ranks are being started, or anything else that ends the wait
            started = [process for process in processes if process.pid is not None]
            for process in started:
                process.kill()
            for process in started:  # what they write must not come after a caller's tidying up
                process.join()


def _wait(launch: Launch, processes: list[Any], told: list[Connection]) -> None:
    end = None if launch.deadline is None else time.monotonic() + launch.deadline
    running = dict(enumerate(processes))
    while running:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not multiprocessing.connection.wait([process.sentinel for process in running.values()], left):
            raise TrainingError(
                f"ranks {sorted(running)} of {launch.what} did not end in time",
                allowed=f"ranks that end within {launch.deadline:g} seconds (--timeout)",
                remedy="give a larger model more time; a small one that hangs is a fault in basp: report it",
            )
        ended = {rank: process.exitcode for rank, process in running.items() if process.exitcode is not None}
        if any(ended.values()):
            time.sleep(0.2)  # ranks refuse together: the lowest may be a moment late
            raise _failure(launch, processes, told)
        for rank in ended:
            del running[rank]


def _failure(launch: Launch, processes: list[Any], told: list[Connection]) -> BaspError:
    """What to tell: a rank that a signal ended, else the refusal of the lowest rank, else the first traceback."""
    # The rank that fails first need not be the one that was killed: its peers lose the connection within milliseconds.
    for rank, process in enumerate(processes):
        if (process.exitcode or 0) < 0:
            return TrainingError(
                f"rank {rank} (process {process.pid}) was ended by {signal.Signals(-process.exitcode).name}",
                allowed="ranks that run until the end",
                remedy=f"SIGKILL is often the system running out of memory: {launch.lighter}",
            )
    failures = [(rank, *message) for rank, receiver in enumerate(told) if (message := _message(receiver))]
    for _, _, error in failures:
        if isinstance(error, BaspError):
            return error
    if failures:
        rank, _, text = min(failures, key=lambda failure: failure[1])
        said = f":\n{text}"
    else:
        rank = next(rank for rank, process in enumerate(processes) if process.exitcode)
        said = f" without a word, exit code {processes[rank].exitcode}"
    return TrainingError(
        f"rank {rank} of {launch.what} failed{said}",
        allowed="ranks that run until the end",
        remedy="this is a fault in basp or in what it calls: report it with the traceback above",
    )


def _message(receiver: Connection) -> tuple[float, BaspError | str] | None:
    """When a rank failed, and of what; None if it has not said so."""
    try:
        return receiver.recv() if receiver.poll() else None
    except EOFError:
        return None


def _local_rank(
    launch: Launch, rank: int, ranks: int, store: str, told: Connection, function: Callable[..., None], args: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends the ranks
    end_with_parent()
    place = Place(rank, ranks, rank, 0, _device(launch.backend, rank))
    if place.device.type == "cpu":
        torch.set_num_threads(threads_for(ranks))
    try:
        run_rank(launch, place, function, *args, init_method=store)
    except BaspError as error:
        told.send((time.monotonic(), error))
        raise SystemExit(1) from None
    except Exception:
        told.send((time.monotonic(), traceback.format_exc()[-_TOLD_CHARACTERS:]))
        raise SystemExit(1) from None


def run_rank(
    launch: Launch, place: Place, function: Callable[..., None], *args: Any, init_method: str = "env://"
) -> None:
    """``function(place, *args)`` in this process, in a default group with all other ranks."""
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    dist.init_process_group(
        launch.backend,
        init_method=init_method,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=launch.timeout),
        device_id=place.device if place.device.type == "cuda" else None,
    )
    function(place, *args)
    dist.destroy_process_group()


def _device(backend: str, local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")


# ---- under torchrun ------------------------------------------------------------------------------------------------


def under_torchrun() -> bool:
    """Whether this process is a rank already: of torchrun, or of whatever sets the same variables."""
    return "RANK" in os.environ


def torchrun_place(backend: str, *, ranks: int | None, setting: str) -> Place:
    """This process's place, as torchrun's environment says.

    Args:
        backend: of the default group.
        ranks: what the user asked for, if anything.
        setting: the name of that, "--ranks".

    Raises:
        ConfigError: an incomplete environment, another number of ranks, or too few devices.
    """
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing:
        raise ConfigError(
            f"RANK in the environment, but not {', '.join(missing)}",
            allowed="all of torchrun's variables, or no RANK",
            remedy="start with torchrun, or unset RANK and use --ranks",
        )
    world, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if ranks not in (None, world):
        raise ConfigError(
            f"{setting} is {ranks} under a torchrun of {world}",
            allowed=f"{world}, or leave it out",
            remedy="torchrun's --nproc-per-node and --nnodes decide the number of ranks",
        )
    check_devices(backend, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    node = int(os.environ.get("GROUP_RANK", 0))
    return Place(int(os.environ["RANK"]), world, local_rank, node, _device(backend, local_rank))


@contextmanager
def torchrun_rank(place: Place) -> Iterator[None]:
    """Around all that a rank of torchrun's does. The process ends with the block, if that ends well."""
    try:
        with sigterm_as_exit():  # which torchrun sends to the others when one rank fails
            yield
    except BaspError as error:
        if place.rank != 0:  # the command prints rank 0's errors; one that only this rank has would go unseen
            print(f"basp: error on rank {place.rank}: {error}", file=sys.stderr, flush=True)
        raise
    # As processes of our own do: torch's threads may still run, and the interpreter's teardown would abort on them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Within it, SIGTERM (a batch system's notice) unwinds like Ctrl-C: ranks end, folders are tidied."""

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
