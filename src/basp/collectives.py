"""Gather, all-to-all, gather as one differentiable op on rows, and a counter of the bytes that it sends.

Everything travels on the one communicator that is passed in, in one exchange with uneven splits: an empty split costs
nothing, so which ranks talk may change every micro-step without a new process group. On a GPU that exchange is
``all_to_all_single``, which NCCL makes of the splits that are not empty. gloo would send an empty message for each of
the others, and all ranks would wait for the slowest: on a CPU the exchange is messages between those that have any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from basp.exchange import Gather, Route
from basp.plans import Ints

Phase = Literal["forward", "backward"]


class ByteCounter:
    """Bytes that this rank has sent to each rank of its group, counted at the collective itself.

    ``forward`` and ``backward`` are [N] int64, this rank's own entry stays 0. Recomputation under gradient
    checkpointing counts as forward, as often as it happens.
    """

    def __init__(self, ranks: int) -> None:
        self.forward: Ints = np.zeros(ranks, dtype=np.int64)
        self.backward: Ints = np.zeros(ranks, dtype=np.int64)

    @property
    def total(self) -> int:
        """Bytes sent to all other ranks, both ways."""
        return int(self.forward.sum() + self.backward.sum())

    def add(self, phase: Phase, sent: Ints) -> None:
        """Count [N] bytes sent."""
        count = self.forward if phase == "forward" else self.backward
        count += sent

    def reset(self) -> None:
        """Start from zero again."""
        self.forward[:] = 0
        self.backward[:] = 0


@dataclass(frozen=True)
class DeviceGather:
    """A ``Gather`` on a device; an index of None is the identity."""

    index: Tensor | None
    first: Tensor | None
    rounds: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, gather: Gather, device: torch.device) -> DeviceGather:
        """Copy the tables of ``gather``, and of its transpose, to ``device``."""
        if gather.index is None:
            return cls(None, None, ())
        first, rounds = gather.transpose
        return cls(
            _to(gather.index, device),
            _to(first, device),
            tuple((_to(rows, device), _to(places, device)) for rows, places in rounds),
        )

    def read(self, rows: Tensor) -> Tensor:
        """[R, width] -> [len(index), width]."""
        return rows if self.index is None else rows.index_select(0, self.index)

    def read_transposed(self, grad: Tensor) -> Tensor:
        """The gradient of ``read``: [len(index), width] -> [R, width].

        Rows that were read more than once are summed in at least float32, in a fixed order.
        """
        if self.first is None:
            return grad
        total = grad.index_select(0, self.first)
        if not self.rounds:
            return total
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        for rows, places in self.rounds:
            total[rows] += grad.index_select(0, places)
        return total.to(grad.dtype)


@dataclass(frozen=True)
class DeviceRoute:
    """A ``Route`` on a device, with the communicator that it runs on and the counter that it reports to."""

    send: DeviceGather
    send_splits: list[int]
    recv_splits: list[int]
    recv: DeviceGather
    group: dist.ProcessGroup
    counter: ByteCounter

    @classmethod
    def of(cls, route: Route, device: torch.device, *, group: dist.ProcessGroup, counter: ByteCounter) -> DeviceRoute:
        """Copy the tables of ``route`` to ``device``."""
        return cls(
            DeviceGather.of(route.send, device),
            list(route.send_splits),
            list(route.recv_splits),
            DeviceGather.of(route.recv, device),
            group,
            counter,
        )


def exchange_rows(rows: Tensor, route: DeviceRoute) -> Tensor:
    """Send packed rows where ``route`` says. Differentiable once; the backward is the transposed exchange.

    Every rank of the group must call this, forward and backward, also with 0 rows: ``rows`` must require grad wherever
    it does on any other rank.

    Args:
        rows: [R, width], any strides.
        route: from ``DeviceRoute.of``.

    Returns:
        [rows received, width] in the order that the receiver reads.
    """
    return _ExchangeRows.apply(rows, route)  # type: ignore[return-value]  # apply is untyped in torch


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: DeviceRoute) -> Tensor:
        ctx.route = route
        sent = route.send.read(rows)
        received = _all_to_all(sent, route.send_splits, route.recv_splits, route, "forward")
        return route.recv.read(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        route: DeviceRoute = ctx.route
        received = route.recv.read_transposed(grads[0])
        sent = _all_to_all(received, route.recv_splits, route.send_splits, route, "backward")
        return route.send.read_transposed(sent), None


def _all_to_all(rows: Tensor, send: list[int], recv: list[int], route: DeviceRoute, phase: Phase) -> Tensor:
    out = rows.new_empty(sum(recv), rows.shape[1])
    exchange = exchange_in_pairs if rows.device.type == "cpu" else dist.all_to_all_single
    exchange(out, rows.contiguous(), recv, send, group=route.group)
    sent = np.asarray(send, dtype=np.int64) * (rows.shape[1] * rows.element_size())
    sent[dist.get_rank(route.group)] = 0
    route.counter.add(phase, sent)
    return out


def exchange_in_pairs(
    out: Tensor, rows: Tensor, recv: Sequence[int], send: Sequence[int], *, group: dist.ProcessGroup
) -> None:
    """``all_to_all_single`` without the empty messages: a rank waits only for those that it exchanges rows with.

    Args:
        out: [sum(recv), width] rows received, by rank of the group.
        rows: [sum(send), width] rows to send, by rank.
        recv: rows from each rank; ``send``: to each.
        group: the communicator.
    """
    own = dist.get_rank(group)
    messages: list[dist.P2POp] = []
    for peer, (sent, received) in enumerate(zip(rows.split(list(send)), out.split(list(recv)), strict=True)):
        if peer == own:
            received.copy_(sent)
            continue
        if len(sent):
            messages.append(dist.P2POp(dist.isend, sent, group=group, group_peer=peer))
        if len(received):
            messages.append(dist.P2POp(dist.irecv, received, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def _to(table: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(table).to(device, non_blocking=True)
