"""``basp.check`` itself: settings to data, both runs, and their comparison."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from basp.attention import find_kernel
from basp.batches import IGNORED
from basp.checks.compare import Traces, compare
from basp.checks.parallel_run import Job, casts, run_parallel
from basp.checks.reference import run_reference
from basp.checks.report import Report
from basp.checks.shrink import shrink
from basp.checks.subject import SEED, Subject, build, find_subject
from basp.checks.trace import Trace
from basp.errors import ConfigError
from basp.fit import position_limit
from basp.hf import prepare
from basp.parallel import SequenceParallel
from basp.strategies import STRATEGIES
from basp.train.settings import check_name

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def check(
    model: str | PreTrainedConfig | nn.Module,
    ranks: int = 4,
    batch: int = 3,
    lengths: Sequence[int] | None = None,
    *,
    strategy: str = "basp",
    kernel: str = "auto",
    dtype: Literal["float64", "float32", "bfloat16"] = "float64",
    full: bool = False,
    timeout: float = 600.0,
    _in_each_rank: str | None = None,
) -> Report:
    """Run one optimizer step in one process and on N local ranks, on the CPU, and compare all that comes of it.

    In a script of your own, call it under ``if __name__ == "__main__":``, for it starts processes.

    Args:
        model: a model or a config of transformers, or a module of your own with such a config (see ``basp.prepare``); a
            checkpoint folder, a config.json, a model_type ("llama"), or "package.module:Class". Other than with
            ``full``, a small random model of its architecture is run.
        ranks: N.
        batch: number of sequences, where ``lengths`` does not say.
        lengths: tokens of each sequence; by default a few dozen, unequal.
        strategy: as ``SequenceParallel`` takes it.
        kernel: alike.
        dtype: float64 runs without the models' own casts to float32, in both runs; the others as shipped.
        full: the model in its own size and, where it has some, with its own weights.
        timeout: seconds for the ranks.
        _in_each_rank: "module:function" that every rank calls before it runs; tests plant faults with it.

    Returns:
        ``report.ok``, ``report.rows``, ``report.first_difference``; ``report.raise_if_wrong()`` in a test.

    Raises:
        ConfigError, ModelError: settings or a model that cannot be checked, or that basp refuses to train.
        TrainingError: a rank failed.
    """
    lengths = _checked_lengths(ranks, batch, lengths, timeout)
    for what, name, names in (("strategy", strategy, STRATEGIES), ("dtype", dtype, DTYPES)):
        check_name(what, name, names)
    find_kernel(kernel)
    with tempfile.TemporaryDirectory(prefix="basp-check-") as folder:
        subject = _subject(model, full=full, longest=max(lengths), folder=Path(folder) / "weights")
        ids, labels = _data(lengths, int(subject.text.vocab_size))
        job = Job(subject, DTYPES[dtype], ids, labels, ranks, strategy, kernel, timeout, _in_each_rank)
        want, twin = _run_one_process(job)
        rows, difference = compare(Traces(run_parallel(job, Path(folder)), want, twin, job.dtype))
    title = f"{subject.name}: 1 process against {ranks} ranks, {strategy}, kernel {kernel}, {dtype}"
    return Report(title, _notes(subject, lengths, job, full=full), rows, difference)


def _checked_lengths(ranks: int, batch: int, lengths: Sequence[int] | None, timeout: float) -> tuple[int, ...]:
    for name, value in (("ranks", ranks), ("batch", batch), ("timeout", timeout)):
        if not value >= 1:
            raise ConfigError(f"{name} is {value}", allowed="at least 1", remedy=f"change {name}")
    if lengths is None or len(lengths) == 0:  # unequal: ranks end within sequences, and sequences within ranks
        return tuple(int(length) for length in np.random.default_rng(SEED).integers(9, 90, size=batch))
    for number, length in enumerate(lengths):
        if length < 1:
            raise ConfigError(
                f"sequence {number} has {length} tokens", allowed="at least 1", remedy="change or drop that length"
            )
    return tuple(lengths)


def _subject(model: str | PreTrainedConfig | nn.Module, *, full: bool, longest: int, folder: Path) -> Subject:
    subject = find_subject(model)
    if full and isinstance(model, nn.Module):
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"full=True with a {type(model).__name__}, whose weights transformers cannot save",
                allowed="a PreTrainedModel, or a small random model of this class",
                remedy="leave full out",
            )
        model.save_pretrained(folder)
        subject = replace(subject, weights=str(folder))
    positions = position_limit(subject.config)
    if positions is not None and longest > positions:
        raise ConfigError(
            f"a sequence of {longest} tokens with a model of max_position_embeddings {positions}",
            allowed=f"at most {positions}",
            remedy="pass shorter lengths, or raise max_position_embeddings in the model's config",
        )
    return subject if full else replace(subject, config=shrink(subject.config, longest=longest), weights=None)


def _data(lengths: Sequence[int], vocabulary: int) -> tuple[list[Any], list[Any]]:
    """Random token ids, and labels of which every sixth is ignored: ranks count unequally many."""
    random = np.random.default_rng(SEED)
    ids = [random.integers(0, vocabulary, size=length) for length in lengths]
    return ids, [np.where(random.random(len(sequence)) < 1 / 6, IGNORED, sequence) for sequence in ids]


def _run_one_process(job: Job) -> tuple[Trace, Trace | None]:
    """The reference, and for bfloat16 one process in bfloat16 beside a reference of the same weights in float32."""
    with casts(job.dtype):
        model = build(job.subject, job.dtype)
        prepare(model, SequenceParallel(None, kernel=job.kernel))  # refused before any rank is started
        if job.dtype is not torch.bfloat16:
            return run_reference(model, job.ids, job.labels), None
        as_shipped = run_reference(model, job.ids, job.labels, attention="eager")
        return run_reference(build(job.subject, job.dtype).float(), job.ids, job.labels), as_shipped


def _notes(subject: Subject, lengths: Sequence[int], job: Job, *, full: bool) -> tuple[str, ...]:
    text = subject.text
    size = "its own size" if full else "shrunk, random weights"
    window = getattr(text, "sliding_window", None)
    how = {
        torch.float64: "float64, the model's casts to float32 removed in both runs",
        torch.float32: "float32 as shipped",
        torch.bfloat16: "bfloat16 as shipped; errors against float32, held to twice those of one process in bfloat16",
    }
    return (
        f"{size}: {text.num_hidden_layers} layers, {text.num_attention_heads} heads, width {text.hidden_size}"
        + (f", sliding window {window}" if window else "")
        + f"; lengths {','.join(map(str, lengths))}; some labels ignored",
        how[job.dtype],
    )
