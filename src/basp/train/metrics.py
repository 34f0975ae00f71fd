"""What a run tells while it goes: metrics.jsonl for programs; for people a progress bar, or lines off a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from basp.report import bytes_text


class Reporter:
    """Writes records and shows progress. Made on every rank, and silent on all but the first.

    Args:
        metrics: file that records are appended to, one JSON object a line.
        steps: of the whole run.
        speaks: whether this rank writes and shows anything.
    """

    def __init__(self, metrics: Path, *, steps: int, speaks: bool) -> None:
        self.steps, self.speaks = steps, speaks
        self.console = Console(quiet=not speaks)
        self._path = metrics
        self._file: TextIO | None = None
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (speaks and self.console.is_terminal),
        )
        self._task = self._progress.add_task("train", total=steps, line="")
        self._shown = 0

    def __enter__(self) -> Reporter:
        if self.speaks:
            self._file = self._path.open("w", buffering=1, encoding="utf-8")
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()

    def record(self, values: dict[str, Any]) -> None:
        """Append one record."""
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")

    def show_step(self, values: dict[str, Any]) -> None:
        """Move the bar; without a terminal print about twenty lines over the run."""
        line = (
            f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"{bytes_text(values['bytes_per_rank'])} exchanged per rank"
        )
        self._progress.update(self._task, completed=values["step"], line=line)
        lines = max(1, self.steps // 20)
        if not self.console.is_terminal and (values["step"] >= self._shown + lines or values["step"] == self.steps):
            self._shown = values["step"]
            self.say(f"step {values['step']}/{self.steps}  {line}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
