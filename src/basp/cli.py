"""The command ``basp``: finds the subcommand, parses its flags, turns errors into exit codes.

Heavy packages (torch, transformers, numpy) are imported by a subcommand after its flags are parsed, so that help and
mistakes in flags answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import tyro

import basp
from basp.bench.options import AttentionOptions, StepOptions
from basp.errors import BaspError, ConfigError, DisagreementError, TrainingError
from basp.flags import Lengths
from basp.train.config import TrainConfig
from basp.train.settings import check_name, check_settings, load_settings

if TYPE_CHECKING:
    from rich.table import Table

    from basp.plans import Plan, Tile

_Options = TypeVar("_Options")


def main(argv: list[str] | None = None) -> int:
    """Run ``basp`` with these arguments (the process's own by default) and return its exit code.

    0 is success, 1 a run that failed, 2 input that was refused, 130 an interrupt.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(arguments)
    except BaspError as error:
        _complain(f"basp: error: {error}")
        return 1 if isinstance(error, TrainingError | DisagreementError) else 2
    except KeyboardInterrupt:
        _complain("basp: interrupted")
        return 130
    except SystemExit as stop:  # tyro's way to end after --help (0) and after a flag it refuses (2)
        return stop.code if isinstance(stop.code, int) else 2


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(f"basp {basp.__version__}")
        return 0
    about = "Batch-aware sequence parallelism: train language models on long documents."
    return _choose("basp", f"{about}\nbasp --version prints the version.", COMMANDS, arguments)


def _choose(program: str, about: str, commands: dict[str, Command], arguments: list[str]) -> int:
    """Run the command that ``arguments`` begin with, or show which there are."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview(program, about, commands), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    check_name("the command", name, commands)
    return commands[name].run(rest)


def _overview(program: str, about: str, commands: dict[str, Command]) -> str:
    width = max(map(len, commands))
    lines = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in commands.items())
    return (
        f"usage: {program} COMMAND [OPTIONS]\n\n{about}\n\n"
        f"commands:\n{lines}\n\n{program} COMMAND --help lists a command's options."
    )


def _complain(message: str) -> None:
    if _speaks():
        print(message, file=sys.stderr)


def _speaks() -> bool:
    """Whether this process is the one that prints: under torchrun every rank meets the same mistake."""
    return os.environ.get("RANK", "0") == "0"


def _print(table: Table, line: str) -> None:
    from rich.console import Console

    Console(markup=False, highlight=False).print(table, line)


def _parse(options: type[_Options], command: str, arguments: list[str], default: Any = None) -> _Options:
    start = {} if default is None else {"default": default}
    try:
        return tyro.cli(options, prog=f"basp {command}", args=arguments, console_outputs=_speaks(), **start)
    except BrokenPipeError:  # whoever read --help (head, less) has left; Python's last flush must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


# ---- basp train ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainOptions:
    """Train a causal language model on long documents; the batch decides how many ranks share a sequence.

    Settings come from a TOML file, from flags, or both; flags override the file. The flag --optim.lr is the key lr in
    the file's table [optim], and so for every flag below.

      basp train                                     a small Llama on Python's own sources
      basp train run.toml                            settings from a file
      basp train run.toml --ranks 4 --optim.lr 1e-3  two of them overridden
    """

    file: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[run.toml]")] = None
    """TOML file with settings."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def _train(arguments: list[str]) -> int:
    options = _parse(TrainOptions, "train", arguments)
    if options.file is not None:  # parse again, with what the file says in the place of the defaults
        options = _parse(TrainOptions, "train", arguments, TrainOptions(config=load_settings(options.file)))
    from basp.strategies import STRATEGIES

    config = check_settings(options.config, strategies=STRATEGIES)
    from basp.train.launch import run

    return run(config)


# ---- basp plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanOptions:
    """Show how a batch is laid out over ranks and what one attention layer sends, beside Ulysses. Starts no ranks.

    basp plan --lengths 16384,16384,9000 --ranks 8 --heads 32 --kv-heads 8
    """

    lengths: Lengths
    """Tokens of each sequence of the micro-batch."""
    ranks: int
    """Ranks that share the batch."""
    heads: int
    """Query heads of the model."""
    kv_heads: int | None = None
    """Key and value heads; as many as query heads by default."""
    strategy: str = "basp"
    """How the batch becomes a plan: "basp" or "ulysses"."""
    head_dim: int = 128
    """Elements of one head."""
    itemsize: int = 2
    """Bytes of one element: 2 for bfloat16, 4 for float32."""


def _plan(arguments: list[str]) -> int:
    options = _parse(PlanOptions, "plan", arguments)
    for name, value in (("--head-dim", options.head_dim), ("--itemsize", options.itemsize)):
        if value < 1:
            raise ConfigError(f"{name} is {value}", allowed="at least 1", remedy=f"change {name}")
    from basp.strategies import STRATEGIES, plan

    check_name("--strategy", options.strategy, STRATEGIES)
    sizes: dict[str, Any] = {"ranks": options.ranks, "heads": options.heads, "kv_heads": options.kv_heads}
    chosen = plan(options.lengths, strategy=options.strategy, **sizes)
    ulysses = plan(options.lengths, strategy="ulysses", **sizes)
    totals = [int(_traffic(each, options).sum()) for each in (chosen, ulysses)]
    _print(_plan_table(chosen, options), _comparison(options.strategy, *totals))
    return 0


def _traffic(plan: Plan, options: PlanOptions) -> Any:
    return plan.traffic(options.head_dim, options.itemsize)


def _plan_table(plan: Plan, options: PlanOptions) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from basp.report import bytes_text

    table = Table(title=f"{options.strategy}: {len(plan.lengths)} sequences on {plan.ranks} ranks", box=SIMPLE)
    for heading in ("rank", "tokens", "owns", "heads", "work", "sends", "receives"):
        table.add_column(heading, justify="left" if heading in ("owns", "heads") else "right", overflow="fold")
    traffic = _traffic(plan, options)
    for rank in range(plan.ranks):
        table.add_row(
            str(rank),
            f"{plan.tokens[rank]:,}",
            _runs((shard.sequence, f"[{shard.start}:{shard.stop}]") for shard in plan.shards[rank]),
            _runs((tile.sequence, _tile_text(plan, tile)) for tile in plan.tiles[rank]),
            f"{plan.attention_work[rank]:.2e}",
            bytes_text(traffic[rank].sum()),
            bytes_text(traffic[:, rank].sum()),
        )
    table.caption = (
        "owns: sequence[tokens]; heads: sequence[query heads]; work: query-key pairs x heads; "
        "sends, receives: one attention layer's forward"
    )
    return table


def _tile_text(plan: Plan, tile: Tile) -> str:
    heads = f"[{tile.head_start}:{tile.head_stop}]"
    if (tile.query_start, tile.query_stop) == (0, plan.lengths[tile.sequence]):
        return heads
    return f"{heads} queries [{tile.query_start}:{tile.query_stop}]"


def _runs(parts: Iterable[tuple[int, str]]) -> str:
    """``(sequence, text)`` pairs, one a line; neighbouring sequences with the same text become ``first-last`` text."""
    runs: list[tuple[int, int, str]] = []
    for sequence, text in parts:
        if runs and runs[-1][1:] == (sequence - 1, text):
            runs[-1] = (runs[-1][0], sequence, text)
        else:
            runs.append((sequence, sequence, text))
    return "\n".join(f"{first}{text}" if first == last else f"{first}-{last}{text}" for first, last, text in runs)


def _comparison(strategy: str, sent: int, ulysses: int) -> str:
    from basp.report import bytes_text

    total = f"One layer's forward, all ranks: {strategy} sends {bytes_text(sent)}"
    if strategy == "ulysses":
        return total
    ratio = f" (ratio {sent / ulysses:.2f})" if ulysses else ""
    return f"{total}; ulysses {bytes_text(ulysses)}{ratio}"


# ---- basp check ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckOptions:
    """Compare an optimizer step in one process with the same on N local ranks: loss, logits, every gradient.

    Exit code 0: all equal within the tolerance; 1: not, and it says where first; 2: refused.

      basp check llama                               a small random Llama, in float64, on 4 ranks
      basp check checkpoints/Qwen3-0.6B --full       a checkpoint in its own size, with its own weights
      basp check my_package.models:MyModel           a class of your own, made from its config_class
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder, config.json, model_type of transformers, or package.module:Class."""
    ranks: int = 4
    """Local processes that share the batch, on the CPU."""
    batch: int = 3
    """Number of sequences, where --lengths does not say."""
    lengths: Lengths = ()
    """Tokens of each sequence; --batch of unequal lengths by default."""
    strategy: str = "basp"
    """How the batch becomes a plan: "basp" or "ulysses"."""
    kernel: str = "auto"
    """Attention kernel of the ranks: "auto", or "sdpa", "flex", "eager", "flash2", "flash3", "flash4"."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """float64 removes the model's casts to float32 in both runs; the others run as shipped."""
    full: bool = False
    """The model in its own size, with its own weights; otherwise a few narrow layers with random ones."""
    timeout: float = 600.0
    """Seconds for the ranks."""


def _check(arguments: list[str]) -> int:
    options: dict[str, Any] = dict(vars(_parse(CheckOptions, "check", arguments)))
    from basp.checks import check

    report = check(**options)
    _print(report.table(), f"first difference: {report.first_difference}" if report.first_difference else "all equal")
    return 0 if report.ok else 1


# ---- basp lab ------------------------------------------------------------------------------------------------------


def _lab(arguments: list[str]) -> int:
    from basp.lab.command import LAB_COMMANDS

    # What follows -- belongs to the command that is run, letter for letter.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, given = arguments[:end], tuple(arguments[end + 1 :])

    def runner(name: str) -> Callable[[list[str]], int]:
        def run(rest: list[str]) -> int:
            options = _parse(LAB_COMMANDS[name].options, f"lab {name}", rest)
            if given:
                options = _with_command(name, options, given)
            return LAB_COMMANDS[name].run(options)

        return run

    about = "An emulated cluster on this machine: nodes joined by links of a chosen rate. Needs root, on Linux."
    commands = {name: Command(each.summary, runner(name)) for name, each in LAB_COMMANDS.items()}
    return _choose("basp lab", about, commands, own)


def _with_command(name: str, options: Any, given: tuple[str, ...]) -> Any:
    if name != "run":
        raise ConfigError(
            f"'basp lab {name}' with a command", allowed="its options", remedy="leave out what follows --"
        )
    return replace(options, command=(*options.command, *given))


# ---- basp bench ----------------------------------------------------------------------------------------------------


def _bench(arguments: list[str]) -> int:
    about = "What a step costs, beside others: interleaved, as ratios with their spread."
    return _choose("basp bench", about, BENCHMARKS, arguments)


def _bench_step(arguments: list[str]) -> int:
    options = _parse(StepOptions, "bench step", arguments)
    from basp.bench.step import run_step

    return run_step(options, version=basp.__version__)


def _bench_attention(arguments: list[str]) -> int:
    options = _parse(AttentionOptions, "bench attention", arguments)
    from basp.bench.attention import run_attention

    return run_attention(options, version=basp.__version__)


class Command(NamedTuple):
    """A subcommand: one line for the overview, and what runs its arguments and returns an exit code."""

    summary: str
    run: Callable[[list[str]], int]


BENCHMARKS: dict[str, Command] = {
    "step": Command("one training step: our strategies, and peers", _bench_step),
    "attention": Command("one attention layer alone: what the executor costs", _bench_attention),
}

COMMANDS: dict[str, Command] = {
    "train": Command("train a model; starts its own local ranks, or joins torchrun's", _train),
    "check": Command("compare one process with N ranks on a model: loss, logits, every gradient", _check),
    "plan": Command("show how a batch is laid out over ranks and what that sends", _plan),
    "lab": Command("an emulated cluster on this machine: make it, run ranks in it, change its links", _lab),
    "bench": Command("measure a training step or an attention layer, beside other systems", _bench),
}
