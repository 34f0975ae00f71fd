"""Rows as a table: for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from basp.report import bytes_text

_NONE = "–"

Row = Mapping[str, Any]

_ABOUT = (
    "Ratios are to {base}, round by round. The all-to-all is the time inside attention's collectives, forward and "
    "backward, after a barrier, of the rank that is longest in them, as a share of the step's time; likewise the share "
    "of gathered weights and reduced gradients. Bytes inside and across are attention's, of a step and of all ranks; "
    "the wire's are what the interfaces named in the environment sent in a timed step, all collectives together."
)


class Column(NamedTuple):
    """A heading, and what stands under it."""

    heading: str
    cell: Callable[[Row], str]


TABLES: dict[str, list[Column]] = {
    "time": [
        Column("step", lambda row: _seconds(row["step_seconds"]["median"])),
        Column("ratio", lambda row: f"{row['step_ratio']['median']:.3f}"),
        Column("quartiles", lambda row: _range(row["step_ratio"], "q1", "q3")),
        Column("extremes", lambda row: _range(row["step_ratio"], "min", "max")),
        Column("cpu ratio", lambda row: f"{row['cpu_ratio']['median']:.3f}"),
    ],
    "collectives' share of the step": [
        Column("all-to-all", lambda row: _share(row["all_to_all_share"])),
        Column("ratio", lambda row: _ratio((row["all_to_all_ratio"] or {}).get("median"))),
        Column("weights", lambda row: _share(row["weights_share"])),
    ],
    "attention's bytes inside nodes and across": [
        Column("inside", lambda row: _bytes(row["bytes_inside"])),
        Column("across", lambda row: _bytes(row["bytes_across"])),
        Column("ratio", lambda row: _across_ratio(row)),
        Column("wire", lambda row: _bytes(row["interface_bytes"])),
    ],
    "the same work?": [
        Column("differs", lambda row: difference_text(row["loss_difference"])),
        Column("tokens/rank", lambda row: f"{max(row['tokens']):,}" if row["tokens"] else _NONE),
        Column("memory", lambda row: _bytes(row["peak_bytes"])),
    ],
}
"""By title. The last is of all contenders, the others of those that have a time."""


def cells(rows: Sequence[Row], title: str) -> list[list[str]]:
    """One table's cells, a contender's name first."""
    columns = TABLES[title]
    lines: list[list[str]] = []
    for row in rows:
        if "raw" in row or title == "the same work?":
            lines.append([row["name"], *(column.cell(row) for column in columns)])
        elif title == "time":
            lines.append([row["name"], "no time", *[_NONE] * (len(columns) - 1)])
    return lines


def heading(environment: Row) -> str:
    """What was measured, on what."""
    nodes = f"{environment['nodes']} nodes" if environment["nodes"] > 1 else "one node"
    return f"{environment['what']}, {environment['world']} ranks on {nodes}"


def notes(environment: Row, rows: Sequence[Row]) -> list[str]:
    """What each contender does, why one has no time, and what the columns are."""
    lines = [f"{row['name']}: {row['does']}" for row in rows if row["does"]]
    lines += [f"{row['name']} has no time: {row['refusal']}" for row in rows if row["refusal"]]
    about = _ABOUT.format(base=rows[0]["name"]) + f" {environment['compared']}"
    if rows[0]["peak_is"]:
        about += f" Memory is the most that a rank had {rows[0]['peak_is']} in a step."
    return [*lines, about]


def rich_tables(rows: Sequence[Row]) -> list[Table]:
    """For a terminal."""
    made: list[Table] = []
    for title, columns in TABLES.items():
        table = Table(title=title, title_justify="left", box=SIMPLE)
        for number, name in enumerate(["", *(column.heading for column in columns)]):
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        for each in cells(rows, title):
            table.add_row(*each)
        made.append(table)
    return made


def markdown(environment: Row, rows: Sequence[Row]) -> str:
    """For a file."""
    lines = [f"# {heading(environment)}", ""]
    for title, columns in TABLES.items():
        lines += [f"**{title}**", "", markdown_line(["", *(column.heading for column in columns)])]
        lines += [
            markdown_line(["---"] + ["---:"] * len(columns)),
            *(markdown_line(each) for each in cells(rows, title)),
            "",
        ]
    lines += [f"- {note}" for note in notes(environment, rows)]
    lines += ["", f"`{environment['command']}`", "", _where(environment)]
    return "\n".join(lines) + "\n"


def markdown_line(cells: Sequence[str]) -> str:
    """One line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def _where(environment: Row) -> str:
    machine = environment["gpu"] or f"{environment['cpu']}, {environment['cores']} cores"
    link = f", links of {environment['link']}" if environment["link"] else ""
    return f"{environment['date']}: basp {environment['basp']}, torch {environment['torch']}, {machine}{link}."


def _range(values: Mapping[str, float], low: str, high: str) -> str:
    return f"{values[low]:.2f}–{values[high]:.2f}"


def _ratio(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _across_ratio(row: Row) -> str:
    # A baseline that sends none across has no finite ratio.
    endless = row["bytes_across_ratio"] is None and row["bytes_across"]
    return "∞" if endless else _ratio(row["bytes_across_ratio"])


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f} %"


def difference_text(value: float | None) -> str:
    """A relative difference, for people; None is the baseline's to itself."""
    return _NONE if value is None else f"{value:.0e}" if value else "0"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def _bytes(amount: int | None) -> str:
    return _NONE if amount is None else bytes_text(amount)
