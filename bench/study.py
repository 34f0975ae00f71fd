"""The study: batch-aware groups beside Ulysses on an emulated cluster, as a page of tables. Needs root, on Linux.

    python bench/study.py bench/results/2026-12-01          # measure what has no rows yet, then write the page
    python bench/study.py bench/results/2026-12-01 --page   # only the page, from the rows that are there

Each case is one ``basp lab run ... -- basp bench ...``; its rows are kept as ``rows/CASE.jsonl``, so that a study that was
interrupted goes on where it was. Peers need bench/requirements.txt. Quiet the machine first; it takes about an hour and
a half on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from basp.bench.options import text_of
from basp.bench.rows import read_rows
from basp.files import written_whole
from basp.ranks import sigterm_as_exit
from basp.report import bytes_text

LINK = "150mbit"
"""At which Ulysses over all ranks spends 34 to 38 % of its step in attention's collectives at B = 2, T = 2048."""

LENGTHS, BATCHES = (512, 1024, 2048), (1, 2, 4, 8)
CONTENDERS = ("basp", "fsdp2-ulysses", "deepspeed", "static")
ULYSSES = "fsdp2-ulysses"
MODEL = {"layers": 2, "hidden": 256, "mlp": 256, "heads": 8, "kv-heads": 8, "vocab": 256}

Rows = Mapping[str, dict[str, Any]]
"""A case's rows, by the contender's name."""


# ---- what is measured


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: of its file.
        lengths: tokens of each sequence.
        contenders: the first is the baseline.
        cannot: those of them that are known to have no time; the others must have one.
        nodes, ranks, link: of the lab; ranks of each node.
        model: sizes other than ``MODEL``'s.
        attention: whether it is of the attention layer only.
    """

    name: str
    lengths: tuple[int, ...]
    contenders: tuple[str, ...] = CONTENDERS
    cannot: tuple[str, ...] = ()
    nodes: int = 2
    ranks: int = 4
    link: str = LINK
    model: tuple[tuple[str, int], ...] = ()
    attention: bool = False

    def command(self, python: str = "python") -> list[str]:
        """What runs it, but for where rows go."""
        lab = ["--nodes", f"{self.nodes}", "--ranks-per-node", f"{self.ranks}", "--link", self.link]
        required = ",".join(name for name in self.contenders if name not in self.cannot)
        given = {"lengths": ",".join(map(str, self.lengths)), "contenders": ",".join(self.contenders)}
        given |= {"require": required, "rounds": "4", "warmup": "1"}
        if self.attention:
            given |= {"heads": "8", "kv-heads": "8", "head-dim": "32"}
        else:
            given |= {key: f"{value}" for key, value in (MODEL | dict(self.model)).items()}
        flags = [word for key, value in given.items() for word in (f"--{key}", value)]
        what = "attention" if self.attention else "step"
        return [python, "-m", "basp", "lab", "run", *lab, "--", python, "-m", "basp", "bench", what, *flags]


def equal(sequences: int, length: int) -> Case:
    """Equal sequences on 2 x 4 ranks; a fixed mesh has a place for them if their number and the ranks' divide."""
    cannot = () if 8 % sequences == 0 else ("static",)
    return Case(f"{sequences}x{length}", (length,) * sequences, cannot=cannot)


TWO = (2048, 2048)
EIGHT = (2048,) * 8

RATES = tuple(
    Case(f"link-{rate}", TWO, ("basp", ULYSSES), link=rate) for rate in ("100mbit", "150mbit", "300mbit", "1gbit")
)
GRID = tuple(equal(sequences, length) for length in reversed(LENGTHS) for sequences in BATCHES)
ODD = tuple(equal(sequences, 2048) for sequences in (3, 5, 6))
UNEQUAL = (
    Case("two-unequal", (3000, 1096)),
    Case("five-unequal", (1500, 1000, 750, 500, 346), cannot=("static",)),
    Case("one-long", (2048, 512, 512, 256, 256, 256, 128, 128)),
)
KV_HEADS = tuple(Case(f"kv2-{len(lengths)}x2048", lengths, model=(("kv-heads", 2),)) for lengths in (TWO, TWO + TWO))
TWELVE = (("hidden", 384), ("heads", 12), ("kv-heads", 12))
THREE_NODES = (
    *(
        Case(f"3nodes-{n}x1024", (1024,) * n, cannot=() if 6 % n == 0 else ("static",), nodes=3, ranks=2, model=TWELVE)
        for n in (2, 3, 4)
    ),
    Case("3nodes-8heads", (1024,) * 3, cannot=(ULYSSES, "deepspeed"), nodes=3, ranks=2),
)
AHEAD, HYBRID, BOTH = "gather_ahead=1", "replicate=2", "replicate=2:gather_ahead=1"
SHARDING = (
    "basp",
    *(f"basp:{own}" for own in (AHEAD, HYBRID, BOTH)),
    ULYSSES,
    f"{ULYSSES}:{BOTH}",
)
BOTTLENECK = tuple(Case(f"sharding-{len(lengths)}x2048", lengths, SHARDING) for lengths in (TWO, EIGHT))
ATTENTION = tuple(
    Case(f"attention-{len(lengths)}x2048", lengths, ("basp", "by-hand", "yunchang", "ring"), attention=True)
    for lengths in (TWO, EIGHT)
)


# ---- measuring


def measure(cases: Sequence[Case], folder: Path) -> None:
    """Run every case that has no rows yet."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [case for case in cases if not (folder / f"{case.name}.jsonl").exists()]
    began = time.monotonic()
    for number, case in enumerate(missing):
        print(f"[{number + 1}/{len(missing)}, {time.monotonic() - began:.0f} s] {case.name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="basp-study-") as place:
            run = [*case.command(sys.executable), "--out", "out"]
            # From there, so that a row's command names no folder of this machine; its own package on the path.
            done = subprocess.run(run, cwd=place, env=os.environ, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"{case.name} failed with exit code {done.returncode}; what was measured before is kept")
            with written_whole(folder / f"{case.name}.jsonl") as partial:
                shutil.copyfile(Path(place, "out", "rows.jsonl"), partial)


# ---- the page


def make_page(folder: Path) -> str:
    """The page in Markdown, and its pictures beside it, from the rows of all cases."""
    measured = {path.stem: read_case(path) for path in sorted((folder / "rows").glob("*.jsonl"))}
    draw_ratios({case.name: measured[case.name] for case in GRID}, folder / "ratios.png")
    draw_parts([measured[case.name] for case in BOTTLENECK], folder / "sharding.png")
    environment = read_rows(folder / "rows" / f"{RATES[0].name}.jsonl")[0]
    return "\n\n".join(
        [
            _introduction(environment, folder.name),
            _section("The link's rate", RATE_TEXT, RATES, measured, link=True),
            _section("B equal sequences", GRID_TEXT, GRID, measured, before=[_matrix(measured)]),
            _section("Batches that do not divide the ranks", ODD_TEXT, ODD, measured),
            _section("Unequal lengths", UNEQUAL_TEXT, UNEQUAL, measured),
            _section("2 kv heads", KV_TEXT, KV_HEADS, measured),
            _section("3 nodes", NODES_TEXT, THREE_NODES, measured),
            _section("When gathering weights is the bottleneck", SHARDING_TEXT, BOTTLENECK, measured),
            _section("The attention layer only", ATTENTION_TEXT, ATTENTION, measured),
            _columns(),
        ]
    )


def read_case(path: Path) -> Rows:
    """Its contenders' rows, by name."""
    return {row["name"]: row for row in read_rows(path)[1]}


def _introduction(environment: Mapping[str, Any], name: str) -> str:
    sizes = ", ".join(f"{key} {value}" for key, value in MODEL.items())
    packages = ", ".join(f"{key} {environment[key]}" for key in ("torch", "transformers", "deepspeed", "yunchang"))
    return f"""# Batch-aware groups beside Ulysses, in emulation

{environment["date"][:10]}, basp {environment["basp"]}, {packages}; {environment["cpu"]}, {environment["cores"]} cores.

```sh
sudo python bench/study.py bench/results/{name}    # all of it again, where there are no rows
```

**This is an emulation.** "Nodes" are network namespaces of one machine whose links are shaped to {LINK} each way, ranks are
processes that share its {environment["cores"]} cores, and collectives are gloo's. Traffic inside a node is not shaped: it is fast, and costs
processor time that a real node would not spend. What the tables show is the effect of where bytes go, not what a GPU
cluster would measure, and not the paper's figures (arXiv 2609.03151).

Every step is of a Llama in float32 under AdamW ({sizes}), over 2 nodes x 4 ranks and links of {LINK} unless a table
says otherwise. Ratios are of a contender's time to basp's in the same round of the same processes, above 1 where basp is
faster. Before a time was taken, each contender's losses equalled basp's at steps 0 and 3 under SGD and AdamW."""


def _section(
    title: str,
    text: str,
    cases: Sequence[Case],
    measured: Mapping[str, Rows],
    *,
    link: bool = False,
    before: Sequence[str] = (),
) -> str:
    headings = ["batch", "contender", "step", "ratio (quartiles)", "all-to-all", "its ratio", "weights"]
    headings += ["across nodes", "ratio", "wire", "ratio", "loss differs", "tokens/rank"]
    lines = [_line(headings), _line(["---", "---"] + ["---:"] * (len(headings) - 2))]
    reasons: list[str] = []
    for case in cases:
        batch = case.link if link else _batch(case)
        for number, row in enumerate(measured[case.name].values()):
            lines.append(_line([batch if number == 0 else "", *_cells(row, measured[case.name])]))
            if row["refusal"]:
                reasons.append(f"{_batch(case)}, {row['name']}: {row['refusal'].split('. Allowed')[0]}.")
    notes = "".join(f"\n- No time: {reason}" for reason in reasons)
    command = " ".join(cases[0].command())
    parts = [f"## {title}", text, *before, "\n".join(lines) + (f"\n{notes}" if notes else "")]
    return "\n\n".join(
        [*parts, f"<details><summary>the first of these as a command</summary>\n\n`{command}`\n\n</details>"]
    )


def _batch(case: Case) -> str:
    same = len(set(case.lengths)) == 1
    text = text_of(case.lengths).removesuffix(" tokens") if same else ", ".join(map(str, case.lengths))
    return text + (f", {dict(case.model)['heads']} heads" if "heads" in dict(case.model) else "")


def _cells(row: Mapping[str, Any], rows: Rows) -> list[str]:
    base = next(iter(rows.values()))
    differs = "–" if row is base else "0" if row["loss_difference"] == 0 else f"{row['loss_difference'] or 0:.0e}"
    tokens = f"{max(row['tokens']):,}" if row["tokens"] else "–"
    if "raw" not in row:
        return [row["name"], "no time", *["–"] * 9, tokens]
    return [
        row["name"],
        f"{row['step_seconds']['median']:.2f} s",
        _spread(row["step_ratio"]) if row is not base else "1",
        f"{100 * row['all_to_all_share']:.0f} %",
        _number((row["all_to_all_ratio"] or {}).get("median"), endless=max(row["raw"]["exchanging"]) > 0),
        f"{100 * row['weights_share']:.0f} %",
        bytes_text(row["bytes_across"]),
        _number(row["bytes_across_ratio"], endless=row["bytes_across"] > 0),
        bytes_text(row["interface_bytes"]),
        f"{row['interface_bytes'] / base['interface_bytes']:.2f}",
        differs,
        tokens,
    ]


def _matrix(measured: Mapping[str, Rows]) -> str:
    """Ratios of FSDP2-Ulysses to basp by length and batch."""
    lines = [_line(["T", *(f"B = {sequences}" for sequences in BATCHES)]), _line(["---:"] * (1 + len(BATCHES)))]
    for length in LENGTHS:
        ratios = [measured[f"{sequences}x{length}"][ULYSSES]["step_ratio"] for sequences in BATCHES]
        lines.append(_line([f"{length:,}", *map(_spread, ratios)]))
    return "\n".join([f"Step time of {ULYSSES} over basp's, median (quartiles):", "", *lines, "", "![](ratios.png)"])


def _spread(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f} ({values['q1']:.2f}–{values['q3']:.2f})"


def _number(value: float | None, *, endless: bool) -> str:
    return f"{value:.2f}" if value is not None else "∞" if endless else "–"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


RATE_TEXT = f"""The rate that this page keeps, {LINK}, is the one at which Ulysses over all ranks spends 34 to 38 % of its step in
attention's collectives with two sequences of 2,048 tokens, which is the share that the paper's authors report for theirs. What
basp saves shrinks as links grow faster than the rest of the machine."""

GRID_TEXT = """`static` is DP = B x SP = 8 / B with Ulysses in each group: the mesh that somebody would choose who knew that every batch
has B equal sequences. There basp makes the same groups and sends the same bytes, so its time should be the same, within the
noise that two contenders of equal work show here. `deepspeed` gathers fewer bytes of weights than FSDP2 does: the ratio to
quote for the layout itself is that of `fsdp2-ulysses`. With B = 1 basp's plan *is* Ulysses."""

ODD_TEXT = """No mesh fixed beforehand has a place for these, and the paper asks that B and the ranks divide. basp cuts the batch as
one stream, so that a sequence whose ranks sit on both sides of a node's border is all that crosses it."""

UNEQUAL_TEXT = """The peers pad to the longest sequence of a group: see tokens/rank. basp pads nothing."""

KV_TEXT = """Peers repeat each kv head until every rank that shares a sequence has one; basp sends a kv head to the ranks that need it."""

NODES_TEXT = (
    """3 nodes x 2 ranks. With 8 heads, Ulysses over 6 ranks has no even share of heads and cannot run; basp can."""
)

SHARDING_TEXT = f"""`weights` is the share of a step that goes into FSDP2's own collectives. Once attention keeps to its node they are what is
left on the links. (gloo's reduce-scatter moves the bytes of an all-reduce, twice what is needed; NCCL's does not.) Two things
mend it, for basp and for its peers alike: gathering the next layer's weights while one is computed (`{AHEAD}`), which moves
the same bytes at a better time, and hybrid sharding (`{HYBRID}`), a copy of the model on each node, sharded inside it, so
that only sums of gradients cross. In `basp train` they are `parallel.gather_ahead` and `parallel.replicate`. All are timed
in turns in the same processes.

![](sharding.png)"""

ATTENTION_TEXT = """Without a model: one layer, forward and backward, q, k, v and the output's gradient given. `by-hand` is a
Ulysses layer of three all-to-alls written out; `ring` is ring attention of our own, on gloo (torch's does not run on a CPU)."""


def _columns() -> str:
    return """## Columns

- **step**: median over rounds; a step takes as long as its slowest rank. **ratio**: to basp's, round by round; median and
  quartiles.
- **all-to-all**: share of the step that is spent inside attention's collectives, forward and backward, after a barrier, by
  the rank that is longest in them; **its ratio**: of those seconds to basp's. **weights**: the same of FSDP2's collectives.
  Both are taken in steps of their own and without credit for overlap: under `gather_ahead` they may add up to more than
  the step took.
- **across nodes**: bytes that attention's collectives send between nodes in a step, counted from their splits; **ratio**: to
  basp's, ∞ where basp sends none. **wire**: what the nodes' interfaces sent in a step: these bytes, weights and gradients,
  and their headers.
- **loss differs**: the largest relative difference to basp's losses at steps 0 and 3, under SGD and AdamW. **tokens/rank**:
  of the rank that computes most, padding included.

[`bench/README.md`](../../README.md) says more. Raw numbers, each with its environment, are in [`rows`](rows)."""


# ---- pictures

COLOURS = {"fsdp2-ulysses": "#D55E00", "deepspeed": "#999999", "static": "#0072B2"}
PARTS = (("all_to_all_share", "#D55E00", "attention's collectives"), ("weights_share", "#E6C27A", "weights, gradients"))


def draw_ratios(grid: Mapping[str, Rows], path: Path) -> None:
    """Step ratios over B, a panel for each length."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(LENGTHS), sharey=True)
    for axes, length in zip(panels, LENGTHS, strict=True):
        axes.axhline(1, color="0.6", linewidth=1, linestyle="--")
        for place, (name, colour) in enumerate(COLOURS.items()):
            ratios = [grid[f"{sequences}x{length}"][name]["step_ratio"] for sequences in BATCHES]
            middle = np.array([ratio["median"] for ratio in ratios])
            spread = [middle - [ratio["q1"] for ratio in ratios], [ratio["q3"] for ratio in ratios] - middle]
            x = np.arange(len(BATCHES)) + 0.06 * (place - 1)
            axes.errorbar(x, middle, yerr=spread, color=colour, marker="o", markersize=4, capsize=2, label=name)
        axes.set(title=f"{length:,} tokens a sequence", xlabel="sequences B", xticks=range(len(BATCHES)))
        axes.set_xticklabels([f"{sequences}" for sequences in BATCHES])
    panels[0].set(ylabel="step time / basp's")
    panels[0].legend(frameon=False, loc="upper left")
    _save(figure, list(panels), path)


def draw_parts(cases: Sequence[Rows], path: Path) -> None:
    """Where a step's time goes under each sharding."""
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(cases))
    for axes, rows in zip(panels, cases, strict=True):
        names = list(rows)
        steps = np.array([row["step_seconds"]["median"] for row in rows.values()])
        axes.barh(names, steps, color="#DDDDDD", label="the whole step")
        for place, (key, colour, label) in enumerate(PARTS):
            seconds = steps * [row[key] for row in rows.values()]
            axes.barh(np.arange(len(names)) + (0.2 if place else -0.2), seconds, height=0.3, color=colour, label=label)
        axes.invert_yaxis()
        axes.set(xlabel="seconds")
    panels[0].legend(frameon=False, fontsize=8)
    _save(figure, list(panels), path)


def _save(figure: Figure, panels: Sequence[Axes], path: Path) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    with written_whole(path) as partial:
        figure.savefig(partial, format="png", dpi=120)


# ---- the command

ORDER = (*RATES, *GRID[:4], *BOTTLENECK, *ODD, *UNEQUAL, *KV_HEADS, *THREE_NODES, *ATTENTION, *GRID[4:])


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the page; rows that are there are kept")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument(
        "--cases", nargs="*", default=[], help="measure only cases whose names begin so, and write no page"
    )
    options = parser.parse_args()
    if not options.page:
        chosen = [case for case in ORDER if not options.cases or case.name.startswith(tuple(options.cases))]
        with sigterm_as_exit():  # which ends the case that runs, and its lab
            measure(chosen, options.folder / "rows")
    if not options.cases:
        with written_whole(options.folder / "README.md") as partial:
            partial.write_text(make_page(options.folder) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
