"""Ring attention as torch ships it: its ``context_parallel``, under FSDP2. On CUDA only: its kernels are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from basp.bench.contender import Workload
from basp.bench.peers.padded import FsdpContender, Part, build_with, cut, describe_padding, padded_length


class ContextParallelContender(FsdpContender):
    """A model inside torch's ``context_parallel`` over all ranks, sequences cut by its own zig-zag.

    It evens out causal attention by giving every rank a piece of the front and one of the back, for which lengths must
    be a multiple of twice the ranks. Its collectives are not those that the stopwatch knows: neither their time nor
    their bytes are counted.

    Args:
        workload: of a model that ``read_config`` lets pass.
        device: a CUDA device.
        name: of the contender.
    """

    counted = False

    def __init__(self, workload: Workload, device: torch.device, *, name: str) -> None:
        world = dist.group.WORLD
        assert world is not None
        ranks = dist.get_world_size()
        heads, kv_heads = workload.model["num_attention_heads"], workload.model["num_key_value_heads"]
        repeated = f"kv heads repeated from {kv_heads} to {heads}" if kv_heads < heads else "no kv head repeated"
        super().__init__(
            build_with(_attention, workload, name="basp_bench_context_parallel"),
            workload,
            device,
            name=name,
            does=f"torch's context_parallel over all {ranks} ranks with its zig-zag, around torch's sdpa; {repeated}; "
            f"time and bytes of its collectives are not counted; {describe_padding([workload.lengths], 2 * ranks)}",
            own=slice(None),
            group=world,
        )
        self.tokens = len(workload.lengths) * padded_length(workload.lengths, 2 * ranks) // ranks
        self._mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("cp",))

    @contextmanager
    def part(self, sequences: Sequence[np.ndarray]) -> Iterator[Part]:
        """torch shards these tensors in place, and patches sdpa meanwhile."""
        part = cut(sequences, ranks=1, rank=0, device=self._device, multiple=2 * self._mesh.size())
        buffers = [part.input_ids, part.position_ids, part.targets]
        with context_parallel(
            self._mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            yield part


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    repeats = query.shape[1] // key.shape[1]
    k, v = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    # Looked up in every call: within ``context_parallel`` it is another function.
    return F.scaled_dot_product_attention(query, k, v, is_causal=True, scale=scaling).transpose(1, 2), None
