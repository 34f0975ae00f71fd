"""From what was measured to rows: one JSON object a line, the environment first."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from basp.bench.timing import Times
from basp.bench.trials import Trial
from basp.errors import DataError
from basp.files import written_whole


def make_rows(trials: Sequence[Trial], times: Mapping[str, Times]) -> list[dict[str, Any]]:
    """A row for each contender; the first is the baseline. Ratios are of a contender over the baseline."""
    base = times[trials[0].label]
    rows: list[dict[str, Any]] = []
    for trial in trials:
        row = _told(trial)
        if trial.label in times:
            row |= _measured(times[trial.label], base)
            if not trial.counted:
                row |= dict.fromkeys(_OF_ATTENTION)
        rows.append(row)
    return rows


_OF_ATTENTION = (
    *("all_to_all_seconds", "all_to_all_share", "all_to_all_ratio"),
    *("bytes_inside", "bytes_across", "bytes_across_ratio"),
)
"""What is null for a contender whose collectives the stopwatch does not know."""


def _told(trial: Trial) -> dict[str, Any]:
    return {
        "kind": "contender",
        "name": trial.label,
        "does": trial.does,
        "refusal": trial.refusal,
        "losses": trial.losses,
        "loss_difference": trial.difference,
        "tokens": trial.tokens,
        "peak_bytes": trial.peak,
        "peak_is": trial.peak_kind,
    }


def _measured(times: Times, base: Times) -> dict[str, Any]:
    across, base_across = statistics.median(times.across), statistics.median(base.across)
    return {
        "step_seconds": spread(times.seconds),
        "step_ratio": spread(ratios(times.seconds, base.seconds)),
        "cpu_ratio": spread(ratios(times.cpu, base.cpu)),
        "all_to_all_seconds": spread(times.exchanging),
        "all_to_all_share": statistics.median(ratios(times.exchanging, times.seconds)),
        # Two plans that exchange nothing have no ratio.
        "all_to_all_ratio": spread(ratios(times.exchanging, base.exchanging)) if min(base.exchanging) > 0 else None,
        "weights_seconds": spread(times.gathering),
        "weights_share": statistics.median(ratios(times.gathering, times.seconds)),
        "bytes_inside": round(statistics.median(times.inside)),
        "bytes_across": round(across),
        "bytes_across_ratio": across / base_across if base_across else None,
        "interface_bytes": round(statistics.median(times.interface)) if times.interface else None,
        "raw": vars(times),
    }


def ratios(mine: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round: of one over the other."""
    return [a / b for a, b in zip(mine, base, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "min": min(values), "q1": low, "q3": high, "max": max(values)}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Whole or not at all. What is not finite, a loss that went wrong, becomes null: JSON has no such numbers."""
    with written_whole(path) as partial:
        lines = [json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows]
        partial.write_text("".join(lines), encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The environment, and the rows of contenders.

    Raises:
        DataError: it cannot be read, or is no benchmark's.
    """
    try:
        environment, *rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        if environment["kind"] != "environment" or not all(row["kind"] == "contender" for row in rows):
            raise ValueError("its lines are of another kind")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{str(path)!r} cannot be read: {error}",
            allowed="the rows.jsonl of a benchmark",
            remedy="give one that 'basp bench ... --out' wrote",
        ) from error
    return environment, rows
