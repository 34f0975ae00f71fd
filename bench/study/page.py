"""The study's page: tables, pictures, and what they are about. Its figures come from the rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cases import (
    AHEAD,
    ATTENTION,
    BATCHES,
    BOTTLENECK,
    GRID,
    HYBRID,
    KV_HEADS,
    LENGTHS,
    LINK,
    MODEL,
    ODD,
    RATES,
    THREE_NODES,
    ULYSSES,
    UNEQUAL,
    Case,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from basp.bench.options import text_of
from basp.bench.rows import read_rows
from basp.bench.table import difference_text, markdown_line
from basp.files import written_whole
from basp.report import bytes_text

Rows = Mapping[str, dict[str, Any]]
"""A case's rows, by the contender's name; the baseline is first."""


# ---- what it is about

RATE_TEXT = f"""
The rate that this page keeps, {LINK}, is one at which Ulysses over all ranks spends 34 to 38 % of its step in
attention's collectives with two sequences of 2,048 tokens: the share that the paper reports for its cluster. The
faster the links beside the rest of the machine, the less there is to gain.
"""

GRID_TEXT = """
`static` is DP = B x SP = 8 / B, Ulysses in each group: the mesh of somebody who knew that every batch would have B
equal sequences. There basp makes the same groups and sends the same bytes, so that its time should be equal, within
the noise that two equals have here. At 512 tokens most of a step is FSDP2's gathering of weights, whatever the
layout; with more tokens in the batch attention's share grows. `deepspeed` gathers fewer bytes of weights than FSDP2:
the ratio to quote for the layout itself is that of `fsdp2-ulysses`.

With B = 1 basp's plan *is* Ulysses, and sends the same bytes. It sends q, k and v in one exchange where the peers
have three, and is the slower one here: a link's token bucket lets 128 KiB pass at once after each pause, and 8 pauses
more in a step are 1 MiB for which the peers do not wait.
"""

ODD_TEXT = """
The paper asks that B and the ranks divide one another, as a fixed mesh does. basp cuts the batch as one stream, so
that only a sequence whose ranks sit on both sides of a node's border crosses it.
"""

UNEQUAL_TEXT = """
The peers pad to the longest sequence of a group, basp pads nothing and gives every rank equally many tokens: see
tokens/rank. With two sequences of 3,000 and 1,096 tokens that costs it time on slow links: the long one reaches over
the border of a node. `static` keeps each sequence on its own node, and is faster for it, where the memory for half as
many tokens again is there.
"""

KV_TEXT = """
The peers repeat kv heads until there is one for each rank that shares a sequence: over 8 ranks they send as much as
with 8 kv heads. basp's tables name the kv head that a rank's query heads read.
"""

NODES_TEXT = """
3 nodes x 2 ranks, and a wider model for the 12 heads that 6 ranks can share. Of 8 heads they have no equal shares:
Ulysses over all of them cannot run, basp can. Two sequences take 3 ranks each, more than a node has: there is no layout
that keeps attention off the links, and little to gain.
"""

SHARDING_TEXT = f"""
Once attention keeps to its node, FSDP2's own collectives are what is left on the links: see `weights`. (gloo's
reduce-scatter moves the bytes of an all-reduce, twice what it has to; NCCL's does not.) Two things mend it, for basp
and for its peers alike. Gathering ahead of use (`{AHEAD}`: `parallel.gather_ahead` in `basp train`) moves the same
bytes while something is computed. Hybrid sharding (`{HYBRID}`: `parallel.replicate`) keeps a copy of the model on
each node, sharded inside it, so that nothing but sums of gradients crosses. All took their steps in turns in the same
processes.
"""

ATTENTION_TEXT = """
Without a model: one layer of 8 heads of 32, forward and backward. `by-hand` is a Ulysses layer of three all-to-alls
written out; `ring` is a plain ring attention of ours, as torch's does not run on a CPU.
"""

COLUMNS_TEXT = """
- **step**: median over rounds; a step takes as long as its slowest rank. **ratio**: to basp's in the same round:
  median and quartiles.
- **all-to-all**: the seconds inside attention's collectives, forward and backward, after a barrier, of the rank that is
  longest in them, as a share of the step's time; **its ratio**: of those seconds to basp's; ∞ where basp has no
  such collectives. **weights**: the share of FSDP2's collectives, likewise. These are taken in steps of their own
  and without credit for overlap.
- **across nodes**: bytes that attention's collectives send between nodes in a step, counted from their splits;
  **ratio**: to basp's, ∞ where basp sends none. **wire**: what the nodes' interfaces sent in a step: these bytes,
  weights, gradients and headers.
- **loss differs**: the largest relative difference to basp's losses at steps 0 and 3, under SGD and AdamW; of one layer
  alone, of outputs and gradients. **tokens/rank**: of the rank that computes most, padding included.

[`bench/README.md`](../../README.md) says more. The raw numbers, each with its environment and command, are in
[`rows`](rows).
"""


def _introduction(environment: Mapping[str, Any], folder: str) -> str:
    sizes = ", ".join(f"{key} {value}" for key, value in MODEL.items())
    packages = ", ".join(f"{key} {environment[key]}" for key in ("torch", "transformers", "deepspeed", "yunchang"))
    cores = environment["cores"]
    return f"""# Batch-aware groups beside Ulysses, in emulation

{environment["date"][:10]}: basp {environment["basp"]}, {packages}; {environment["cpu"]}, {cores} cores.

```sh
sudo env PATH="$PATH" python bench/study bench/results/{folder}    # measures what has no rows yet, writes this page
```

**This is an emulation.** "Nodes" are network namespaces of one machine whose links are shaped to {LINK} each way, ranks
are processes that share its {cores} cores, and collectives are gloo's. Traffic inside a node is not shaped: it is
fast, and takes processor time that a real node would not spend on it. The tables show the effect of where bytes go.
They are neither the figures of the paper (arXiv 2609.03151) nor those of any cluster of GPUs.

Every step is one of a Llama in float32 under AdamW ({sizes}),
on 2 nodes x 4 ranks and links of {LINK} unless a table says otherwise. Ratios are of a contender's time to basp's in
the same round, in the same processes: above 1, basp is faster. Before a time was taken, losses equalled basp's at
steps 0 and 3, under SGD and under AdamW."""


# ---- the page


def make_page(folder: Path) -> str:
    """The page in Markdown from the rows in its folder, where its pictures are put as well."""
    measured = {path.stem: _read(path) for path in sorted((folder / "rows").glob("*.jsonl"))}
    environment, _ = read_rows(folder / "rows" / f"{GRID[0].name}.jsonl")
    draw_ratios(measured, folder / "ratios.png")
    draw_sharding(measured, folder / "sharding.png")
    sections = [
        _introduction(environment, folder.name),
        _section("The rate of the links", RATE_TEXT, _table(RATES, measured, title=lambda case: case.link)),
        _section("B equal sequences", GRID_TEXT, _matrix(measured), "![](ratios.png)", _table(GRID, measured)),
        _section("Batches that do not divide the ranks", ODD_TEXT, _table(ODD, measured)),
        _section("Unequal lengths", UNEQUAL_TEXT, _table(UNEQUAL, measured)),
        _section("2 kv heads", KV_TEXT, _table(KV_HEADS, measured)),
        _section("3 nodes", NODES_TEXT, _table(THREE_NODES, measured)),
        _section("Weights as the bottleneck", SHARDING_TEXT, "![](sharding.png)", _table([BOTTLENECK], measured)),
        _section("Attention alone", ATTENTION_TEXT, _table(ATTENTION, measured)),
        _section("Columns", COLUMNS_TEXT),
    ]
    return "\n\n".join(sections) + "\n"


def _read(path: Path) -> Rows:
    return {row["name"]: row for row in read_rows(path)[1]}


def _section(title: str, text: str, *parts: str) -> str:
    return "\n\n".join([f"## {title}", text.strip(), *parts])


HEADINGS = (
    *("batch", "contender", "step", "ratio", "all-to-all", "its ratio", "weights"),
    *("across nodes", "ratio", "wire", "ratio", "loss differs", "tokens/rank"),
)


def _batch(case: Case) -> str:
    same = len(set(case.lengths)) == 1
    text = text_of(case.lengths).removesuffix(" tokens") if same else ", ".join(map(str, case.lengths))
    return text + (f"; {dict(case.model)['heads']} heads" if "heads" in dict(case.model) else "")


def _table(cases: Sequence[Case], measured: Mapping[str, Rows], title: Any = _batch) -> str:
    """A line for each contender of each case, why some have no time, and a case's command."""
    lines = [markdown_line(HEADINGS), markdown_line(["---", "---"] + ["---:"] * (len(HEADINGS) - 2))]
    reasons: list[str] = []
    for case in cases:
        rows = measured[case.name]
        for number, row in enumerate(rows.values()):
            lines.append(markdown_line([title(case) if number == 0 else "", row["name"], *_cells(row, rows)]))
            if row["refusal"]:
                reasons.append(f"- No time for {row['name']} in {title(case)}: {row['refusal'].split('. Allowed')[0]}.")
    command = f"The first of these: `{' '.join(cases[0].command())}`"
    return "\n".join([*lines, "", *reasons, *([""] if reasons else []), command])


def _cells(row: Mapping[str, Any], rows: Rows) -> list[str]:
    base = next(iter(rows.values()))
    tokens = f"{max(row['tokens']):,}" if row["tokens"] else "–"
    if "raw" not in row:
        return ["no time", *["–"] * (len(HEADINGS) - 4), tokens]
    return [
        f"{row['step_seconds']['median']:.3g} s",
        _spread(row["step_ratio"]) if row is not base else "1",
        f"{100 * row['all_to_all_share']:.0f} %",
        _number((row["all_to_all_ratio"] or {}).get("median"), endless=max(row["raw"]["exchanging"]) > 0),
        f"{100 * row['weights_share']:.0f} %",
        bytes_text(row["bytes_across"]),
        _number(row["bytes_across_ratio"], endless=row["bytes_across"] > 0),
        bytes_text(row["interface_bytes"]),
        _number(row["interface_bytes"] / base["interface_bytes"] if base["interface_bytes"] else None, endless=True),
        difference_text(row["loss_difference"]),
        tokens,
    ]


def _matrix(measured: Mapping[str, Rows]) -> str:
    """Ratios of FSDP2-Ulysses to basp by length and batch."""
    lines = [markdown_line(["tokens of each", *(f"B = {sequences}" for sequences in BATCHES)])]
    lines += [markdown_line(["---:"] * (1 + len(BATCHES)))]
    for length in LENGTHS:
        ratios = [measured[f"{sequences}x{length}"][ULYSSES]["step_ratio"] for sequences in BATCHES]
        lines.append(markdown_line([f"{length:,}", *map(_spread, ratios)]))
    return "\n".join([f"Step time of `{ULYSSES}` over basp's, median (quartiles):", "", *lines])


def _spread(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f} ({values['q1']:.2f}–{values['q3']:.2f})"


def _number(value: float | None, *, endless: bool) -> str:
    if value is None:
        return "∞" if endless else "–"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


# ---- pictures

_CONTENDERS = {ULYSSES: "#D55E00", "deepspeed": "#999999", "static": "#0072B2"}
_PARTS = {
    "all_to_all_share": ("#D55E00", "attention's collectives"),
    "weights_share": ("#E6C27A", "weights' and gradients'"),
}


def draw_ratios(measured: Mapping[str, Rows], path: Path) -> None:
    """Step ratios over B, a panel for each length."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(LENGTHS), sharey=True)
    for axes, length in zip(panels, LENGTHS, strict=True):
        axes.axhline(1, color="0.6", linewidth=1, linestyle="--")
        for place, (name, colour) in enumerate(_CONTENDERS.items()):
            ratios = [measured[f"{sequences}x{length}"][name]["step_ratio"] for sequences in BATCHES]
            low, middle, high = (np.array([ratio[key] for ratio in ratios]) for key in ("q1", "median", "q3"))
            x = np.arange(len(BATCHES)) + 0.06 * (place - 1)
            bars: dict[str, Any] = {"yerr": [middle - low, high - middle], "capsize": 2}
            axes.errorbar(x, middle, **bars, color=colour, marker="o", markersize=4, label=name)
        axes.set(title=f"{length:,} tokens each", xlabel="sequences in the batch", xticks=range(len(BATCHES)))
        axes.set_xticklabels([f"{sequences}" for sequences in BATCHES])
    panels[0].set(ylabel="step time / basp's")
    panels[0].legend(frameon=False, loc="upper left")
    _save(figure, panels, path)


def draw_sharding(measured: Mapping[str, Rows], path: Path) -> None:
    """A step's time under each way to shard, and beside it what its collectives take."""
    rows = measured[BOTTLENECK.name]
    places, steps = np.arange(len(rows)), np.array([row["step_seconds"]["median"] for row in rows.values()])
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.barh(places - 0.27, steps, height=0.26, color="#999999", label="the step")
    for number, (key, (colour, label)) in enumerate(_PARTS.items()):
        seconds = steps * [row[key] for row in rows.values()]
        axes.barh(places + 0.27 * number, seconds, height=0.26, color=colour, label=label)
    axes.set(title=_batch(BOTTLENECK), xlabel="seconds", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(places, list(rows))
    axes.legend(frameon=False, loc="upper right")
    _save(figure, [axes], path)


def _save(figure: Figure, panels: Sequence[Axes], path: Path) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    with written_whole(path) as partial:
        figure.savefig(partial, format="png", dpi=110)
