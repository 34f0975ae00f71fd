"""Train examples/demo.toml with ``basp``, then its first steps again with ``ulysses``, and put the two side by side."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from basp.cli import main
from basp.report import bytes_text, read_metrics

SETTINGS = str(Path(__file__).with_name("demo.toml"))
RUNS = {"basp": "runs/demo", "ulysses": "runs/demo-ulysses"}
STEPS = 5


def run() -> int:
    """Both runs and their comparison; the exit code of the first that fails."""
    code = main(["train", SETTINGS, "--run-dir", RUNS["basp"]])
    again = ["--strategy", "ulysses", "--steps", str(STEPS), "--run-dir", RUNS["ulysses"]]
    code = code or main(["train", SETTINGS, *again])
    if code == 0:
        compare()
    return code


def compare() -> None:
    """Print loss and bytes of the first steps of both runs."""
    records = {
        name: [r for r in read_metrics(Path(run) / "metrics.jsonl") if "loss" in r] for name, run in RUNS.items()
    }
    table = Table(title=f"The same {STEPS} steps: equal loss, fewer bytes")
    for heading in ("step", *(f"loss, {name}" for name in RUNS), *(f"sent per rank, {name}" for name in RUNS)):
        table.add_column(heading, justify="right")
    for pair in list(zip(*records.values(), strict=False))[:STEPS]:
        losses = [f"{record['loss']:.6f}" for record in pair]
        table.add_row(str(pair[0]["step"]), *losses, *(bytes_text(record["bytes_per_rank"]) for record in pair))
    console = Console()
    console.print(table)
    console.print(f"See {RUNS['basp']}/report.png; the model is in {RUNS['basp']}/model.")


if __name__ == "__main__":
    sys.exit(run())
