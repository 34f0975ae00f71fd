"""One rank's part of a training run, from data to the saved model."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.status import Status
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from basp.attention.context import HeadShape
from basp.data.dataset import Dataset
from basp.data.sampling import Batches, cut_documents, split_eval
from basp.data.sources import read_documents
from basp.data.store import TokenStore, write_store
from basp.data.tokenizers import Tokenizer, load_tokenizer
from basp.errors import TrainingError
from basp.hf import prepare
from basp.parallel import SequenceParallel
from basp.ranks import Place
from basp.report import draw_report, read_metrics
from basp.strategies import plan
from basp.train.config import OptimConfig, TrainConfig
from basp.train.metrics import Reporter
from basp.train.model import DTYPES, build_model, save_model
from basp.train.run_dir import RunDir
from basp.train.sharding import (
    average_gradients,
    clip_gradients,
    shard_mesh,
    shard_model,
    whole_state,
    wrap_layers,
)


def train_rank(config: TrainConfig, place: Place, run: RunDir) -> None:
    """Train on this rank, together with all others; rank 0 writes the run's files.

    Args:
        config: checked.
        place: of this rank, in an initialized default process group.
        run: claimed.

    Raises:
        BaspError: data, model or settings that are refused; a loss that is not finite.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    try:
        train, evaluation = load_data(config, tokenizer, place, run)
        trainer = Trainer(config, train, evaluation, tokenizer, place)
        with Reporter(run.metrics, steps=trainer.steps, speaks=place.rank == 0) as reporter:
            reporter.say(trainer.describe())
            trainer.run(reporter)
        trainer.save(run)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"out of memory on {place.device}: {str(error).splitlines()[0].rstrip('.')}",
            allowed="a micro-batch and a model that fit",
            remedy="lower batch.sequences or data.max_length, turn on model.gradient_checkpointing, or use more ranks",
        ) from error
    finally:
        if place.local_rank == 0:
            shutil.rmtree(run.tokens(place.node), ignore_errors=True)


def load_data(config: TrainConfig, tokenizer: Tokenizer, place: Place, run: RunDir) -> tuple[Dataset, Dataset | None]:
    """The training and evaluation sequences. One rank of each node tokenizes, the others read what it wrote.

    Raises:
        DataError: data that cannot be read, or nothing to train on.
    """
    folder = run.tokens(place.node)
    if place.local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, on a node whose disk rank 0 does not see
    dist.barrier()
    if place.local_rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        documents = read_documents(config.data.source, text_field=config.data.text_field)
        with Console(quiet=place.rank != 0).status(f"reading {config.data.source}") as status:
            write_store(documents, tokenizer, folder, partial(_show_tokenizing, status))
    while not folder.exists():  # no collective: tokenizing may take longer than any collective should wait
        time.sleep(0.05)
    store = TokenStore.open(folder)
    cut = partial(
        cut_documents,
        store.lengths,
        max_length=config.data.max_length,
        long_documents=config.data.long_documents,
        name=store.name,
    )
    if config.log.eval_fraction == 0:
        return Dataset(store, cut()), None
    train_ids, eval_ids = split_eval(len(store), fraction=config.log.eval_fraction, seed=config.seed)
    return Dataset(store, cut(documents=train_ids)), Dataset(store, cut(documents=eval_ids))


class Trainer:
    """The state of one rank's run.

    Args:
        config: checked.
        train: sequences to train on, the same on every rank.
        evaluation: sequences held out, or None.
        tokenizer: of both.
        place: of this rank.
    """

    def __init__(
        self, config: TrainConfig, train: Dataset, evaluation: Dataset | None, tokenizer: Tokenizer, place: Place
    ) -> None:
        self.config, self.train, self.evaluation, self.tokenizer, self.place = (
            config,
            train,
            evaluation,
            tokenizer,
            place,
        )
        self.batches = Batches(
            spans=len(train),
            sequences=config.batch.sequences,
            accumulation=config.batch.accumulation,
            shuffle=config.data.shuffle,
            seed=config.seed,
        )
        optim = config.optim
        self.steps = optim.steps if optim.steps is not None else self.batches.steps_for(optim.epochs or 1.0)
        mesh = init_device_mesh(place.device.type, (place.world,), mesh_dim_names=("sp",))
        self.sp = SequenceParallel(
            mesh,
            strategy=config.parallel.strategy,
            kernel=config.model.kernel,
            timeout=timedelta(seconds=config.parallel.timeout),
        )
        self.first: tuple[tuple[int, ...], HeadShape] | None = None
        self.model = self._build_model()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(_decay_groups(self.model, optim.weight_decay), lr=optim.lr)
        self.schedule = LambdaLR(self.optimizer, partial(learning_rate_factor, optim=optim, steps=self.steps))

    def describe(self) -> str:
        """One line: what is trained, on what, how."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        parallel = self.config.parallel
        ranks = f"{self.place.world} ranks" if self.place.world > 1 else "1 rank"
        return (
            f"{type(self.model).__name__.removeprefix('FSDP')} of {parameters:,} parameters on {len(self.train):,} "
            f"sequences ({self.train.tokens:,} tokens), {self.steps} steps on {ranks} "
            f"({parallel.strategy}, sharding {parallel.sharding}, {self.place.device.type})"
        )

    def run(self, reporter: Reporter) -> None:
        """Take every step."""
        every, eval_every = self.config.log.every, self.config.log.eval_every
        for index in range(self.steps):
            started = time.perf_counter()
            before = self.sp.counter.total
            values = self._step(index)
            number = index + 1
            if number == 1 or number % every == 0 or number == self.steps:
                values |= self._speed(values["tokens"], self.sp.counter.total - before, started)
                values = {"step": number, "epoch": self.batches.epoch_after(number), **values}
                reporter.record(values)
                reporter.show_step(values)
            if self.evaluation and (number == self.steps or (eval_every and number % eval_every == 0)):
                loss, tokens = self.evaluate(self.evaluation)
                reporter.record({"step": number, "eval_loss": loss, "eval_tokens": tokens})
                reporter.say(f"step {number}/{self.steps}  evaluation loss {loss:.4f} over {tokens:,} tokens")

    @torch.no_grad()
    def evaluate(self, data: Dataset) -> tuple[float, int]:
        """Mean loss over all valid tokens of ``data``, and their number; as parallel as training."""
        self.model.eval()
        size = self.config.batch.sequences
        numbers = [range(start, min(start + size, len(data))) for start in range(0, len(data), size)]
        steps = self.sp.shard_steps([[data.sequence(number) for number in batch] for batch in numbers])
        loss = 0.0
        for step in steps:
            loss += float(self.sp.loss(self.model, step))
            step.context.release()
        self.model.train()
        return loss, steps[0].valid_tokens

    def save(self, run: RunDir) -> None:
        """Write the final model and the report. Collective; rank 0 writes, and the others do not wait for it."""
        state = whole_state(self.model, DTYPES[self.config.model.dtype])
        dist.barrier()  # a rank that leaves while another still receives from it may cut that one off
        if self.place.rank == 0:
            save_model(run.model, self.model, state, self.tokenizer)
            assert self.first is not None
            lengths, shape = self.first
            sizes: dict[str, Any] = {"ranks": self.place.world, "heads": shape.heads, "kv_heads": shape.kv_heads}
            names = dict.fromkeys([self.config.parallel.strategy, "ulysses"])
            draw_report(
                read_metrics(run.metrics),
                {name: plan(lengths, strategy=name, **sizes) for name in names},
                head_dim=shape.head_dim,
                itemsize=DTYPES[self.config.model.dtype].itemsize,
                title=self.describe(),
                path=run.report,
            )

    def _build_model(self) -> PreTrainedModel:
        config = self.config
        model = build_model(config, self.tokenizer)
        prepare(model, self.sp)
        model.train()
        wrap_layers(model, compiled=config.model.compile, recomputed=config.model.gradient_checkpointing)
        if config.parallel.sharding == "fsdp":
            mesh = shard_mesh(self.place.device, replicate=config.parallel.replicate)
            dtype, ahead = DTYPES[config.model.dtype], config.parallel.gather_ahead
            shard_model(model, mesh, compute_dtype=dtype, gather_ahead=ahead)
        else:
            model.to(self.place.device)  # type: ignore[arg-type]  # transformers' wrapper loses the signature
        return model

    def _step(self, index: int) -> dict[str, Any]:
        """One optimizer step; refuses to take it when the loss or the gradients are not finite."""
        numbers = self.batches.step(index)
        steps = self.sp.shard_steps([[self.train.sequence(number) for number in batch] for batch in numbers])
        loss = torch.zeros((), device=self.place.device)
        for step in steps:
            share = self.sp.loss(self.model, step)
            share.backward()
            loss = loss + share.detach()
            self.first = self.first or (step.context.lengths, step.context.shapes[0])
            step.context.release()
        if self.config.parallel.sharding == "none" and self.sp.group is not None:
            average_gradients(self.parameters, self.sp.group)
        norm = clip_gradients(self.parameters, self.config.optim.clip_norm)
        self._check_finite(loss, norm, index, numbers)
        lr = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        lengths = [length for step in steps for length in step.context.lengths]
        return {"loss": float(loss), "lr": lr, "grad_norm": norm, "tokens": sum(lengths), "sequences": len(lengths)}

    def _check_finite(self, loss: Tensor, norm: float, index: int, numbers: list[list[int]]) -> None:
        if math.isfinite(float(loss)) and math.isfinite(norm):
            return
        documents = [self.train.describe(number) for batch in numbers for number in batch]
        shown = ", ".join(documents[:8]) + (f" and {len(documents) - 8} more" if len(documents) > 8 else "")
        raise TrainingError(
            f"step {index + 1} has a loss of {float(loss)} and a gradient norm of {norm}, on {shown}",
            allowed="finite numbers; the step was not taken, and no model was written",
            remedy="lower optim.lr, raise optim.warmup, use a wider model.dtype, or look at these documents",
        )

    def _speed(self, tokens: int, sent: int, started: float) -> dict[str, float]:
        total = torch.tensor(sent, dtype=torch.int64, device=self.place.device)
        dist.all_reduce(total)
        seconds = time.perf_counter() - started
        return {
            "tokens_per_second": tokens / seconds,
            "bytes_per_rank": float(total) / self.place.world,
            "seconds": seconds,
        }


def learning_rate_factor(step: int, *, optim: OptimConfig, steps: int) -> float:
    """Share of the peak learning rate at ``step`` (from 0): linear warm-up, then the schedule, which ends at 0."""
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    if optim.schedule == "constant":
        return 1.0
    done = (step - optim.warmup) / max(1, steps - optim.warmup)
    return 1.0 - done if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


def _show_tokenizing(status: Status, documents: int, tokens: int) -> None:
    status.update(f"tokenizing: {documents:,} documents, {tokens:,} tokens")


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases, which have one dimension, do not."""

    def group(parameters: Iterable[nn.Parameter], decay: float) -> dict[str, Any]:
        return {"params": list(parameters), "weight_decay": decay}

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        group((parameter for parameter in trained if parameter.ndim >= 2), weight_decay),
        group((parameter for parameter in trained if parameter.ndim < 2), 0.0),
    ]
