"""Runs of ``basp train`` as a user starts them: in this process, or as a command of its own that can be killed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from basp.cli import main

# A LayerNorm model computes in the dtype that it is given: no cast to float32 stands between two float64 runs.
STARCODER: dict[str, Any] = {
    "model_type": "starcoder2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA: dict[str, Any] = {**STARCODER, "model_type": "llama"}
ONE_LAYER: dict[str, Any] = {**LLAMA, "num_hidden_layers": 1}

WORDS = re.findall(r"\w+", "the quick brown fox jumps over a lazy dog and runs from many wolves")
SIZES = (30, 150, 70, 10, 90, 45, 64, 63, 20, 110)
"""Bytes of each document; with its end token one is a token longer, so that pieces of max_length 64 differ."""


def write_documents(folder: Path) -> list[str]:
    """Text files 0.txt, 1.txt, ... of ``SIZES``; returns their texts in that order, which is the source's order."""
    draw = random.Random(0)
    texts = [" ".join(draw.choice(WORDS) for _ in range(60))[:size] for size in SIZES]
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return texts


def flags(source: Path, run_dir: Path, model: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    """A tiny run's flags. ``changes`` are flags with "__" for ".", as in ``optim__lr=1e-2``."""
    settings = {
        "run_dir": run_dir,
        "data__source": source,
        "data__max_length": 64,
        "model__dtype": "float64",
        "batch__sequences": 3,
        "ranks": 2,
        "optim__steps": 2,
        "optim__lr": 1e-2,
    }
    if "model__path" not in changes:
        settings["model__config"] = json.dumps(LLAMA if model is None else model)
    words: list[str] = []
    for name, value in {**settings, **changes}.items():
        *tables, key = name.replace("_", "-").split("--")
        on, off = (".".join([*tables, prefix + key]) for prefix in ("", "no-"))
        words += [f"--{on if value else off}"] if isinstance(value, bool) else [f"--{on}", str(value)]
    return words


@dataclass(frozen=True)
class Outcome:
    """What a run left: its exit code, what it said to stderr, its folder."""

    code: int
    errors: str
    run_dir: Path
    seconds: float

    @property
    def records(self) -> list[dict[str, Any]]:
        return read_records(self.run_dir)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "loss" in record]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "eval_loss" in record]

    @property
    def weights(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.run_dir / "model" / "model.safetensors")

    def column(self, name: str) -> list[Any]:
        return [record[name] for record in self.records if name in record]


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train(words: Sequence[str]) -> Outcome:
    """``basp train`` in this process (its ranks are processes as ever): a second or two where a command takes five."""
    run_dir = Path(words[words.index("--run-dir") + 1])
    errors, started = io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(errors):
        code = main(["train", *words])
    return Outcome(code, errors.getvalue(), run_dir, time.monotonic() - started)


def trained(words: Sequence[str]) -> Outcome:
    """``train``, which must succeed."""
    outcome = train(words)
    assert outcome.code == 0, outcome.errors
    return outcome


@dataclass
class Running:
    """A command in a session of its own, with all processes that descend from it, wherever they went."""

    process: subprocess.Popen[str]
    mark: str
    run_dir: Path
    output: list[str] = field(default_factory=list)

    def wait_for_steps(self, steps: int = 2, timeout: float = 90.0) -> None:
        def enough() -> bool:
            assert self.process.poll() is None, f"ended early with {self.process.returncode}:\n{self.finish(1)}"
            metrics = self.run_dir / "metrics.jsonl"
            return metrics.exists() and metrics.read_text().count("\n") >= steps

        wait_until(enough, timeout)

    def finish(self, timeout: float) -> str:
        """What it printed, once it has ended."""
        self.output.append(self.process.communicate(timeout=timeout)[0] or "")
        return "".join(self.output)

    def alive(self) -> list[int]:
        """Processes of this command that have not ended."""
        return [pid for pid in _pids() if self.mark in _read(pid, "environ")]

    def ranks(self) -> list[int]:
        """Pids of its local ranks, rank 0 first: forks of the fork server."""
        servers = {pid for pid in self.alive() if "forkserver" in _read(pid, "cmdline")}
        return sorted(pid for pid in servers if parent_of(pid) in servers)


@contextlib.contextmanager
def command(words: Sequence[str], *, run_dir: Path, launcher: Sequence[str] = ()) -> Iterator[Running]:
    """``python -m basp train``, or ``python LAUNCHER -m basp train``, while the block runs; then it is killed."""
    mark = f"BASP_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "VIRTUAL_ENV", "LANG") if key in os.environ}
    temporary = tempfile.TemporaryDirectory()  # what a killed command leaves in it goes, too
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "basp", "train", *words],
        env={
            **kept,
            name: value,
            "TMPDIR": temporary.name,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        umask=0o022,
    )
    running = Running(process, mark, run_dir)
    try:
        yield running
    finally:
        for pid in running.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        temporary.cleanup()


def wait_until(true: Callable[[], bool], timeout: float) -> float:
    """Seconds that it took; fails after ``timeout``."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < timeout, f"still waiting after {timeout} s"
        time.sleep(0.05)
    return time.monotonic() - started


def parent_of(pid: int) -> int:
    return int(_read(pid, "stat").rpartition(")")[2].split()[1] or 0) if _read(pid, "stat") else 0


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file under ``folder`` and what it holds."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:  # it has ended, or is not ours
        return ""
