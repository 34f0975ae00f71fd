"""A command on every rank of a lab: started, its output kept or shown, ended all together."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import IO, Any

from basp.errors import ConfigError, TrainingError
from basp.lab import sweep
from basp.lab.layout import Shape, rank_environment
from basp.lab.watcher import Watcher
from basp.processes import threads_for

_GRACE_SECONDS = 3.0
"""Between asking ranks to end and killing them."""
_TAIL_LINES = 20
_ENDED_BY_US = {-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGKILL}


class Run:
    """A command that runs on every rank of a lab. As a context manager, it ends with the block.

    Rank 0 writes to this process's own output. What the others write is kept, its last lines, for when they fail.

    Args:
        lab: its name.
        shape: its size.
        command: the program and its arguments; no shell.
        env: variables beside this process's own and those that torchrun sets.
        show_all: show every rank's output, each line with its rank before it.
        mark: by which its processes are found, unlike any other run's.
        watched: start a watcher, because no other would end the ranks when this process is killed.
    """

    def __init__(
        self,
        lab: str,
        shape: Shape,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        show_all: bool = False,
        mark: str,
        watched: bool,
    ) -> None:
        self._shape, self._mark = shape, mark
        self._ranks: list[_Rank] = []
        self._failed: dict[int, int] = {}
        threads = {"OMP_NUM_THREADS": str(threads_for(shape.ranks))}
        # Below the ports that the kernel gives to those who ask for any; two runs in one lab hardly draw the same.
        port = 20_000 + secrets.randbelow(10_000)
        given = {**(env or {}), sweep.MARK: mark}
        _check_command(command, {**os.environ, **given})
        self._watcher = Watcher(mark) if watched else None
        try:
            for rank in range(shape.ranks):
                told = {**threads, **os.environ, **rank_environment(rank, shape, master_port=port), **given}
                namespace = sweep.node_namespace(lab, rank // shape.ranks_per_node)
                self._ranks.append(_Rank(rank, namespace, command, told, show_all=show_all))
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    def poll(self) -> int | None:
        """None while ranks run and none has failed; else the code of the first that failed, or 0."""
        if not self._failed:  # those that fail later do so because of these
            codes = {rank.number: rank.process.poll() for rank in self._ranks}
            self._failed = {rank: code for rank, code in codes.items() if code}
            if not self._failed:
                return None if None in codes.values() else 0
        failed = list(self._failed.values())
        # A rank that a signal ended is the cause: its peers lose their connections to it within milliseconds.
        return next((128 - code for code in failed if code < 0), failed[0])

    def wait(self, timeout: float | None = None) -> int:
        """The command's exit code: that of the first rank that failed, by a signal 128 + its number; else 0.

        When this returns or raises, whatever the ranks started has ended.

        Raises:
            TrainingError: ranks still ran after ``timeout`` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            while (code := self.poll()) is None:
                running = [rank for rank in self._ranks if rank.process.returncode is None]
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    late = ", ".join(str(rank.number) for rank in running)
                    raise TrainingError(
                        f"ranks {late}, still running after {timeout:g} s",
                        allowed="ranks that end in time",
                        remedy="look for a rank that waits for another, or give a longer timeout",
                    )
                wait([rank.ended for rank in running], left)
            return code
        finally:
            self.stop()

    def output(self, rank: int) -> str:
        """The last lines that a rank wrote, as far as they were kept; empty for rank 0 where it writes for itself."""
        return "".join(self._ranks[rank].lines)

    def failures(self) -> str:
        """Which ranks failed by themselves, and their last lines; empty if none did."""
        texts = []
        for rank in self._ranks:
            code = rank.process.returncode
            if not code or (code in _ENDED_BY_US and rank.number not in self._failed):
                continue
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            node = rank.number // self._shape.ranks_per_node
            tail = "".join(f"  {line.rstrip()}\n" for line in list(rank.lines)[-_TAIL_LINES:])
            texts.append(f"rank {rank.number} on node {node} {how}\n{tail}")
        return "".join(texts)

    def stop(self) -> None:
        """End what still runs: asked first, killed after three seconds, with all that descends from it."""
        _signal_groups(self._ranks, signal.SIGTERM)
        until = time.monotonic() + _GRACE_SECONDS
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))
        _signal_groups(self._ranks, signal.SIGKILL)
        sweep.end_marked(self._mark)
        for rank in self._ranks:
            rank.close()
        if self._watcher is not None:
            self._watcher.dismiss()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


class _Rank:
    """One process, in a session of its own: Ctrl-C reaches the run's owner alone, who ends all ranks."""

    def __init__(
        self, number: int, namespace: str, command: Sequence[str], env: Mapping[str, str], *, show_all: bool
    ) -> None:
        self.number = number
        self.lines: deque[str] = deque(maxlen=200)
        own = number == 0 and not show_all
        program = sweep.find_program("ip")
        assert program is not None, "check_able comes first"
        self.process = subprocess.Popen(
            [program, "netns", "exec", namespace, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=None if own else subprocess.PIPE,
            stderr=None if own else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.ended = os.pidfd_open(self.process.pid)
        self._reader: threading.Thread | None = None
        if self.process.stdout is not None:
            before = f"[rank {number}] " if show_all else None
            self._reader = threading.Thread(target=self._read, args=(self.process.stdout, before), daemon=True)
            self._reader.start()

    def _read(self, source: IO[str], before: str | None) -> None:
        for line in source:
            self.lines.append(line)
            if before is not None:
                sys.stdout.write(f"{before}{line.rstrip()}\n")
                sys.stdout.flush()

    def close(self) -> None:
        """Once nothing of it runs any more: reap it, take the last of its output."""
        self.process.wait()
        if self._reader is not None:
            self._reader.join(1.0)  # somebody who got away may hold the other end of its output
            assert self.process.stdout is not None
            if not self._reader.is_alive():
                self.process.stdout.close()
        if self.ended >= 0:
            os.close(self.ended)
            self.ended = -1


def _signal_groups(ranks: Sequence[_Rank], number: signal.Signals) -> None:
    """To each rank that still runs, and to its children, as far as they have not left its process group."""
    for rank in ranks:
        if rank.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, number)


def _check_command(command: Sequence[str], env: Mapping[str, str]) -> None:
    if not command:
        raise ConfigError("no command", allowed="a program and its arguments", remedy="give the command to run")
    if shutil.which(command[0], path=env.get("PATH", os.defpath)) is None:
        raise ConfigError(
            f"no command {command[0]!r}",
            allowed="a program on the PATH, or the path of one",
            remedy="check its name; a shell's own commands need a shell, as in: sh -c '...'",
        )
