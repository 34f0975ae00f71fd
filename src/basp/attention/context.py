"""What a model's attention function receives for one micro-step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from basp.agreement import Digest, agree
from basp.attention.kernels import Kernel
from basp.collectives import ByteCounter, DeviceRoute
from basp.errors import PlanError
from basp.exchange import Exchange, compile_exchange
from basp.plans import Plan
from basp.strategies import Strategy, plan


class HeadShape(NamedTuple):
    """Query heads H, kv heads K, query/key dim and value dim of one attention layer, and whether it is causal."""

    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    causal: bool


@dataclass(frozen=True)
class CompiledExchange:
    """An ``Exchange`` with its tables on a device; ``kv_indices`` holds each call's kv head of each query head."""

    exchange: Exchange
    dispatch: DeviceRoute | None
    combine: DeviceRoute | None
    kv_indices: tuple[Tensor | None, ...]


class Context:
    """One micro-step's group, strategy, exchanges and byte counter. Passed as an argument, kept by nobody else.

    Exchanges are compiled when a layer first asks for its head configuration and shared by every layer that has it.

    Args:
        lengths: tokens of each sequence of the micro-batch.
        strategy: makes the plan for each head configuration.
        group: the ranks that share the batch, in the order of the plan's ranks; None for a single process.
        kernel: computes attention of whole heads here.
        counter: is told the bytes that this rank sends.
        agreement_group: the same ranks on CPU tensors, to compare plans and types of rows on before the first exchange
            of each head configuration; None trusts that they are equal.
        agreed: (heads, kv heads, causal) of plans that need no more comparing, because an earlier micro-step's was
            equal and the strategy is a function of what has been compared. Grows here; None compares each.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        strategy: Strategy,
        group: dist.ProcessGroup | None,
        kernel: Kernel,
        counter: ByteCounter,
        agreement_group: dist.ProcessGroup | None = None,
        agreed: set[tuple[int, int, bool]] | None = None,
    ) -> None:
        self.lengths = tuple(lengths)
        self.group, self.strategy, self.kernel, self.counter = group, strategy, kernel, counter
        self.agreement_group, self.agreed = agreement_group, agreed
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.layout = self._make_plan(1, 1, causal=True)
        self.attended = 0
        self._plans: dict[tuple[int, int, bool], Plan] = {(1, 1, True): self.layout}
        self._compiled: dict[tuple[HeadShape, torch.device], CompiledExchange] = {}
        self._compared: set[tuple[HeadShape, torch.dtype]] = set()

    def plan(self, heads: int, kv_heads: int, *, causal: bool = True) -> Plan:
        """The plan for a layer with these head counts. Its shards are the same for all of them.

        Raises:
            PlanError: the strategy places tokens by the head counts, so that they would have to move between layers.
        """
        if (heads, kv_heads, causal) not in self._plans:
            made = self._make_plan(heads, kv_heads, causal=causal)
            if not np.array_equal(made.shard_table, self.layout.shard_table):
                raise PlanError(
                    f"a strategy whose shards for {heads}/{kv_heads} heads differ from those for 1/1",
                    allowed="shards that depend on lengths and ranks only",
                    remedy="let the strategy's tiles, not its shards, follow the heads",
                )
            self._plans[heads, kv_heads, causal] = made
        return self._plans[heads, kv_heads, causal]

    @property
    def shapes(self) -> list[HeadShape]:
        """Head configurations of the layers that have attended so far, in order of first use."""
        return list(dict.fromkeys(shape for shape, _ in self._compiled))

    def compiled(self, shape: HeadShape, kind: torch.dtype, device: torch.device) -> CompiledExchange:
        """The exchange for a layer of this shape, with its tables on ``device``. All ranks first ask for it together.

        Args:
            shape: heads and dims of the layer.
            kind: type of the rows that it sends; compared over the ranks once in each micro-step.
            device: of its tensors.

        Raises:
            DisagreementError: ranks have different plans, or rows of different widths or types.
        """
        self._agree(shape, kind)
        if (shape, device) not in self._compiled:
            self._compiled[shape, device] = self._compile(shape, device)
        return self._compiled[shape, device]

    def release(self) -> None:
        """Drop the tables, once this micro-step's backward is done; asked again, they are compiled again."""
        self._compiled.clear()

    def _make_plan(self, heads: int, kv_heads: int, *, causal: bool) -> Plan:
        return plan(
            self.lengths, ranks=self.ranks, heads=heads, kv_heads=kv_heads, strategy=self.strategy, causal=causal
        )

    def _compile(self, shape: HeadShape, device: torch.device) -> CompiledExchange:
        exchange = compile_exchange(
            self.plan(shape.heads, shape.kv_heads, causal=shape.causal),
            self.rank,
            head_dim=shape.head_dim,
            value_head_dim=shape.value_head_dim,
        )
        dispatch = combine = None
        if exchange.dispatch is not None and exchange.combine is not None and self.group is not None:
            dispatch = DeviceRoute.of(exchange.dispatch, device, group=self.group, counter=self.counter)
            combine = DeviceRoute.of(exchange.combine, device, group=self.group, counter=self.counter)
        kv_indices = tuple(
            None if call.kv_index is None else torch.tensor(call.kv_index, device=device) for call in exchange.calls
        )
        return CompiledExchange(exchange, dispatch, combine, kv_indices)

    def _agree(self, shape: HeadShape, kind: torch.dtype) -> None:
        """Compare rows and plan over the ranks: those with different ones would wait for each other, or read garbage.

        A rank whose types are its own (another autocast, another checkpoint's dtype) is found here, in each micro-step;
        equal plans are found once, where the strategy is a function of what has been compared.
        """
        if self.agreement_group is None or (shape, kind) in self._compared:
            return
        plan_of = (shape.heads, shape.kv_heads, shape.causal)
        digest, refusal = "", None
        if self.agreed is None or plan_of not in self.agreed:
            try:
                digest = self.plan(shape.heads, shape.kv_heads, causal=shape.causal).digest
            except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
                refusal = error
        type_name = str(kind).removeprefix("torch.")
        said: Digest = [
            ("heads or dims of attention", _fingerprint(shape)),
            (f"types of attention's rows ({type_name} here)", _fingerprint(type_name)),
            (f"plan for {shape.heads}/{shape.kv_heads} heads", digest),
        ]
        agree(
            said,
            self.agreement_group,
            refusal,
            allowed="attention of the same heads, dims, type and plan on every rank of the group",
            remedy="build the same model on these ranks, run it under the same autocast, and give SequenceParallel a "
            "strategy that is a function of lengths and heads",
        )
        self._compared.add((shape, kind))
        if self.agreed is not None:
            self.agreed.add(plan_of)


def _fingerprint(value: object) -> str:
    """In hex, the same in every process."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
