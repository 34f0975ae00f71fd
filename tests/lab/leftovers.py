"""What a lab may leave behind: namespaces, links, processes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from basp.lab import sweep


def links() -> set[str]:
    """Interfaces of the namespace that tests run in."""
    return {line.split(":")[1].strip() for line in _ip("-oneline", "link", "show")}


def leftovers(lab: str) -> list[str]:
    """Namespaces of a lab, and processes with its name among their arguments or, as tests have it, their variables."""
    namespaces = [name for name in sweep.all_namespaces() if name.startswith(f"basp-{lab}-")]
    return namespaces + [f"{pid}: {words}" for pid, words, variables in _processes() if lab in words + variables]


def wait_until_gone(lab: str, seconds: float) -> float:
    """Seconds until nothing is left of a lab."""
    started = time.monotonic()
    while left := leftovers(lab):
        assert time.monotonic() - started < seconds, left
        time.sleep(0.02)
    return time.monotonic() - started


def _processes() -> list[tuple[int, str, str]]:
    """Everything that runs, other than this process: its arguments and its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words, variables = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
            except OSError:  # it has ended
                continue
            found.append((int(entry.name), words.replace(b"\0", b" ").decode(), variables.decode(errors="replace")))
    return found


def _ip(*words: str) -> list[str]:
    program = sweep.find_program("ip")
    assert program is not None
    return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout.splitlines()
