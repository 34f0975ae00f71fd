"""Attention of a sharded micro-batch: dispatch, local kernel calls, combine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import TypeVar, cast

import torch
from torch import Tensor

from basp.attention.context import CompiledExchange, Context, HeadShape
from basp.attention.kernels import Kernel
from basp.attention.spec import AttentionSpec
from basp.collectives import exchange_rows
from basp.errors import BatchError
from basp.exchange import Call, Exchange, Run

_Ready = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A kernel that has its spec: q, k, v head-first -> out head-first."""


_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def _never_traced(function: _Function) -> _Function:
    return cast(_Function, torch.compiler.disable(function))  # whose own annotation loses the signature


@_never_traced
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Context,
    kernel: Kernel | None = None,
    *,
    spec: AttentionSpec | None = None,
) -> Tensor:
    """Attention output of this rank's packed tokens, each token against its whole sequence on whichever rank it lies.

    All ranks of the context's group call this together, forward and backward. Dynamo never traces it: one graph break,
    and a plan that changes every step recompiles nothing.

    Under autocast it computes, and sends, in autocast's type, whatever a rotary embedding has made of the queries:
    every rank the same, whether a kernel runs on it or not.

    Args:
        q: [T, H, D] queries of the tokens that this rank owns, in the order of ``context.layout.shards[rank]``; any
            strides. A rank that owns no token passes one dummy token.
        k: [T, K, D] keys.
        v: [T, K, Dv] values.
        context: of the micro-step.
        kernel: computes attention of whole heads here; the context's by default.
        spec: what the layer wants of attention; causal with a scale of 1 / sqrt(D) by default.

    Returns:
        [T, H, Dv], contiguous, of type ``row_type(q, k, v)``.

    Raises:
        BatchError: q, k or v have another number of tokens than this rank owns.
        DisagreementError: ranks have other heads, dims or types here, or another plan.
    """
    spec = AttentionSpec(scale=q.shape[2] ** -0.5) if spec is None else spec
    kind = row_type(q, k, v)
    shape = HeadShape(q.shape[1], k.shape[1], q.shape[2], v.shape[2], spec.causal)
    compiled = context.compiled(shape, kind, q.device)
    with _no_autocast(q.device.type):
        return _attend(q.to(kind), k.to(kind), v.to(kind), context, compiled, kernel or context.kernel, spec)


def row_type(*given: Tensor) -> torch.dtype:
    """The one type in which queries, keys and values are sent and attended to, and their output comes back.

    Autocast's where it is on, as for torch's own attention (it leaves float64 alone too); else what they promote to.
    """
    kind = reduce(torch.promote_types, [x.dtype for x in given])
    device = given[0].device.type
    if kind == torch.float64 or not torch.is_autocast_enabled(device):
        return kind
    return torch.get_autocast_dtype(device)


@contextmanager
def _no_autocast(device: str) -> Iterator[None]:
    """Types are settled: an operation that autocast changes would run on some ranks only."""
    if not torch.is_autocast_enabled(device):
        yield
        return
    with torch.autocast(device, enabled=False):
        yield


def _attend(
    q: Tensor, k: Tensor, v: Tensor, context: Context, compiled: CompiledExchange, kernel: Kernel, spec: AttentionSpec
) -> Tensor:
    runs = compiled.exchange.runs
    _check_tokens(q, k, v, runs)
    context.attended += 1
    sizes = [run.tokens for run in runs]
    pieces = list(zip(_split(q, sizes), _split(k, sizes), _split(v, sizes), strict=True))
    outs = [
        _attend_private(*piece, run, kernel, spec) if run.batch else None
        for run, piece in zip(runs, pieces, strict=True)
    ]
    if compiled.dispatch is not None:
        # A rank without shared tokens exchanges 0 rows: the others wait for it, in the backward as well.
        shared = [piece for run, piece in zip(runs, pieces, strict=True) if not run.batch] or [(q[:0], k[:0], v[:0])]
        q, k, v = (_join(parts) for parts in zip(*shared, strict=True))
        shared_out = _attend_shared(q, k, v, compiled, kernel, spec)
        places = iter(_split(shared_out, [len(piece[0]) for piece in shared]))
        outs = [next(places) if out is None else out for out in outs] + list(places)
    # Some models read it by ``view``, as they may with transformers' own kernels.
    return _join([out for out in outs if out is not None]).contiguous()


def _attend_private(q: Tensor, k: Tensor, v: Tensor, run: Run, kernel: Kernel, spec: AttentionSpec) -> Tensor:
    """Whole sequences in place: [T, H, D] -> [T, H, Dv], one batched call, no copy of the inputs."""
    q, k, v = (x.unflatten(0, (run.batch, run.length)).transpose(1, 2) for x in (q, k, v))
    return kernel(q, k, v, spec).transpose(1, 2).flatten(0, 1)


def _attend_shared(
    q: Tensor, k: Tensor, v: Tensor, compiled: CompiledExchange, kernel: Kernel, spec: AttentionSpec
) -> Tensor:
    """Tokens of sequences that ranks share: [T, H, D] -> [T, H, Dv], one exchange each way."""
    assert compiled.dispatch is not None
    assert compiled.combine is not None
    exchange = compiled.exchange
    if exchange.head_dim == exchange.value_head_dim:
        packed = torch.cat([q, k, v], dim=1)  # any strides, one pass
    else:
        packed = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    received = exchange_rows(packed.view(-1, exchange.unit), compiled.dispatch)
    blocks = _split(received, [_rows(call, exchange) for call in exchange.calls])
    outs = [
        _run_call(block, call, kv_index, exchange, partial(kernel, spec=spec.for_heads(*call.heads)))
        for block, call, kv_index in zip(blocks, exchange.calls, compiled.kv_indices, strict=True)
    ]
    # A rank that computes nothing still takes part in both collectives, in the backward as well.
    produced = _join(outs or [received.reshape(0, exchange.value_head_dim)])
    if not outs and spec.sinks is not None:  # nor may its sinks be the only ones without a gradient
        produced = produced + 0 * spec.sinks.sum()
    combined = exchange_rows(produced, compiled.combine)
    return combined.view(len(q), exchange.heads, exchange.value_head_dim)


def _panel_widths(call: Call, exchange: Exchange) -> list[list[int]]:
    """For each panel, the elements of q, k and v (those that it has) that one token of one tile brings."""
    heads, kv_heads = call.heads[1] - call.heads[0], call.kv_heads[1] - call.kv_heads[0]
    q_width, k_width, v_width = (
        heads * exchange.head_dim,
        kv_heads * exchange.head_dim,
        kv_heads * exchange.value_head_dim,
    )
    return [[q_width, k_width, v_width]] if len(call.panels) == 1 else [[q_width], [k_width, v_width]]


def _panel_sizes(call: Call, exchange: Exchange) -> list[int]:
    """Elements of each panel."""
    return [
        (panel.stop - panel.start) * len(call.sequences) * sum(widths)
        for panel, widths in zip(call.panels, _panel_widths(call, exchange), strict=True)
    ]


def _rows(call: Call, exchange: Exchange) -> int:
    return sum(_panel_sizes(call, exchange)) // exchange.unit


def _run_call(block: Tensor, call: Call, kv_index: Tensor | None, exchange: Exchange, kernel: _Ready) -> Tensor:
    """Rows of one call [rows, unit] -> its output rows [Tq * tiles * heads, Dv], token first."""
    parts: list[Tensor] = []
    panels = _split(block.view(-1), _panel_sizes(call, exchange))
    for widths, panel in zip(_panel_widths(call, exchange), panels, strict=True):
        parts += _split(panel.view(-1, len(call.sequences), sum(widths)), widths, dim=-1)
    dims = (exchange.head_dim, exchange.head_dim, exchange.value_head_dim)
    q, k, v = (x.unflatten(-1, (-1, dim)).permute(1, 2, 0, 3) for x, dim in zip(parts, dims, strict=True))
    if kv_index is not None:
        k, v = k.index_select(1, kv_index), v.index_select(1, kv_index)
    return kernel(q, k, v).permute(2, 0, 1, 3).reshape(-1, exchange.value_head_dim)


def _split(x: Tensor, sizes: list[int], dim: int = 0) -> tuple[Tensor, ...]:
    """``x.split``, whose backward is one concatenation; whole where there is one part, which then costs nothing."""
    return (x,) if len(sizes) == 1 else x.split(sizes, dim) if sizes else ()


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _check_tokens(q: Tensor, k: Tensor, v: Tensor, runs: tuple[Run, ...]) -> None:
    tokens = sum(run.tokens for run in runs)
    if not len(q) == len(k) == len(v) == tokens:
        raise BatchError(
            f"queries, keys and values of {len(q)}, {len(k)} and {len(v)} tokens",
            allowed=f"the {tokens} that this rank holds in this micro-step",
            remedy="pass the input_ids, position_ids and context of one and the same step to the model",
        )
