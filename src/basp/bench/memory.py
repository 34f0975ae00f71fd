"""The most memory that a contender held, as far as the machine tells."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

import torch

_SELF = Path("/proc/self")


class PeakMemory:
    """Measures from where it is made: nothing of the contender may be there yet.

    On a GPU that is torch's own account. On the CPU it is what the process had resident above its start, after freed
    memory was given back, so it knows nothing of what the allocator keeps for itself; Linux only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            self._start: int | None = torch.cuda.memory_allocated(device)
        else:
            _give_back()
            self._start = _resident("VmRSS")

    @property
    def kind(self) -> str:
        """What ``peak`` is, for people."""
        return "allocated on the GPU" if self._device.type == "cuda" else "resident above the start"

    def restart(self) -> None:
        """Forget the peak until now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        _give_back()
        with suppress(OSError):  # not everywhere may a process do this; then the peak is that of its whole life
            (_SELF / "clear_refs").write_text("5")

    def peak(self) -> int | None:
        """Bytes since ``restart``, above what was there before the contender; None where nobody tells."""
        cuda = self._device.type == "cuda"
        now = torch.cuda.max_memory_allocated(self._device) if cuda else _resident("VmHWM")
        return None if now is None or self._start is None else max(0, now - self._start)


def _give_back() -> None:
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _resident(field: str) -> int | None:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", (_SELF / "status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
