"""What the study measures: one command for each case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LINK = "150mbit"
"""At which Ulysses over all ranks spends 34 to 38 % of its step in attention's collectives at B = 2, T = 2048."""

LENGTHS, BATCHES = (512, 1024, 2048), (1, 2, 4, 8)
CONTENDERS = ("basp", "fsdp2-ulysses", "deepspeed", "static")
ULYSSES = "fsdp2-ulysses"
MODEL = {"layers": 2, "hidden": 256, "mlp": 256, "heads": 8, "kv-heads": 8, "vocab": 256}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: of its file.
        lengths: tokens of each sequence.
        contenders: the first is the baseline.
        cannot: those of them that are known to have no time; the others must have one.
        nodes: of the lab; ``ranks``: of each node; ``link``: rate of each node's.
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

    def command(self, basp: Sequence[str] = ("basp",)) -> list[str]:
        """What measures it, but for where its rows go."""
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
        return [*basp, "lab", "run", *lab, "--", *basp, "bench", what, *flags]


def equal(sequences: int, length: int) -> Case:
    """Equal sequences on 2 x 4 ranks; a fixed mesh has a place for them if their number and the ranks' divide."""
    cannot = () if 8 % sequences == 0 else ("static",)
    return Case(f"{sequences}x{length}", (length,) * sequences, cannot=cannot)


TWO = (2048, 2048)

RATES = (
    equal(2, 2048),
    *(Case(f"link-{rate}", TWO, ("basp", ULYSSES), link=rate) for rate in ("300mbit", "1gbit")),
)
GRID = tuple(equal(sequences, length) for length in reversed(LENGTHS) for sequences in BATCHES)
ODD = tuple(equal(sequences, 1024) for sequences in (3, 5, 6))
UNEQUAL = (
    Case("two-unequal", (3000, 1096)),
    Case("five-unequal", (1500, 1000, 750, 500, 346), cannot=("static",)),
    Case("one-long", (1024, 256, 256, 128, 128, 128, 64, 64)),
)
KV_HEADS = (Case("kv2-2x2048", TWO, model=(("kv-heads", 2),)),)
TWELVE = (("hidden", 384), ("heads", 12), ("kv-heads", 12))
THREE_NODES = (
    *(Case(f"3nodes-{n}x1024", (1024,) * n, nodes=3, ranks=2, model=TWELVE) for n in (3, 2)),
    Case("3nodes-8heads", (1024,) * 3, cannot=(ULYSSES, "deepspeed"), nodes=3, ranks=2),
)
AHEAD, HYBRID, BOTH = "gather_ahead=1", "replicate=2", "replicate=2:gather_ahead=1"
SHARDING = (
    "basp",
    *(f"basp:{own}" for own in (AHEAD, HYBRID, BOTH)),
    ULYSSES,
    f"{ULYSSES}:{BOTH}",
)
BOTTLENECK = Case("sharding-8x1024", (1024,) * 8, SHARDING)
ATTENTION = tuple(
    Case(f"attention-{n}x2048", (2048,) * n, ("basp", "by-hand", "yunchang", "ring"), attention=True) for n in (2, 8)
)

ORDER = (
    *(*GRID[:4], BOTTLENECK, *ODD, *KV_HEADS, UNEQUAL[2], THREE_NODES[0], THREE_NODES[2]),
    *(*GRID[4:], *RATES[1:], ATTENTION[0], UNEQUAL[1], THREE_NODES[1], UNEQUAL[0], ATTENTION[1]),
)
"""In the order in which they are measured: what the page cannot do without comes first."""
