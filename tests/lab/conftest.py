from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from basp.errors import LabError
from basp.lab import Cluster


@pytest.fixture(scope="session")
def able() -> None:
    """Skips where no lab can be made; where CI runs as root, that is a failure."""
    try:
        with Cluster(nodes=2, ranks_per_node=1) as cluster:
            assert cluster.run(["true"]) == 0
    except LabError as error:
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            raise
        pytest.skip(f"no lab can be made here: {error}")


Basp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def basp(able: None) -> Iterator[Basp]:
    """``basp("lab", "up")`` as a process of its own, among namespaces of its own.

    Names of network namespaces are files under /var/run/netns. The commands see an empty folder there, so that neither
    the default name nor ``down --all`` meets a lab that somebody has up on this machine.
    """
    inside = "mkdir -p /var/run/netns && mount -t tmpfs none /var/run/netns && echo ready && exec cat"
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", inside], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", f"--wd={os.getcwd()}"]
        command = [*enter, sys.executable, "-m", "basp", *words]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "120"}
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)

    try:
        yield run
    finally:
        run("lab", "down", "--all")
        holder.communicate(timeout=10)  # the end of its input ends it, and with it the namespaces' names
