"""Run a function on N gloo ranks, each a process, and bring back what each returned, or the first traceback."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
# Ranks fork from a server that has these loaded: 0.1 s for four of them instead of seconds each.
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "transformers", "basp.hf"])


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time."""


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """``function(rank, world, *args)`` on every rank, with a gloo default group; what each returned, in rank order.

    Args:
        world: number of ranks.
        function: importable by name (defined at a module's top level).
        args: picklable.
        timeout: seconds for all of it; then every rank is killed.

    Raises:
        RankFailedError: with the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = [_context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            _context.Process(target=_rank, args=(rank, world, store, pipes[rank][1], timeout, function, args))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(receivers))) - results.keys())
            raise RankFailedError(f"ranks {missing} did not end in time")
        for receiver in ready:
            rank = receivers.index(receiver)  # type: ignore[arg-type]
            try:
                ok, value = pickle.loads(receivers[rank].recv_bytes())
            except EOFError:
                raise RankFailedError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankFailedError(f"rank {rank} of {len(receivers)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    rank: int, world: int, store: str, sender: Connection, timeout: float, function: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        result = function(rank, world, *args)
        sender.send_bytes(pickle.dumps((True, result)))  # plain: a connection would share tensors' memory, and race
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
