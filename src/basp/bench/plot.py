"""Rows as a picture: ratios with their spread, and where the bytes go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from basp.bench.table import heading
from basp.files import written_whole
from basp.report import byte_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINT, _REST, _ACROSS, _WEIGHTS = "#0072B2", "#999999", "#D55E00", "#E6C27A"


def draw(environment: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the contenders that have a time, and put the picture at ``path``, whole or not at all."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if "raw" in row]
    figure = Figure(figsize=(12.5, 1.7 + 0.55 * len(timed)), layout="constrained")
    figure.suptitle(heading(environment))
    left, middle, right = figure.subplots(1, 3, sharey=True)
    left.set(yticks=range(len(timed)), yticklabels=[row["name"] for row in timed], ylim=(len(timed) - 0.5, -0.5))
    _draw_ratios(left, timed)
    _draw_seconds(middle, timed)
    _draw_bytes(right, timed)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
    with written_whole(path) as partial:
        figure.savefig(partial, format="png", dpi=130)


def _draw_ratios(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.axvline(1, color="0.6", linewidth=1, linestyle="--")
    for place, row in enumerate(rows):
        ratio = row["step_ratio"]
        axes.plot([ratio["min"], ratio["max"]], [place, place], color=_POINT, linewidth=1)
        axes.plot([ratio["q1"], ratio["q3"]], [place, place], color=_POINT, linewidth=6, alpha=0.4)
        axes.plot([ratio["median"]], [place], color=_POINT, marker="o")
    axes.set(xlabel=f"step time / {rows[0]['name']}'s: median, quartiles, extremes")


def _draw_seconds(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    start = np.zeros(len(rows))
    whole = np.array([row["step_seconds"]["median"] for row in rows])
    for key, colour, label in (
        ("all_to_all_share", _ACROSS, "attention's collectives"),
        ("weights_share", _WEIGHTS, "weights', gradients'"),
        (None, _REST, "everything else"),
    ):
        width = whole - start if key is None else whole * [row[key] or 0 for row in rows]
        axes.barh(range(len(rows)), width, left=start, color=colour, label=label)
        start = start + width
    axes.set(xlabel="seconds of a step, median")
    _legend(axes)


def _draw_bytes(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    across, inside = (np.array([row[key] or 0 for row in rows]) for key in ("bytes_across", "bytes_inside"))
    size, unit = byte_unit(max(across + inside))
    axes.barh(range(len(rows)), across / size, color=_ACROSS, label="across nodes")
    axes.barh(range(len(rows)), inside / size, left=across / size, color=_REST, label="inside nodes")
    axes.set(xlabel=f"{unit} that attention sends in a step, all ranks")
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
