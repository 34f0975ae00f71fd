"""Compare two traces: a row for each thing, and the first place where they part."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from basp.checks.report import Difference, Row
from basp.checks.trace import LOGITS, Trace

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest max |a - b| / max |b|."""
BFLOAT16_FLOOR = 2**-7
"""bfloat16 is held to twice one process's own error, and to no less than this: its spacing at 1."""

_GROUPS = {
    "embedding": r"embed|wte|wpe",
    "head": r"lm_head|embed_out",
    "norms": r"norm|(^|\.)ln_",
    "attention sinks": r"sinks",
    "router": r"router|mlp\.gate\.|block_sparse_moe\.gate\.",
    "attention qkv": r"qkv|c_attn|query_key_value|W_pack",
    "mlp": r"mlp|feed_forward|ffn|experts|(^|\.)fc\d",
    "attention q": r"q_proj|q_[ab]_proj|query",
    "attention kv": r"kv_[ab]_proj",
    "attention k": r"k_proj|key",
    "attention v": r"v_proj|value",
    "attention o": r"o_proj|out_proj|attn\.c_proj|dense",
}
"""Group of a parameter: the first pattern that is found in its name."""


class Compared(NamedTuple):
    """One tensor of N ranks and of one process; ``twin`` is of one process in bfloat16, if ``want`` is float32."""

    name: str
    got: Tensor | None
    want: Tensor
    twin: Tensor | None
    scale: float
    """Largest number among tensors of its kind: what is tiny beside it is rounding, and counts as zero."""


@dataclass(frozen=True)
class Traces:
    """What is compared: ``got`` of N ranks, ``want`` of one process, ``twin`` for bfloat16 (see ``Compared``)."""

    got: Trace
    want: Trace
    twin: Trace | None
    dtype: torch.dtype


def compare(traces: Traces) -> tuple[tuple[Row, ...], Difference | None]:
    """Every row, and the first difference where one of them is beyond its tolerance."""
    got, want, twin = traces.got, traces.want, traces.twin
    groups: dict[str, list[Compared]] = {}
    for pair in _parameters(traces, "gradients"):
        groups.setdefault(group_of(pair.name), []).append(pair)
    norm = Compared("", _norm(got), _norm(want), twin and _norm(twin), 1.0)
    rows = [
        _row("loss", _losses(traces), traces.dtype),
        _row("logits", _tokens(traces, "outputs", LOGITS), traces.dtype),
        *(_row(f"gradient: {name}", groups[name], traces.dtype) for name in [*_GROUPS, "other"] if name in groups),
        _row("gradient norm", [norm], traces.dtype),
        _row("one SGD step", _parameters(traces, "stepped"), traces.dtype),
    ]
    return tuple(rows), None if all(row.ok for row in rows) else _first_difference(traces)


def group_of(parameter: str) -> str:
    """The part of the model that a parameter belongs to, by its name."""
    return next((group for group, pattern in _GROUPS.items() if re.search(pattern, parameter)), "other")


def _parameters(traces: Traces, kind: str) -> list[Compared]:
    want, got = getattr(traces.want, kind), getattr(traces.got, kind)
    twin = getattr(traces.twin, kind) if traces.twin else {}
    scale = max(_largest(value) for value in want.values())
    return [Compared(name, got.get(name), value, twin.get(name), scale) for name, value in want.items()]


def _tokens(traces: Traces, kind: str, place: str) -> list[Compared]:
    """``place`` in each sequence that has it in the reference."""
    wanted = [getattr(record, kind).get(place) for record in traces.want.records]
    scale = max([_largest(want) for want in wanted if want is not None], default=0.0)
    return [
        Compared(
            f"sequence {number}",
            getattr(traces.got.records[number], kind).get(place),
            want,
            getattr(traces.twin.records[number], kind).get(place) if traces.twin else None,
            scale,
        )
        for number, want in enumerate(wanted)
        if want is not None
    ]


def _largest(value: Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() else 0.0


def _norm(trace: Trace) -> Tensor:
    return torch.stack([gradient.double().square().sum() for gradient in trace.gradients.values()]).sum().sqrt()


def _divisor(pair: Compared, dtype: torch.dtype) -> float:
    """Errors of a tensor are relative to its largest number, or to its kind's where it is zero but for rounding."""
    largest = _largest(pair.want)
    return largest if largest > 32 * torch.finfo(dtype).eps * pair.scale else pair.scale or 1.0


def _error(pair: Compared, dtype: torch.dtype) -> float:
    if pair.got is None or pair.got.shape != pair.want.shape:
        return math.inf
    error = _largest(pair.got.double() - pair.want.double()) / _divisor(pair, dtype)
    return math.inf if math.isnan(error) else error


def _tolerance(pairs: Iterable[Compared], dtype: torch.dtype) -> float:
    """For tensors that are judged together."""
    if dtype is not torch.bfloat16:
        return TOLERANCES[dtype]
    own = [_error(pair._replace(got=pair.twin), dtype) for pair in pairs]
    return max(BFLOAT16_FLOOR, *(2 * error for error in own))


def _row(what: str, pairs: list[Compared], dtype: torch.dtype) -> Row:
    tolerance = _tolerance(pairs, dtype)
    return max((Row(what, _error(pair, dtype), tolerance, pair.name) for pair in pairs), key=lambda row: row.error)


# ---- where they first differ ---------------------------------------------------------------------------------------


def _first_difference(traces: Traces) -> Difference | None:
    places = list(traces.want.records[0].outputs)  # in the order of a forward, logits last
    for place in places:
        if found := _differing_tokens(traces, "outputs", place):
            sequence, token, count = found
            said = f"output differs from sequence {sequence}, token {token} on ({count} tokens of the batch)"
            return Difference("forward", place, said, sequence, token)
    if found := _differing_tokens(traces, "gradients", LOGITS):
        return _loss_difference(traces, *found)
    if not _row("loss", _losses(traces), traces.dtype).ok:
        return Difference("loss", "loss", f"{_ratio(traces)}; its gradient is right")
    before = LOGITS
    for place in reversed(places[:-1]):
        if found := _differing_tokens(traces, "gradients", place):
            sequence, token, count = found
            said = f"gradient that reaches {place} differs from sequence {sequence}, token {token} on ({count} tokens)"
            return Difference("backward", before, said, sequence, token)
        if place in traces.want.records[0].gradients:
            before = place
    return _parameter_difference(traces)


def _losses(traces: Traces) -> list[Compared]:
    twin = traces.twin.losses[0] if traces.twin else None
    return [Compared(f"rank {i}", loss, traces.want.losses[0], twin, 1.0) for i, loss in enumerate(traces.got.losses)]


def _loss_difference(traces: Traces, sequence: int, token: int, count: int) -> Difference:
    logits = [record.outputs[LOGITS] for record in traces.want.records]
    if count > 1 and count >= sum(map(len, logits)) // 2:
        said = f"{_ratio(traces)}, and logits are right: its scale, or its count of labels"
    else:
        said = (
            f"{_ratio(traces)}, and logits are right: the label after sequence {sequence}, token {token} "
            f"is the first of {count} that count differently"
        )
    return Difference("loss", "loss", said, sequence, token)


def _ratio(traces: Traces) -> str:
    worst = max(traces.got.losses.tolist(), key=lambda loss: abs(loss - float(traces.want.losses[0])))
    want = float(traces.want.losses[0])
    return f"loss is {worst:.6g} instead of {want:.6g}" + (f" ({worst / want:.4f} times)" if want else "")


def _parameter_difference(traces: Traces) -> Difference | None:
    for pair in reversed(_parameters(traces, "gradients")):  # the last in the model is the first in its backward
        tolerance = _tolerance([pair], traces.dtype)
        if _error(pair, traces.dtype) > tolerance:
            if pair.got is None or pair.got.shape != pair.want.shape:
                return Difference("gradient", pair.name, "it is missing or has another shape")
            wrong = _wrong_rows(pair, traces.dtype, tolerance)
            rows = f"rows {wrong[0]} to {wrong[-1]} of {len(pair.want)}"
            return Difference("gradient", pair.name, f"{rows} differ; every gradient between layers is right")
    return None


def _differing_tokens(traces: Traces, kind: str, place: str) -> tuple[int, int, int] | None:
    """First sequence and its first token that differ at a place, and how many tokens do."""
    first: tuple[int, int] | None = None
    count = 0
    pairs = _tokens(traces, kind, place)
    tolerance = _tolerance(pairs, traces.dtype)
    for pair in pairs:
        if not _error(pair, traces.dtype) > tolerance:
            continue
        matches = pair.got is not None and pair.got.shape == pair.want.shape
        wrong = _wrong_rows(pair, traces.dtype, tolerance) if matches else [*range(len(pair.want))]
        count += len(wrong)
        first = first or (int(pair.name.rpartition(" ")[2]), wrong[0])
    return None if first is None else (*first, count)


def _wrong_rows(pair: Compared, dtype: torch.dtype, tolerance: float) -> list[int]:
    """Indices along the first dimension with a number that is off; a NaN is."""
    assert pair.got is not None
    off = (pair.got.double() - pair.want.double()).abs() / _divisor(pair, dtype)
    return (~(off <= tolerance)).flatten(1).any(dim=1).nonzero()[:, 0].tolist() if off.ndim > 1 else [0]
