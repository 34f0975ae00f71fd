"""``SequenceParallel``: cuts an optimizer step's batch over the ranks of a group; the exact loss of what was cut."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from basp.agreement import agree, cpu_group, digest_batches
from basp.attention import Context, find_kernel
from basp.batches import IGNORED, Batch, Sequences, read_batches
from basp.collectives import ByteCounter
from basp.errors import BatchError, ConfigError, DisagreementError, ModelError
from basp.fit import check_averaging, check_inputs, checkpoints_reentrantly
from basp.losses import share_of_mean, share_of_router_loss, sum_token_losses
from basp.plans import Ints, Plan
from basp.strategies import STRATEGIES, Strategy, find_strategy

AVERAGED_DIMS = ("dp_replicate", "dp_shard", "sp")
"""Mesh dimensions that gradients are averaged over; never "tp"."""


@dataclass(frozen=True, eq=False)
class Step:
    """One micro-step's tensors on this rank. T tokens; a rank that owns none holds one dummy token without a label.

    Attributes:
        input_ids: [1, T] token ids that this rank owns.
        position_ids: [1, T] their positions in their own sequences.
        targets: [1, T] the next token of each, -100 where it has none or it is ignored.
        context: what the model's attention needs.
        valid_tokens: targets with a loss in the whole optimizer step, over all ranks and micro-steps.
        weight: of this micro-batch in the step: its share of those.
        highest_id: of all token ids and labels of the optimizer step, on whichever rank they are.
        longest: tokens of the optimizer step's longest sequence, of whichever data-parallel group.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    context: Context
    valid_tokens: int
    weight: float
    highest_id: int
    longest: int

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "use_cache": False,
            "basp_context": self.context,
        }

    def plan(self, heads: int, kv_heads: int | None = None) -> Plan:
        """The plan that layers with these head counts run."""
        return self.context.plan(heads, heads if kv_heads is None else kv_heads)


@dataclass(frozen=True)
class _Whole:
    """What a step has over all its micro-batches and all ranks; attributes as ``Step``'s."""

    valid_tokens: int
    highest_id: int
    longest: int


class SequenceParallel:
    """Sequence parallelism over one process group, by a strategy that looks at each batch.

    Args:
        group_or_mesh: the ranks that share each batch: a process group (any subset of ranks, in any order), a mesh with
            a dimension "sp" (gradients are then averaged over its dp_replicate, dp_shard and sp; each data-parallel
            group has its own batches), or None for a single process.
        strategy: "basp", "ulysses", or a function as ``basp.strategies.Strategy`` describes.
        kernel: "auto", which takes for each call the best that can do it, or one of ``basp.attention.KERNELS`` by name.
            What was chosen is printed once, by rank 0.
        check_agreement: compare the batch over the ranks on each ``shard``. Without it, ranks that were given
            different batches hang or train on nonsense.
        device: where the model is; by default the mesh's, the current CUDA device for an NCCL group, the CPU for gloo,
            torch's default device for a single process.
        timeout: of the CPU group that is made where ``group_or_mesh`` takes no CPU tensors. With such a group, all of
            its ranks make their ``SequenceParallel`` together.

    Attributes:
        counter: bytes that this rank has sent in attention's collectives.
        ranks: N of the group; ``rank``: this process's place in it.

    Raises:
        ConfigError: a mesh without "sp".
        PlanError, ModelError: an unknown strategy or kernel, or a kernel that this machine cannot run.
    """

    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        strategy: str | Strategy = "basp",
        kernel: str = "auto",
        check_agreement: bool = True,
        device: torch.device | str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.group, self.average_groups = _groups(group_or_mesh)
        self.strategy = find_strategy(strategy) if isinstance(strategy, str) else strategy
        self.kernel = find_kernel(kernel)
        self.ranks = 1 if self.group is None else dist.get_world_size(self.group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self._announced = False
        self.counter = ByteCounter(self.ranks)
        self.device = torch.device(device) if device is not None else _device(group_or_mesh)
        compared = self.group is not None and check_agreement
        self._agreement_group = cpu_group(self.group, timeout) if compared and self.group is not None else None
        # Our own strategies are functions of lengths and heads: what was equal once stays equal.
        self._agreed = set[tuple[int, int, bool]]() if self.strategy in STRATEGIES.values() else None

    @property
    def average_ranks(self) -> int:
        """Number of ranks that gradients are averaged over."""
        return int(np.prod([dist.get_world_size(group) for group in self.average_groups], dtype=np.int64))

    def shard(self, sequences: Batch, labels: Sequences | None = None) -> Step:
        """An optimizer step of a single micro-batch; see ``shard_steps``."""
        return self.shard_steps([sequences], None if labels is None else [labels])[0]

    def shard_steps(
        self, micro_batches: Sequence[Batch], labels: Sequence[Sequences] | None = None
    ) -> tuple[Step, ...]:
        """Cut one optimizer step's micro-batches; the number of its valid tokens is fixed here.

        Every rank of the group is given the same, whole micro-batches, and gets its own part.

        Args:
            micro_batches: for each micro-batch its sequences of token ids, any number, of any lengths from 1; or a
                collated batch, padded or packed, with its labels in it.
            labels: for each micro-batch each sequence's labels, aligned with its token ids (not shifted), -100 where
                there is no loss; the token ids by default.

        Returns:
            One step for each micro-batch.

        Raises:
            BatchError: no micro-batch, an empty one, an empty sequence, labels that do not fit, ids below 0.
            DisagreementError: a rank was given another batch, or refused its own; raised on every rank.
        """
        refusal: Exception | None = None
        ids: list[list[Ints]] = []
        targets: list[list[Ints]] = []
        contexts: list[Context] = []
        try:
            ids, targets = read_batches(micro_batches, labels)
            contexts = [self._context(batch) for batch in ids]
        except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
            refusal = error
        try:
            self._agree(ids, targets, refusal)
        except Exception as error:  # nor may the other data-parallel groups wait
            refusal = error
        valid = sum(int((target != IGNORED).sum()) for batch in targets for target in batch)
        highest = max((int(part.max()) for batch in (*ids, *targets) for part in batch), default=0)
        longest = max((len(sequence) for batch in ids for sequence in batch), default=0)
        whole = self._over_data_parallel(_Whole(valid, highest, longest), len(ids), refusal)
        return tuple(self._cut(*parts, whole) for parts in zip(ids, targets, contexts, strict=True))

    def loss(self, model: Any, step: Step) -> Tensor:
        """This micro-step's share of the mean loss over all valid tokens of the optimizer step.

        The value is the same on every rank, and the shares of a step sum to what one process would print. ``backward``
        on each, then averaging gradients over the ranks (FSDP2, DDP, or an all-reduce mean), gives the gradients of one
        process. Under ``torch.no_grad`` it is the evaluation loss. See ``basp.losses`` for a worked example. A mixture
        of experts whose config has ``output_router_logits`` adds its load-balancing loss over the whole micro-batch.

        Raises:
            ModelError: the model's attention did not use the step: it was not prepared; or DDP or FSDP2 averages its
                gradients over other ranks than those that the share is scaled for.
            BatchError: a token id or label that the model's vocabulary does not have, or a sequence longer than its
                positions; raised on every rank.
        """
        check_inputs(model, step.input_ids.device, highest_id=step.highest_id, longest=step.longest)
        check_averaging(model, self.average_ranks)
        before = step.context.attended
        outputs = model(**step.inputs)
        if step.context.attended == before:
            raise ModelError(
                f"a {type(model).__name__} whose attention ignored the step",
                allowed="a model that basp.prepare(model, sp) returned",
                remedy="call basp.prepare before training, and do not change the attention implementation after it",
            )
        self._announce_kernel()
        return self.loss_of_logits(outputs.logits, step) + self._router_loss(model, outputs, step)

    def loss_of_logits(self, logits: Tensor, step: Step) -> Tensor:
        """``loss`` for logits [1, T, V] that were computed from ``step.inputs`` already."""
        local_sum = sum_token_losses(logits, step.targets)
        return share_of_mean(local_sum, valid_tokens=step.valid_tokens, groups=self.average_groups)

    def _announce_kernel(self) -> None:
        ran = str(self.kernel)  # a rank may have had no tokens and no tile so far
        if self._announced or not ran or (dist.is_initialized() and dist.get_rank() != 0):
            return
        self._announced = True
        logger, message = logging.getLogger("basp"), f"attention kernel: {ran}"
        if logger.hasHandlers():
            logger.info(message)
        else:  # a program that has not set up logging should see it all the same
            print(f"basp: {message}", file=sys.stderr)

    def _router_loss(self, model: Any, outputs: Any, step: Step) -> Tensor | float:
        """A mixture of experts' auxiliary loss, where the model's config turns it on (output_router_logits)."""
        model = getattr(model, "module", model)  # DistributedDataParallel
        config: Any = model.config.get_text_config() if hasattr(model, "config") else None
        if not getattr(config, "output_router_logits", False):
            return 0.0
        router_logits = getattr(outputs, "router_logits", None)
        # A model that trains on a router loss has computed its own, of this rank's tokens alone.
        usual = hasattr(config, "router_aux_loss_coef") and getattr(outputs, "aux_loss", None) is not None
        if not router_logits or not usual:
            raise ModelError(
                f"a {type(model).__name__} with output_router_logits, whose router loss is not the usual one",
                allowed="models that give router_logits and have a router_aux_loss_coef (Mixtral, Qwen3-MoE, gpt-oss)",
                remedy="set config.output_router_logits = False to train without a router loss",
            )
        if torch.is_grad_enabled() and checkpoints_reentrantly(model):
            raise ModelError(
                "router logits without a gradient: reentrant checkpointing has cut them off from the graph",
                allowed="non-reentrant checkpointing together with a router loss",
                remedy='gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',
            )
        share = share_of_router_loss(
            router_logits,
            top_k=config.num_experts_per_tok,
            own_tokens=int(step.context.layout.tokens[self.rank]),
            all_tokens=sum(step.context.lengths),
            weight=step.weight,
            group=self.group,
            groups=self.average_groups,
        )
        return share * config.router_aux_loss_coef

    def _agree(self, ids: list[list[Ints]], targets: list[list[Ints]], refusal: Exception | None) -> None:
        if self._agreement_group is None:
            if refusal is not None:
                raise refusal
            return
        name = getattr(self.strategy, "__name__", type(self.strategy).__name__)
        digest = digest_batches(ids, targets, strategy=name, average_ranks=self.average_ranks)
        agree(digest, self._agreement_group, refusal)

    def _over_data_parallel(self, own: _Whole, micro_batches: int, refusal: Exception | None) -> _Whole:
        """The step of all data-parallel groups; they must have equally many micro-batches, or collectives hang.

        A group that refuses its batch tells the others here. Nobody raises before every dimension has been told.
        """
        others = [group for group in self.average_groups if group is not self.group]
        if not others:
            if refusal is not None:
                raise refusal
            return own
        sums = torch.tensor([own.valid_tokens, int(refusal is not None)], device=self.device)
        most = torch.tensor([micro_batches, -micro_batches, own.highest_id, own.longest], device=self.device)
        for group in others:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        if refusal is not None:
            raise refusal
        if sums[1]:
            raise DisagreementError(
                "another data-parallel group refused the batch that it was given",
                allowed="a valid batch in every group of the mesh",
                remedy="read the error of that group's ranks",
            )
        if most[0] != -most[1]:
            raise BatchError(
                f"{-most[1]} to {most[0]} micro-batches in the data-parallel groups of one step",
                allowed="equally many in each",
                remedy="drop or split micro-batches so that all groups have the same number",
            )
        return _Whole(int(sums[0]), int(most[2]), int(most[3]))

    def _context(self, ids: list[Ints]) -> Context:
        return Context(
            [len(sequence) for sequence in ids],
            strategy=self.strategy,
            group=self.group,
            kernel=self.kernel,
            counter=self.counter,
            agreement_group=self._agreement_group,
            agreed=self._agreed,
        )

    def _cut(self, ids: list[Ints], targets: list[Ints], context: Context, whole: _Whole) -> Step:
        shards = context.layout.shards[self.rank]
        parts = (
            [ids[sequence][start:stop] for sequence, start, stop in shards] or [np.zeros(1, dtype=np.int64)],
            [np.arange(start, stop) for _, start, stop in shards] or [np.zeros(1, dtype=np.int64)],
            [targets[sequence][start:stop] for sequence, start, stop in shards] or [np.full(1, IGNORED)],
        )
        input_ids, position_ids, local_targets = (
            torch.from_numpy(np.concatenate(part)).to(self.device, non_blocking=True)[None] for part in parts
        )
        for tensor in (input_ids, position_ids, local_targets):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)  # a rank's tokens change by the plan: compile for any number
        weight = sum(int((target != IGNORED).sum()) for target in targets) / max(whole.valid_tokens, 1)
        return Step(
            input_ids,
            position_ids,
            local_targets,
            context,
            valid_tokens=whole.valid_tokens,
            weight=weight,
            highest_id=whole.highest_id,
            longest=whole.longest,
        )


def _groups(where: dist.ProcessGroup | DeviceMesh | None) -> tuple[dist.ProcessGroup | None, list[dist.ProcessGroup]]:
    """The group that shares a batch, and those whose product averages gradients."""
    if where is None:
        return None, []
    if not isinstance(where, DeviceMesh):
        if dist.get_rank(where) < 0:
            raise ConfigError(
                f"a process group that rank {dist.get_rank()} is not in",
                allowed="a group that holds this rank",
                remedy="make SequenceParallel on the group's own ranks only",
            )
        return where, [where]
    names = where.mesh_dim_names or ()
    if "sp" not in names or not set(names) <= {*AVERAGED_DIMS, "tp"}:
        raise ConfigError(
            f"a mesh with dimensions {names or 'that have no names'}",
            allowed='a mesh with a dimension "sp", beside any of "dp_replicate", "dp_shard", "tp"',
            remedy='init_device_mesh(device, shape, mesh_dim_names=("dp_shard", "sp"))',
        )
    return where.get_group("sp"), [where.get_group(name) for name in reversed(AVERAGED_DIMS) if name in names]


def _device(where: dist.ProcessGroup | DeviceMesh | None) -> torch.device:
    if where is None:
        return torch.get_default_device()
    cuda = where.device_type == "cuda" if isinstance(where, DeviceMesh) else "nccl" in dist.get_backend_config(where)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
