"""Removes a lab with everything that runs in it; as a program of its own, once the lab's owner is gone.

The program imports nothing but what the interpreter has loaded or is small: it is there for as long as a lab is, and
must start before the lab does. It waits on a file descriptor of its owner (a pidfd), which tells of any end, SIGKILL
included:

    python -I -S sweep.py PIDFD MARK [LAB]

It ends what carries the mark, and removes the lab if one is given.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

NAMESPACES = "/var/run/netns"  # where iproute2 keeps them
PREFIX = "basp-"
SWITCH = "-switch"
MARK = "BASP_LAB_RUN"
"""The variable by which processes of a lab's setup and of its runs are found, wherever they are: also on their way into
a namespace. A run's mark begins with that of the lab's owner."""

READY = b"ready"
"""What the program writes to its standard output, and closes it, when it has begun to wait."""

_PATIENCE_SECONDS = 4.0
_SETTLE_SECONDS = 1.0
"""For which the program looks again: what its owner was just starting when it was killed has no mark before it runs."""


def switch_namespace(lab: str) -> str:
    """The namespace that holds a lab's bridge. It is made first and so claims the name."""
    return f"{PREFIX}{lab}{SWITCH}"


def node_namespace(lab: str, node: int) -> str:
    """The namespace that is a lab's node."""
    return f"{PREFIX}{lab}-node{node}"


def all_namespaces() -> list[str]:
    """Every network namespace of this machine that has a name."""
    try:
        return sorted(os.listdir(NAMESPACES))
    except FileNotFoundError:  # none was ever made
        return []


def namespaces_of(lab: str) -> list[str]:
    """Namespaces of a lab, whole or half made. What comes last in a name decides: lab "a" has no part of "a-node1"."""
    start = node_namespace(lab, 0)[:-1]
    return [
        name
        for name in all_namespaces()
        if name == switch_namespace(lab) or (name.startswith(start) and name[len(start) :].isdigit())
    ]


def processes_in(namespaces: list[str]) -> list[int]:
    """Processes in any of these namespaces, other than this one."""
    wanted = {identity for name in namespaces if (identity := _identity(f"{NAMESPACES}/{name}"))}
    return [pid for pid in _others() if _identity(f"/proc/{pid}/ns/net") in wanted]


def processes_marked(mark: str) -> list[int]:
    """Processes that were started with a mark that begins so, and what descends from them, other than this one."""
    start = f"\0{MARK}={mark}".encode()
    return [pid for pid in _others() if start in b"\0" + _environment(pid)]


def end_marked(mark: str) -> bool:
    """Kill every process with this mark; whether none is left."""
    return _end(lambda: processes_marked(mark))


def remove(lab: str, mark: str | None = None) -> bool:
    """Kill whatever runs in a lab, or made it (``mark``), and remove it; whether nothing is left.

    Safe to run twice, also at the same time, and on a lab that is half made.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        # Who makes the lab goes first: once it has ended, nothing is added behind our back.
        ended = (mark is None or end_marked(mark)) and _end(lambda: processes_in(namespaces_of(lab)))
        left = namespaces_of(lab)
        if ended and not left:
            return True
        if time.monotonic() > until:
            return False
        for namespace in left:
            _ip("netns", "del", namespace)
        time.sleep(0.01)


def find_program(name: str) -> str | None:
    """Path of ``ip`` or ``tc``: they lie where not every user's PATH looks."""
    for folder in (*os.get_exec_path(), "/usr/sbin", "/sbin"):
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return None


def watch(pidfd: int, mark: str, lab: str | None) -> None:
    """Wait for the owner's end, then leave nothing of it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the owner, whose end we are there for
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    os.write(1, READY)
    os.close(1)
    poll.poll()
    until = time.monotonic() + _SETTLE_SECONDS
    while True:
        if lab is None:
            end_marked(mark)
        else:
            remove(lab, mark)
        if time.monotonic() > until:
            return
        time.sleep(0.05)


def _end(find) -> bool:
    """SIGKILL what ``find`` finds until it finds nothing: a process may fork before the signal reaches it."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while pids := find():
        if time.monotonic() > until:
            return False
        for pid in pids:
            try:  # noqa: SIM105  # the program does without contextlib
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # ended by itself meanwhile
                pass
        time.sleep(0.01)
    return True


def _ip(*words: str) -> None:
    """Run ``ip`` and let it fail: what it was to remove may be gone by another's hand; the caller looks again."""
    program = find_program("ip")
    if program is None:
        return
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    os.waitpid(os.posix_spawn(program, [program, *words], {}, file_actions=quiet), 0)


def _others() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:  # gone meanwhile, or a process that has ended and waits to be reaped
        return None
    return found.st_dev, found.st_ino


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
