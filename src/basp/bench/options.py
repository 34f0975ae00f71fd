"""What ``basp bench`` can be told, and the workload that follows from it. No torch here: help answers at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from basp.errors import ConfigError
from basp.flags import Lengths, Names

BASELINE = "basp"
"""What the others are compared with in ``basp bench step``."""

OWN = ("replicate", "gather_ahead")
"""What a contender may have for itself."""

_DEFAULT_RANKS = 4

_SIZES = {
    "hidden": ("hidden_size", 256),
    "mlp": ("intermediate_size", 512),
    "layers": ("num_hidden_layers", 2),
    "heads": ("num_attention_heads", 8),
    "kv_heads": ("num_key_value_heads", None),
    "vocab": ("vocab_size", 1024),
}
"""Of each flag: its name in a model's config, and its value where neither flag nor config.json gives one."""

_LEAST = {
    **dict.fromkeys(("rounds", "replicate", "ranks", "batch", "head_dim", *_SIZES), 1),
    **dict.fromkeys(("warmup", "seed", "gather_ahead"), 0),
    "length": 2,
}


@dataclass(frozen=True)
class RunOptions:
    """What all benchmarks have in common."""

    require: Names = ()
    """Contenders without which the benchmark fails; the others get a row that says why they have no time."""
    lengths: Lengths = ()
    """Tokens of each sequence of the batch; or give --batch and --length."""
    batch: int | None = None
    """Number of sequences."""
    length: int | None = None
    """Tokens of each."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of computation. A model's weights and optimizer stay in float32 under bfloat16."""
    seed: int = 0
    """Of weights and of data."""
    ranks: int | None = None
    """Local ranks to start: 4. Under torchrun its world is used, and this must be left out or equal to it."""
    rounds: int = 5
    """Timed steps of each contender, and as many with a stopwatch around its collectives."""
    warmup: int = 2
    """Steps of each before these."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Collective backend: auto is nccl where CUDA is available, else gloo."""
    timeout: float = 600.0
    """Seconds that a collective waits for the other ranks before the benchmark is ended."""
    out: str | None = None
    """Folder to write: rows.jsonl, table.md, plot.png. It must not hold rows already."""


@dataclass(frozen=True)
class StepOptions(RunOptions):
    """One training step of one model on one batch, by several contenders in turn, in the same processes.

    First each must give basp's losses, under SGD and under AdamW; one that does not gets no time. Then they take steps
    in turns, and every round gives a ratio of each to basp. Under torchrun (or whatever sets its variables) this joins
    the ranks that are there; else it starts its own.

      basp bench step                                        basp beside Ulysses, 2 x 2,048 tokens, 4 ranks
      basp bench step --contenders basp,ulysses,static --lengths 4096,512,512
      torchrun --nproc-per-node 8 -m basp bench step --config config.json --dtype bfloat16 --out results
    """

    contenders: Names = (BASELINE, "ulysses")
    """Of basp, ulysses, fsdp2-ulysses, static, deepspeed, ring; one named twice shows how far equals differ.

    Behind a name, replicate or gather_ahead may be set for it alone: basp,basp:replicate=2:gather_ahead=1.
    """
    config: str | None = None
    """A model's config.json; a Llama by default. The sizes below change it."""
    layers: int | None = None
    """Number of layers: 2."""
    hidden: int | None = None
    """Width: 256."""
    mlp: int | None = None
    """Width of the MLP: 512."""
    heads: int | None = None
    """Query heads: 8."""
    kv_heads: int | None = None
    """Key and value heads; as many as query heads by default."""
    vocab: int | None = None
    """Size of the vocabulary: 1024."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Of the steps that are timed; both are compared beforehand."""
    lr: float = 1e-3
    """Learning rate."""
    replicate: int = 1
    """Hybrid sharding: copies of the model, each sharded over neighbouring ranks. Usually the number of nodes."""
    gather_ahead: int = 0
    """Layers whose weights FSDP2 gathers while one is computed; 0 leaves it to FSDP2."""


@dataclass(frozen=True)
class AttentionOptions(RunOptions):
    """One attention layer, forward and backward, without a model: what the executor itself costs.

    Outputs and gradients are compared first. Ratios are to the contender that is named first, by default a Ulysses
    layer written by hand; over one sequence the plan of basp *is* Ulysses, and a general executor can only lose.

      basp bench attention                                   one sequence of 8,192 tokens on 4 ranks
      basp bench attention --inside exchange --rounds 24     packing, collectives and unpacking alone
      basp bench attention --batch 2 --length 4096 --contenders by-hand,basp,ring
    """

    contenders: Names = ("by-hand", "by-hand-packed", "ulysses", BASELINE)
    """Of by-hand, by-hand-packed, ulysses, basp, yunchang, ring; the first is the baseline."""
    heads: int = 16
    """Query heads."""
    kv_heads: int = 4
    """Key and value heads."""
    head_dim: int = 64
    """Elements of one head."""
    inside: Literal["attention", "exchange"] = "attention"
    """attention: sdpa, as in training. exchange: q + k + v in its place, so that only the exchange takes time."""


def check_options(options: RunOptions) -> None:
    """Refuse numbers out of range, and flags that contradict each other.

    Raises:
        ConfigError: naming the flag.
    """
    for name, bound in _LEAST.items():
        value = getattr(options, name, None)
        if value is not None and value < bound:
            raise _refusal(name, value, f"at least {bound}")
    for name in ("lr", "timeout"):
        if not 0 < getattr(options, name, 1) < float("inf"):
            raise _refusal(name, getattr(options, name), "a finite number above 0")
    if options.lengths and (options.batch is not None or options.length is not None):
        raise ConfigError(
            "--lengths together with --batch or --length",
            allowed="--lengths, or the other two",
            remedy="write out every length, or leave --lengths out",
        )
    if isinstance(options, StepOptions | AttentionOptions) and not options.contenders:
        raise _refusal("contenders", "empty", f"names, as in {BASELINE},ulysses")
    if any(length < 2 for length in options.lengths):
        raise _refusal("lengths", ",".join(map(str, options.lengths)), "at least 2 tokens each: one predicts the next")


def _refusal(name: str, value: Any, allowed: str) -> ConfigError:
    flag = f"--{name.replace('_', '-')}"
    return ConfigError(f"{flag} is {value}", allowed=allowed, remedy=f"change {flag}")


def labels_of(options: StepOptions) -> tuple[str, ...]:
    """Contenders in the order of their rows: the baseline is always there, and first. A name may be there again."""
    others = [name for name in options.contenders if name != BASELINE]
    again = [BASELINE] * (options.contenders.count(BASELINE) - 1)
    return with_required((BASELINE, *again, *others), options.require)


def read_label(label: str) -> tuple[str, dict[str, int]]:
    """Of "basp:replicate=2": the contender's name, and what is set for it alone.

    Raises:
        ConfigError: something else than whole numbers for ``OWN``.
    """
    name, *changes = label.split(":")
    own: dict[str, int] = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in OWN or not value.isdecimal() or int(value) < _LEAST[key]:
            raise ConfigError(
                f"{change!r} behind a contender's name, in {label!r}",
                allowed=" or ".join(f"{key}={_LEAST[key]} and more" for key in OWN),
                remedy="change it, or leave it out",
            )
        own[key] = int(value)
    return name, own


def with_required(names: Sequence[str], required: Sequence[str]) -> tuple[str, ...]:
    """Contenders that are asked for, and behind them those that are only required."""
    return (*names, *(name for name in required if name not in names))


def number_labels(names: Sequence[str]) -> list[str]:
    """The second "basp" becomes "basp #2"."""
    seen: Counter[str] = Counter()
    labels: list[str] = []
    for name in names:
        seen[name] += 1
        labels.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return labels


def lengths_of(options: RunOptions) -> tuple[int, ...]:
    """Tokens of each sequence."""
    batch, length = (2, 2048) if isinstance(options, StepOptions) else (1, 8192)
    return options.lengths or (options.length or length,) * (options.batch or batch)


def text_of(lengths: Sequence[int]) -> str:
    """A batch in a few words."""
    if len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]:,} tokens"
    return f"{len(lengths)} sequences of {sum(lengths):,} tokens"


def local_ranks_of(options: RunOptions) -> int:
    """Ranks to start where none are there."""
    return options.ranks or _DEFAULT_RANKS


def model_of(options: StepOptions) -> dict[str, Any]:
    """The model's config, as ``AutoConfig.for_model`` takes it; a Llama has as many positions as the batch needs.

    Raises:
        ConfigError: a config.json that cannot be read.
    """
    given = {key: getattr(options, flag) for flag, (key, _) in _SIZES.items() if getattr(options, flag) is not None}
    if options.config is not None:
        return {**_read_config(options.config), **given}
    defaults = {key: value for key, value in _SIZES.values() if value is not None}
    model = {"model_type": "llama", **defaults, **given}
    model.setdefault("num_key_value_heads", model["num_attention_heads"])
    return model | {"max_position_embeddings": max(lengths_of(options))}


def _read_config(path: str) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--config {path!r} cannot be read: {getattr(error, 'strerror', None) or error}",
            allowed="a model's config.json",
            remedy="check the path",
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"--config {path!r} has no model_type", allowed="a model's config.json", remedy="add it")
    return values
