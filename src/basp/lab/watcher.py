"""Starts the small process that outlives this one just long enough to leave nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys

from basp.errors import LabError
from basp.lab import sweep


class Watcher:
    """Waits in a session of its own for the end of the process that started it, however that ends.

    Then it kills what carries ``mark`` and, if given one, removes ``lab``. ``dismiss`` it once that has been done.
    """

    def __init__(self, mark: str, lab: str | None = None) -> None:
        owner = os.pidfd_open(os.getpid())
        words = [str(owner), mark, *([] if lab is None else [lab])]
        try:
            # Without site packages and a user's settings it is small and starts in 15 ms.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", sweep.__file__, *words],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[owner],
                start_new_session=True,
            )
        finally:
            os.close(owner)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        with self._process.stdout as said:
            ready = said.read() == sweep.READY
        if not ready:
            self.dismiss()
            raise LabError(
                f"{sys.executable} could not be started to watch over a lab",
                allowed="a Python that runs by that path",
                remedy="start basp with the path of its interpreter",
            )

    def dismiss(self) -> None:
        """End it with nothing done."""
        self._process.kill()
        self._process.wait()
