"""DeepSpeed's ALST: Ulysses for transformers (``UlyssesSPAttentionHF``) and ZeRO-3, as its recipe puts them together.

The recipe wraps an attention implementation by name, for the whole process. Here that is a name of our own with
transformers' sdpa function behind it, so that "sdpa" stays as it was for everybody else. DeepSpeed's groups are
globals: there can be one such contender in a process at a time. ZeRO-3 replaces ``torch.nn.functional.linear`` for
every model in the process: here only while its own step runs, so that others may be timed in turns with it.

Lengths must be a multiple of the ranks, so sequences are padded. Packing is no way out: around sdpa the recipe drops
every mask but the causal one, and documents in one row would see each other.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from basp.batches import IGNORED
from basp.bench.building import build_optimizer
from basp.bench.contender import Unavailable, Workload
from basp.bench.peers.padded import (
    build_with,
    check_heads,
    cut,
    describe_padding,
    padded_length,
    read_config,
)

NAME = "deepspeed"

_ATTENTION = "basp_bench_alst"


def build(workload: Workload, device: torch.device) -> AlstContender:
    """Called on every rank after ``init_process_group``.

    Raises:
        Unavailable: without DeepSpeed, with hybrid sharding, on one rank, or with heads that the ranks cannot share.
    """
    ranks = dist.get_world_size()
    if ranks == 1 or workload.replicate != 1:
        raise Unavailable(
            f"ranks = {ranks}, replicate = {workload.replicate}",
            allowed="at least 2 ranks, and ZeRO-3 over all of them",
            remedy="choose replicate = 1 and more ranks",
        )
    config = read_config(workload)
    heads = check_heads(config, ranks)
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]
        from deepspeed import get_accelerator  # pyright: ignore[reportMissingImports]
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Unavailable(
            f"no DeepSpeed: {error}",
            allowed="deepspeed 0.19.8",
            remedy="install it as bench/requirements.txt says",
        ) from error
    accelerator: Any = get_accelerator()
    if accelerator.device_name() != device.type:
        raise Unavailable(
            f"a DeepSpeed that runs on {accelerator.device_name()}, and a workload on {device.type}",
            allowed="the same device for both",
            remedy=f"set DS_ACCELERATOR={device.type} in the environment",
        )
    model = build_with(sdpa_attention_forward, workload, name=_ATTENTION)
    linear = F.linear
    # DeepSpeed takes the local rank from the environment alone, in every step, and only torchrun has set it there.
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank() if device.index is None else device.index))
    try:
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    except RuntimeError as error:  # on a CPU it compiles an operator here
        raise Unavailable(
            f"a DeepSpeed that cannot start: {str(error).splitlines()[0].rstrip('. ')}",
            allowed="on a CPU, a C++ compiler and ninja on the PATH",
            remedy="install both, and activate the environment that has ninja",
        ) from error
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=_ATTENTION,
        sequence_parallel_size=ranks,
        micro_batch_size=len(workload.lengths),
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=build_optimizer(workload, model), config=_settings(workload, ranks), mpu=mpu
    )
    replaced, F.linear = F.linear, linear
    does = (
        f"DeepSpeed {deepspeed.__version__}: Ulysses over all {ranks} ranks around torch's sdpa, ZeRO-3 with its own "
        f"prefetching, torch's {workload.optimizer}, small weights whole on each rank; "
        f"{describe_padding([workload.lengths], ranks)}; {heads}"
    )
    return AlstContender(engine, workload, device, does=does, linear=replaced)


def _settings(workload: Workload, ranks: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": len(workload.lengths),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # absent, it would be 1.0
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,  # torch's SGD is not on its list
        "bf16": {"enabled": workload.dtype == "bfloat16"},
        "sequence_parallel_size": ranks,
        "steps_per_print": None,
    }


class AlstContender:
    """A DeepSpeed engine, of which each rank computes its slice of the padded batch.

    Args:
        engine: that ``deepspeed.initialize`` made.
        workload: gives the shapes.
        device: of the model.
        does: with the workload.
        linear: ZeRO-3's ``torch.nn.functional.linear``, for its own steps.
    """

    counted = True

    def __init__(
        self, engine: Any, workload: Workload, device: torch.device, *, does: str, linear: Callable[..., Tensor]
    ) -> None:
        self.name, self.does = NAME, does
        self._engine, self._device, self._linear = engine, device, linear
        self._place = {"ranks": dist.get_world_size(), "rank": dist.get_rank()}
        ranks = self._place["ranks"]
        self.tokens = len(workload.lengths) * padded_length(workload.lengths, ranks) // ranks

    def step(self, sequences: Sequence[np.ndarray]) -> float:
        """See ``Contender``."""
        part = cut(sequences, **self._place, device=self._device)
        with warnings.catch_warnings(), mock.patch.object(F, "linear", self._linear):
            # DeepSpeed and its recipe call what newer torch deprecates, each time anew.
            warnings.simplefilter("ignore", FutureWarning)
            logits = self._engine(input_ids=part.input_ids, position_ids=part.position_ids, use_cache=False).logits
            loss = self._loss(logits, part.targets)
            self._engine.backward(loss)
            self._engine.step()
        return loss.item()

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The recipe's: the mean of each rank's shard, weighted by its tokens that have a label."""
        own: Tensor = self._engine.module.loss_function(
            logits=logits, labels=None, shift_labels=targets, vocab_size=logits.shape[-1]
        )
        group = dist.group.WORLD
        means = all_gather(own, group=group)
        counts = all_gather((targets != IGNORED).sum(), group=group)
        # A shard of padding alone has no mean: nan, which a weight of 0 would not make go away.
        weighted = [mean * count for mean, count in zip(means, counts, strict=True) if count]
        return torch.stack(weighted).sum() / sum(counts)

    def close(self) -> None:
        """Let go of the engine, and put back the globals that it has changed."""
        from deepspeed.runtime.sequence_parallel import parallel_state_sp  # pyright: ignore[reportMissingImports]
        from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

        self._engine.destroy()
        del self._engine
        del ALL_ATTENTION_FUNCTIONS[_ATTENTION]  # DeepSpeed's wrapper, which hides the function registered under it
        parallel_state_sp._release_sequence_parallel_groups()
        groups.mpu = None
