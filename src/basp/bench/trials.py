"""Before anything is timed: does each contender compute what the baseline does? And how much memory does it take?"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from basp.bench.contender import Contender, Unavailable, Workload
from basp.bench.memory import PeakMemory
from basp.bench.registry import load_builder
from basp.errors import TrainingError

Made = TypeVar("Made")

STEPS = 4
COMPARED = (0, STEPS - 1)
"""Step 0 has the loss of the weights that all start from; the last has three optimizer steps behind it."""

TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 1e-2}
"""Relative, of losses."""

COMPARISON = (
    f"Losses are compared at steps {COMPARED[0]} and {COMPARED[1]}, under SGD and under AdamW; the largest relative "
    "difference is shown."
)

_SGD_LR = 0.1
"""Large enough that a gradient of the wrong size shows in the last loss. AdamW's steps do not depend on its size."""


class Entrant(NamedTuple):
    """Who is to take steps: "module:function" of its builder, and its workload. Batches are the same for all."""

    builder: str
    workload: Workload


@dataclass
class Trial:
    """What became of one contender before the timing.

    Attributes:
        label: its name, and a number if it is there again.
        does: in its own words; empty if it could not be built.
        tokens: of each rank.
        counted: whether the stopwatch knows its attention's collectives.
        losses: by optimizer, of each step.
        difference: the largest relative difference to the baseline's losses that are compared, over all ranks.
        peak: bytes in a step, of the rank that holds most; None where nobody tells.
        peak_kind: what that is.
        refusal: why it gets no time; None if it does.
    """

    label: str
    does: str = ""
    tokens: list[int] = field(default_factory=list)
    counted: bool = True
    losses: dict[str, list[float]] = field(default_factory=dict)
    difference: float | None = None
    peak: int | None = None
    peak_kind: str = ""
    refusal: str | None = None


def try_contenders(
    entrants: Mapping[str, Entrant],
    device: torch.device,
    *,
    required: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> list[Trial]:
    """A trial of each, the first of which is the baseline, alone in memory, a few steps under each optimizer.

    All ranks call this together, and get the same.

    Raises:
        Unavailable: a required contender, or the baseline, cannot run.
        TrainingError: a required contender does not compute what the baseline does.
    """
    trials = [Trial(label) for label in entrants]
    base = entrants[trials[0].label].workload
    # The workload's own optimizer comes last: it has the memory that is reported, and what is loaded once is there.
    for optimizer in sorted(("adamw", "sgd"), key=lambda name: name == base.optimizer):
        changes: dict[str, Any] = {"optimizer": optimizer} | ({"lr": _SGD_LR} if optimizer == "sgd" else {})
        for trial in trials:
            if trial.refusal is None:
                say(f"{trial.label}: losses under {optimizer}")
                entrant = entrants[trial.label]
                entrant = entrant._replace(workload=replace(entrant.workload, **changes))
                _try(trial, entrant, device, must=trial.label in (trials[0].label, *required))
    for trial in trials[1:]:
        if trial.refusal is None:
            _compare(trial, trials[0], base.dtype)
            if trial.refusal is not None and trial.label in required:
                raise required_but_wrong(trial, f"the losses of {trials[0].label}", base.dtype)
    return trials


def required_but_wrong(trial: Trial, wanted: str, dtype: str) -> TrainingError:
    """What ends a benchmark whose required contender does not compute what the baseline does."""
    return TrainingError(
        f"{trial.label} was required, and {trial.refusal}",
        allowed=f"{wanted}, within {TOLERANCE[dtype]:g} relative",
        remedy="leave it out of --require to see the others' times",
    )


def make_batch(workload: Workload, index: int = 0) -> list[np.ndarray]:
    """Random token ids, the same on every rank."""
    random = np.random.default_rng([workload.seed, index])
    return [random.integers(workload.model["vocab_size"], size=length) for length in workload.lengths]


def build_everywhere(entrant: Entrant, device: torch.device) -> Contender:
    """A contender that every rank could build.

    Raises:
        Unavailable: on every rank, when some could not.
    """
    return on_all_ranks(
        lambda: load_builder(entrant.builder)(entrant.workload, device), undo=lambda contender: contender.close()
    )


def on_all_ranks(build: Callable[[], Made], *, undo: Callable[[Made], None] = lambda _: None) -> Made:
    """What ``build`` makes, once every rank has made its own.

    Raises:
        Unavailable: on every rank, when some could not; the others have undone theirs.
    """
    made: Made | None = None
    refusal: Unavailable | None = None
    try:
        made = build()
    except Unavailable as error:
        refusal = error
    refusals: list[Unavailable | None] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal)
    for told in refusals:
        if told is not None:
            if made is not None:
                undo(made)
            raise told
    assert made is not None
    return made


def _try(trial: Trial, entrant: Entrant, device: torch.device, *, must: bool) -> None:
    gc.collect()
    memory = PeakMemory(device)
    try:
        contender = build_everywhere(entrant, device)
    except Unavailable as error:
        if must:
            raise
        trial.refusal = str(error)
        return
    batch = make_batch(entrant.workload)  # always the same: then what the optimizer has learnt shows in the loss
    losses = [contender.step(batch) for _ in range(STEPS - 1)]
    memory.restart()
    losses.append(contender.step(batch))
    trial.losses[entrant.workload.optimizer] = losses
    trial.does, trial.counted, trial.peak_kind = contender.does, contender.counted, memory.kind
    told: list[tuple[int, int | None]] = [(0, None)] * dist.get_world_size()
    dist.all_gather_object(told, (contender.tokens, memory.peak()))
    trial.tokens = [tokens for tokens, _ in told]
    trial.peak = max((peak for _, peak in told if peak is not None), default=None)
    contender.close()


def _compare(trial: Trial, baseline: Trial, dtype: str) -> None:
    where: dict[str, float] = {}
    for optimizer, losses in trial.losses.items():
        for step in COMPARED:
            expected = baseline.losses[optimizer][step]
            difference = abs(losses[step] - expected) / abs(expected)
            where[f"step {step} under {optimizer}"] = difference if np.isfinite(difference) else float("inf")
    # Every rank compares its own: a loss that only some have right is wrong.
    told: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, where)
    worst = {place: max(each[place] for each in told) for place in where}
    place = max(worst, key=lambda name: worst[name])
    trial.difference = worst[place]
    if trial.difference > TOLERANCE[dtype]:
        trial.refusal = f"its loss differs from {baseline.label}'s by {trial.difference:.1e} relative in {place}"
