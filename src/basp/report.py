"""A run as one picture: its loss, who owned which tokens, and who sent how much to whom.

matplotlib is imported only when a picture is drawn: planning on the command line uses the byte texts alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from basp.errors import DataError
from basp.files import written_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from basp.plans import Plan, Shard

# Okabe-Ito without black and yellow: neighbours differ for every kind of colour vision, and black text stays readable.
_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00")
_DARK = frozenset({"#0072B2", "#D55E00", "#009E73"})
_MOST_BARS = 64  # a picture grows with the ranks up to this many
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, in order.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object with a "step"; names file and line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {error}", allowed="a run's metrics.jsonl", remedy="give the folder of a finished run"
        ) from error
    return [_parse_record(line, f"{path}: line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _parse_record(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{place} is not JSON: {error}", allowed="one record a line", remedy="remove the line, if a crash cut it"
        ) from error
    if not isinstance(record, dict) or "step" not in record:
        raise DataError(f"{place} is {line[:80]!r}", allowed='an object with a "step"', remedy="remove the line")
    return record


def byte_unit(largest: float) -> tuple[int, str]:
    """Divisor and name of the unit in which ``largest`` bytes is at least 1: (1048576, "MiB"), down to (1, "B")."""
    return next(((size, name) for size, name in _UNITS if largest >= size), (1, "B"))


def bytes_text(amount: float) -> str:
    """Bytes for people: "12.0 MiB", "0 B"."""
    size, name = byte_unit(amount)
    return f"{amount / size:.0f} {name}" if size == 1 else f"{amount / size:.1f} {name}"


def draw_report(
    metrics: Sequence[Mapping[str, Any]],
    plans: Mapping[str, Plan],
    *,
    head_dim: int,
    itemsize: int,
    title: str,
    path: str | Path,
) -> None:
    """Draw a run's report and put it at ``path``, whole or not at all.

    Args:
        metrics: training records (with "loss") and evaluation records (with "eval_loss"), as ``read_metrics`` gives.
        plans: one batch as laid out by each strategy, by the strategy's name.
        head_dim: elements of one head.
        itemsize: bytes of one element.
        title: heading of the whole picture.
        path: the PNG to write.
    """
    from matplotlib.figure import Figure

    columns = max(1, len(plans))
    most_ranks = max((plan.ranks for plan in plans.values()), default=1)
    owner_height = 1.4 + 0.11 * max(4, min(most_ranks, _MOST_BARS))
    heights = [3.0, owner_height, 4.2] if plans else [3.0]
    figure = Figure(figsize=(6.4 * columns + 0.8, sum(heights) + 1.2), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    _draw_loss(figure.add_subplot(grid[0, :]), metrics)
    if plans:
        for column, (name, plan) in enumerate(plans.items()):
            _draw_owners(figure.add_subplot(grid[1, column]), name, plan)
        places = [figure.add_subplot(grid[2, i]) for i in range(columns)]
        _draw_traffic(figure, places, plans, head_dim=head_dim, itemsize=itemsize)
    _save(figure, Path(path))


def _draw_loss(axes: Axes, metrics: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Loss")
    _strip(axes)
    train = [(record["step"], record["loss"]) for record in metrics if "loss" in record]
    held_out = [(record["step"], record["eval_loss"]) for record in metrics if "eval_loss" in record]
    steps = [step for step, _ in train + held_out]
    if not steps:
        axes.text(0.5, 0.5, "no step recorded", transform=axes.transAxes, ha="center", va="center", color="0.4")
        axes.set(xticks=[], yticks=[])
        return
    if train:
        marker = "o" if len(train) <= 30 else None
        axes.plot(*zip(*train, strict=True), color=_COLOURS[4], marker=marker, markersize=3, label="training")
    if held_out:
        points = {"linestyle": "none", "marker": "D", "markersize": 6}
        axes.plot(*zip(*held_out, strict=True), color=_COLOURS[5], label="held out", **points)
    if min(steps) == max(steps):  # matplotlib would tick 0.96, 0.98, ...
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)


def _draw_owners(axes: Axes, name: str, plan: Plan) -> None:
    widest = int(plan.tokens.max())
    for rank, shards in enumerate(plan.shards):
        if shards:
            _draw_rank(axes, rank, shards, widest=widest, ranks=plan.ranks)
    count = f"{len(plan.lengths)} sequence{'s' * (len(plan.lengths) != 1)}"
    axes.set(
        xlabel="tokens on the rank (numbers are sequences)",
        ylabel="rank",
        title=f"{name}: who owns which tokens ({count})",
    )
    axes.set(xlim=(0, widest), ylim=(plan.ranks - 0.5, -0.5), yticks=_ticks(plan.ranks))
    _strip(axes)


def _draw_rank(axes: Axes, rank: int, shards: Sequence[Shard], *, widest: int, ranks: int) -> None:
    widths = [shard.stop - shard.start for shard in shards]
    lefts = [end - width for end, width in zip(accumulate(widths), widths, strict=True)]
    colours = [_COLOURS[shard.sequence % len(_COLOURS)] for shard in shards]
    bars = list(zip(lefts, widths, strict=True))
    axes.broken_barh(bars, (rank - 0.42, 0.84), facecolors=colours, edgecolors="white", linewidths=0.4)
    size = 9 if ranks <= 8 else 6.5
    for shard, (left, width), colour in zip(shards, bars, colours, strict=True):
        text = str(shard.sequence)
        # A digit of 6.5 points takes about 1/90 of a panel's width; above 64 ranks a bar is lower than a digit.
        if ranks <= _MOST_BARS and width >= widest * (len(text) + 0.8) * size / 6.5 / 90:
            colour = "white" if colour in _DARK else "black"
            place = {"ha": "center", "va": "center_baseline", "clip_on": True}
            axes.text(left + width / 2, rank, text, fontsize=size, color=colour, **place)


def _draw_traffic(
    figure: Figure, places: Sequence[Axes], plans: Mapping[str, Plan], *, head_dim: int, itemsize: int
) -> None:
    matrices = {name: plan.traffic(head_dim, itemsize) for name, plan in plans.items()}
    largest = max(int(matrix.max()) for matrix in matrices.values())
    size, unit = byte_unit(largest)
    top = max(largest, 1) / size  # one scale for all: a strategy that sends less must look it
    for axes, (name, matrix) in zip(places, matrices.items(), strict=True):
        image = axes.imshow(matrix / size, cmap="Blues", vmin=0, vmax=top)
        axes.set(
            xlabel="to rank", ylabel="from rank", title=f"{name}: who sends to whom, {bytes_text(matrix.sum())} in all"
        )
        axes.set(xticks=_ticks(len(matrix)), yticks=_ticks(len(matrix)))
        if len(matrix) <= 8:
            _write_cells(axes, matrix / size, dark_above=top * 0.6)
        if axes is places[-1]:
            label = f"{unit} sent by one attention layer's forward"
            figure.colorbar(image, ax=list(places), label=label, panchor=False)


def _write_cells(axes: Axes, values: Any, *, dark_above: float) -> None:
    for source, row in enumerate(values):
        for target, value in enumerate(row):
            if value:
                colour = "white" if value > dark_above else "black"
                axes.text(target, source, f"{value:.3g}", ha="center", va="center", fontsize=8, color=colour)


def _ticks(ranks: int) -> list[int]:
    """At most 16 ranks, evenly spaced from 0."""
    return list(range(0, ranks, -(-ranks // 16)))


def _strip(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    with written_whole(path) as partial:
        figure.savefig(partial, format="png", dpi=130)
