"""The whole configuration of ``basp train``: a TOML file's tables and the command line's flags, one dataclass each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import tyro

SMALL_LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""The model of a run that names neither a path nor a config: small enough to train on a laptop's CPU."""


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object as a dict; ValueError for anything else, NaN and Infinity included."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    value = json.loads(text, parse_constant=refuse)
    if not isinstance(value, dict):
        raise ValueError(f'expected a JSON object such as {{"model_type": "llama"}}, not {text}')
    return value


def _parse_flag(words: list[str]) -> dict[str, Any] | None:
    return None if words == ["None"] else parse_json_object(words[0])


# tyro alone would make subcommands out of `dict | None`; this makes it one flag with one JSON value.
_JsonFlag = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="{None}|JSON",
    instance_from_str=_parse_flag,
    is_instance=lambda value: value is None or isinstance(value, dict),
    str_from_instance=lambda value: ["None" if value is None else json.dumps(value, default=str)],
)


@dataclass(frozen=True)
class ModelConfig:
    """Which model: a checkpoint folder, or an architecture started at random."""

    path: str | None = None
    """Checkpoint folder as written by save_pretrained (safetensors only). Give either path or config."""
    config: Annotated[dict[str, Any] | None, _JsonFlag] = None
    """Architecture for a random start: model_type, sizes. Neither path nor config gives a small Llama."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Computation dtype. Under bfloat16 with sharding = "fsdp" the weights and the optimizer stay in float32."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    kernel: Literal["auto", "flash3", "flash4", "flash2", "sdpa", "flex", "eager"] = "auto"
    """Attention kernel: auto takes for each call the best that can do it; what it takes is printed."""
    compile: bool = False
    """torch.compile the decoder layers (one graph break per layer, at attention)."""


@dataclass(frozen=True)
class DataConfig:
    """Which documents, and how they become sequences."""

    source: str = "stdlib"
    """"stdlib" (the running Python's own sources), a folder of text files, a .jsonl or a .parquet file."""
    text_field: str = "text"
    """Field that holds the document in JSONL and Parquet."""
    tokenizer: str = "bytes"
    """"bytes", or a transformers tokenizer folder."""
    max_length: int = 4096
    """Longest sequence in tokens."""
    long_documents: Literal["split", "truncate", "refuse"] = "split"
    """What to do with documents longer than max_length."""
    shuffle: bool = True
    """Draw sequences in a new random order each epoch (from seed); otherwise in file order."""


@dataclass(frozen=True)
class BatchConfig:
    """How many sequences an optimizer step sees; independent of the number of ranks."""

    sequences: int = 4
    """Sequences per micro-batch, over all ranks together."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is laid out over ranks."""

    ranks: Annotated[int, tyro.conf.arg(aliases=("--ranks",))] = 1
    """Local ranks to start. Under torchrun its world is used, and this must be 1 or equal to it."""
    strategy: Annotated[str, tyro.conf.arg(aliases=("--strategy",))] = "basp"
    """How a batch becomes a plan: "basp" or "ulysses"."""
    sharding: Literal["fsdp", "none"] = "fsdp"
    """"fsdp" shards weights, gradients and optimizer over all ranks (FSDP2); "none" keeps a copy on each."""
    replicate: int = 1
    """Hybrid sharding: copies of the model, each sharded over neighbouring ranks. Usually the number of nodes."""
    gather_ahead: int = 0
    """Layers whose weights are gathered while one is computed; 0 leaves it to FSDP2: one on a GPU, none on a CPU."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Collective backend: auto is nccl where CUDA is available, else gloo."""
    timeout: float = 600.0
    """Seconds that a collective waits for the other ranks before the run is ended."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    steps: Annotated[int | None, tyro.conf.arg(aliases=("--steps",))] = None
    """Optimizer steps to run. Give either steps or epochs; with neither, one epoch is run."""
    epochs: float | None = None
    """Passes over the data to run. Give either steps or epochs."""
    lr: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up; cosine and linear end at 0."""
    warmup: int = 0
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to matrices only (not to norms and biases)."""
    clip_norm: float = 1.0
    """Global gradient norm to clip at; 0 turns clipping off."""


@dataclass(frozen=True)
class LogConfig:
    """What is written down, and how often."""

    every: int = 1
    """Steps between records of metrics.jsonl; the first and the last are always there."""
    eval_every: int = 0
    """Steps between evaluations (needs eval_fraction); 0 evaluates only at the end."""
    eval_fraction: float = 0.0
    """Share of documents held out for evaluation; 0 turns evaluation off."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    run_dir: str = "runs/stdlib"
    """Folder of the run: metrics.jsonl, config.toml, report.png, model/."""
    overwrite: bool = False
    """Replace an existing run folder; it is kept beside until the new run has finished."""
    seed: int = 0
    """Seed of the model's random start and of the data's order."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    log: LogConfig = field(default_factory=LogConfig)
