"""What the processes of local ranks have in common, whoever starts them. No torch here."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading


def end_with_parent() -> None:
    """End this process when the one that started it is gone, however that ended: no rank outlives its run."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def threads_for(ranks: int) -> int:
    """Threads for each of ``ranks`` processes that share the cores that this one may use."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
