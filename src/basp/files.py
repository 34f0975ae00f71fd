"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""Ending of what is being written; a leftover is from a process that was killed."""


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A path to write to, a file or a folder; it takes the name ``target`` only once the block has ended well."""
    partial = target.with_name(f".{target.name}{PARTIAL}")
    _remove(partial)  # of a process that was killed: nothing of it may end up in the target
    try:
        yield partial
        os.replace(partial, target)
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
