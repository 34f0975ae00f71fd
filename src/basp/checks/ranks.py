"""Local ranks for one check: N gloo processes that run a function, and end with the process that started them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from basp.errors import BaspError, TrainingError
from basp.processes import end_with_parent, threads_for

_PRELOADED = ["torch", "torch._dynamo", "transformers", "basp.hf"]


def run_on_ranks(function: Callable[..., None], *args: Any, ranks: int, timeout: float) -> None:
    """``function(*args)`` on N local ranks, with a gloo default group; returns when all have ended.

    Args:
        function: importable by name.
        args: picklable; results go to files.
        ranks: N.
        timeout: seconds for all of it, and for each collective.

    Raises:
        BaspError: what the lowest rank that refused raised.
        TrainingError: a rank failed, died or did not end in time. Then, too, every rank has ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="basp-check-") as folder:
        store = Path(folder) / "store"
        told: Any = context.SimpleQueue()
        processes = [
            context.Process(target=_rank, args=(rank, ranks, store, timeout, told, function, args), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, told, time.monotonic() + timeout)
        finally:  # on Ctrl-C as well
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _wait(processes: list[Any], told: Any, deadline: float) -> None:
    running = dict(enumerate(processes))
    while running:
        sentinels = [process.sentinel for process in running.values()]
        if not multiprocessing.connection.wait(sentinels, max(0.0, deadline - time.monotonic())):
            raise TrainingError(
                f"ranks {sorted(running)} of a check did not end in time",
                allowed="ranks that end within --timeout (timeout=)",
                remedy="give a larger model more time; a small one that hangs is a fault in basp: report it",
            )
        ended = [rank for rank, process in running.items() if process.exitcode is not None]
        if any(running[rank].exitcode for rank in ended):
            raise _failure({rank: process.exitcode for rank, process in running.items()}, told)
        for rank in ended:
            del running[rank]


def _failure(exit_codes: dict[int, int | None], told: Any) -> BaspError:
    """The refusal of the lowest rank that told of one, else the first other failure."""
    time.sleep(0.2)  # ranks refuse together: the lowest may be a moment late
    failures: list[tuple[int, BaspError | str]] = []
    while not told.empty():
        failures.append(told.get())
    refusals = [(rank, error) for rank, error in failures if isinstance(error, BaspError)]
    if refusals:
        return min(refusals, key=lambda refusal: refusal[0])[1]
    rank = failures[0][0] if failures else next(rank for rank, code in exit_codes.items() if code)
    said = f":\n{failures[0][1]}" if failures else f" without a word, exit code {exit_codes[rank]}"
    return TrainingError(
        f"rank {rank} of a check failed{said}",
        allowed="ranks that run until the end",
        remedy="if it was ended by SIGKILL (-9), use a smaller model or fewer ranks; else report it with its traceback",
    )


def _rank(
    rank: int, ranks: int, store: Path, timeout: float, told: Any, function: Callable[..., None], args: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends the ranks
    end_with_parent()
    torch.set_num_threads(threads_for(ranks))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
        )
        function(*args)
        dist.barrier()
        dist.destroy_process_group()
    except BaspError as error:
        told.put((rank, error))
        raise SystemExit(1) from None
    except Exception:
        told.put((rank, traceback.format_exc()))
        raise SystemExit(1) from None
