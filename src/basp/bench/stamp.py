"""Where a benchmark ran: versions, machine, ranks, links. Its figures mean nothing without."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from basp.ranks import Place

_INTERFACES = Path("/sys/class/net")
_PACKAGES = ("torch", "transformers", "numpy", "deepspeed", "yunchang", "flash-attn")


def stamp(place: Place, nodes: list[int]) -> dict[str, Any]:
    """The first row of a benchmark's file."""
    names = interfaces(dist.get_backend())
    return {
        "kind": "environment",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["basp", *sys.argv[1:]]),
        "python": platform.python_version(),
        **_versions(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else None,
        "world": place.world,
        "nodes": len(set(nodes)),
        "node_of_rank": nodes,
        "backend": dist.get_backend(),
        "interfaces": names,
        "link": _link(names),
    }


def interfaces(backend: str, existing: list[str] | None = None) -> list[str]:
    """Network interfaces that the environment names for this backend; none if it names none, or only excludes some.

    NCCL takes the beginnings of names, and "=" before a whole one.
    """
    named = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "")
    if existing is None:
        existing = sorted(path.name for path in _INTERFACES.iterdir()) if _INTERFACES.is_dir() else []
    if not named or named.startswith("^"):
        return []
    exact = backend == "gloo" or named.startswith("=")
    wanted = [name.strip() for name in named.removeprefix("=").split(",") if name.strip()]
    return [name for name in existing if any(name == each if exact else name.startswith(each) for each in wanted)]


def sent_bytes(names: list[str]) -> int | None:
    """What these interfaces have sent since they are up; None without interfaces."""
    if not names:
        return None
    return sum(int((_INTERFACES / name / "statistics" / "tx_bytes").read_text()) for name in names)


def _link(names: list[str]) -> str | None:
    """A rate that the environment tells, or the speed of a physical interface: virtual ones make theirs up."""
    if told := os.environ.get("BASP_LINK_RATE"):
        return told
    for name in names:
        with suppress(OSError, ValueError):
            if (_INTERFACES / name / "device").exists():
                return f"{int((_INTERFACES / name / 'speed').read_text())} Mbit/s"
    return None


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _cpu() -> str:
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()
