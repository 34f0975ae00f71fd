"""A stopwatch around collectives: those that move tokens between ranks, with their bytes to each, and all others."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from basp.plans import Ints

_TOKENS = ("all_to_all_single", "batch_isend_irecv")
"""What attention's collectives are called as."""

# torch 2.13 has renamed two of these: there the old names call the new ones.
_RENAMED = hasattr(dist, "all_gather_single")
_WEIGHTS = (
    *(
        ("all_gather_single", "reduce_scatter_single")
        if _RENAMED
        else ("all_gather_into_tensor", "reduce_scatter_tensor")
    ),
    "all_reduce",
)
"""What FSDP2 and ZeRO-3 gather weights and reduce gradients with; a loss is summed by the last as well."""


@dataclass
class Account:
    """Seconds inside some collectives, and how many there were."""

    seconds: float = 0.0
    calls: int = 0


class Stopwatch:
    """While entered, the collectives of this process are timed, by whoever they are called.

    In front of each is a barrier of its group, or a greeting between those that exchange messages, so that its seconds
    are of the exchange alone and not of waiting for ranks that come later. An asynchronous call is waited for at once:
    its seconds do not shrink by what would have been computed meanwhile.

    Args:
        device: of the tensors; a GPU is waited for before the clock is read.

    Attributes:
        tokens: ``all_to_all_single`` and ``batch_isend_irecv``, which are attention's.
        weights: gathers, reductions and reduce-scatters, which are the sharded model's.
        sent: [world] bytes of attention's collectives to each rank of the world; this rank's own entry stays 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.tokens, self.weights = Account(), Account()
        self.sent: Ints = np.zeros(dist.get_world_size(), dtype=np.int64)
        self._device = device
        self._originals: list[tuple[Any, str, Callable[..., Any]]] = []

    def __enter__(self) -> Stopwatch:
        for module in (dist, distributed_c10d):
            for name in (*_TOKENS, *_WEIGHTS):
                original = getattr(module, name)
                self._originals.append((module, name, original))
                timed = getattr(self, f"_{name}") if name in _TOKENS else self._of_weights
                setattr(module, name, timed(original))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, original in self._originals:
            setattr(module, name, original)
        self._originals.clear()

    def _all_to_all_single(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(
            output: Tensor,
            input: Tensor,
            output_split_sizes: list[int] | None = None,
            input_split_sizes: list[int] | None = None,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> _Done | None:
            members = _members(group)
            rows = input_split_sizes or [input.shape[0] // len(members)] * len(members)
            row_bytes = input[:1].numel() * input.element_size()
            self._count({rank: count * row_bytes for rank, count in zip(members, rows, strict=True)})
            self._time(
                self.tokens,
                lambda: dist.barrier(group),
                lambda: original(output, input, output_split_sizes, input_split_sizes, group=group),
            )
            return _Done() if async_op else None

        return timed

    def _batch_isend_irecv(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(p2p_op_list: list[dist.P2POp]) -> list[_Done]:
            for each in p2p_op_list:
                if each.op is dist.isend:
                    self._count({each.peer: each.tensor.numel() * each.tensor.element_size()})

            def run() -> None:
                for work in original(p2p_op_list):
                    work.wait()

            self._time(self.tokens, lambda: self._meet(original, p2p_op_list), run)
            return [_Done() for _ in p2p_op_list]

        return timed

    def _meet(self, original: Callable[..., Any], p2p_op_list: list[dist.P2POp]) -> None:
        """Wait for those that this rank exchanges messages with: others of the group may have none to exchange."""
        token = torch.zeros(1, device=self._device)
        pairs = {each.peer: each.group for each in p2p_op_list}
        meeting = [
            dist.P2POp(op, token.clone(), peer, group)
            for peer, group in pairs.items()
            for op in (dist.isend, dist.irecv)
        ]
        for work in original(meeting):
            work.wait()

    def _of_weights(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def timed(*args: Any, **kwargs: Any) -> _Done | None:
            given = signature.bind(*args, **kwargs).arguments
            later = given.pop("async_op", False)
            self._time(self.weights, lambda: dist.barrier(given.get("group")), lambda: original(**given))
            return _Done() if later else None

        return timed

    def _count(self, sent: dict[int, int]) -> None:
        for rank, amount in sent.items():
            if rank != dist.get_rank():
                self.sent[rank] += amount

    def _time(self, account: Account, meet: Callable[[], Any], run: Callable[[], Any]) -> None:
        wait_for(self._device)
        meet()
        wait_for(self._device)
        start = time.perf_counter()
        run()
        wait_for(self._device)
        account.seconds += time.perf_counter() - start
        account.calls += 1


class _Done:
    """In the place of the work of an asynchronous call that has been waited for: waiting twice may hang."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _members(group: dist.ProcessGroup | None) -> list[int]:
    """Ranks of the world, in the order of the group."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)
