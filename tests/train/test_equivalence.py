"""What a run computes depends on its settings and its data, not on how it is laid out over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from basp.data.dataset import Dataset
from basp.data.tokenizers import load_tokenizer
from basp.ranks import Place
from basp.train.config import BatchConfig, DataConfig, LogConfig, ModelConfig, OptimConfig, TrainConfig
from basp.train.loop import Trainer, load_data
from basp.train.run_dir import RunDir
from tests.support import oracle
from tests.support.ranks import run_ranks
from tests.train.running import STARCODER, Outcome, flags, trained, write_documents

pytestmark = pytest.mark.timeout(180)

VARIANTS: dict[str, dict[str, Any]] = {
    "2 ranks": {"ranks": 2},
    "3 ranks": {"ranks": 3},
    "4 ranks, more than sequences": {"ranks": 4},
    "ulysses": {"ranks": 3, "strategy": "ulysses"},
    "a copy on each rank": {"ranks": 3, "parallel__sharding": "none"},
    "two copies, each on 2 ranks": {"ranks": 4, "parallel__replicate": 2},
    "weights gathered ahead": {"ranks": 3, "parallel__gather_ahead": 1},
}
TOGETHER: dict[str, dict[str, Any]] = {
    "2 micro-batches of 3": {"ranks": 2, "batch__accumulation": 2},
    "1 micro-batch of 6": {"ranks": 3, "batch__sequences": 6},
    "3 micro-batches of 2, copies": {
        "ranks": 2,
        "batch__sequences": 2,
        "batch__accumulation": 3,
        "parallel__sharding": "none",
    },
}


class Runs:
    """Each variant is run once, when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, folder / "documents"
        write_documents(self.source)
        self._runs: dict[str, Outcome] = {}

    def __getitem__(self, name: str) -> Outcome:
        if name not in self._runs:
            changes = {"1 rank": {"ranks": 1}, **VARIANTS, **TOGETHER}[name]
            settings = {
                "seed": 3,
                "optim__steps": "None",
                "optim__epochs": 1.2,
                "log__eval_fraction": 0.2,
                "log__eval_every": 3,
                "optim__warmup": 2,
                "optim__clip_norm": 0.5,
                **changes,
            }
            words = flags(self.source, self.folder / name, STARCODER, **settings)
            self._runs[name] = trained(words)
        return self._runs[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("equivalence"))


def assert_same_run(got: Outcome, want: Outcome) -> None:
    assert len(got.records) == len(want.records)
    for exact in ("step", "tokens", "sequences", "epoch", "lr", "eval_tokens"):
        assert got.column(exact) == want.column(exact)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert got.column(name) == pytest.approx(want.column(name), rel=1e-12), name
    # Adam divides by the root of the second moment: a tiny gradient's last digits are weights' middle ones.
    weights, reference = got.weights, want.weights
    assert weights.keys() == reference.keys()
    for name, tensor in reference.items():
        assert weights[name].dtype == torch.float64
        assert float((weights[name] - tensor).abs().max()) < 1e-9, name


def test_the_reference_clips_evaluates_and_has_a_smaller_last_batch(runs: Runs) -> None:
    one = runs["1 rank"]
    assert [record["sequences"] for record in one.steps] == [3, 3, 3, 3, 2, 3]  # kf26
    assert all(norm > 0.5 for norm in one.column("grad_norm"))  # of before clipping
    assert [record["step"] for record in one.evaluations] == [3, 6]
    assert one.column("bytes_per_rank") == [0.0] * 6


@pytest.mark.parametrize("name", VARIANTS)
def test_kf04_kf06_kf10_kf34_ranks_do_not_matter(runs: Runs, name: str) -> None:
    assert_same_run(runs[name], runs["1 rank"])
    assert sum(runs[name].column("bytes_per_rank")) > 0


@pytest.mark.parametrize("name", list(TOGETHER)[1:])
def test_kf06_accumulated_micro_batches_are_one_batch(runs: Runs, name: str) -> None:
    """3 + 3 sequences, or 6, or 2 + 2 + 2: unequal in tokens, and the last step has 2 sequences."""
    want = runs[next(iter(TOGETHER))]
    assert [record["sequences"] for record in want.steps] == [6, 6, 2, 6]
    assert_same_run(runs[name], want)


def test_the_first_step_does_not_depend_on_the_batch_settings_alone(runs: Runs) -> None:
    """6 sequences are another step than 3: the comparisons above compare something."""
    assert runs["1 micro-batch of 6"].steps[0]["loss"] != pytest.approx(runs["1 rank"].steps[0]["loss"], rel=1e-6)


# ---- evaluation ----------------------------------------------------------------------------------------------------


def evaluate_here(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Evaluate a fresh model on ``world`` ranks: the loss, bytes sent, and tokens that this rank held at once."""
    config = TrainConfig(
        run_dir=str(folder / "eval"),
        model=ModelConfig(config=STARCODER, dtype="float64"),
        data=DataConfig(source=str(folder / "documents"), max_length=64),
        batch=BatchConfig(sequences=3),
        optim=OptimConfig(steps=1),
        log=LogConfig(eval_fraction=0.5),
    )
    tokenizer, place = load_tokenizer("bytes"), Place(rank, world, rank, 0, torch.device("cpu"))
    train, evaluation = load_data(config, tokenizer, place, RunDir(folder / "eval"))
    assert evaluation is not None
    trainer = Trainer(config, train, evaluation, tokenizer, place)
    held: list[int] = []
    inner = trainer.sp.loss

    def loss(model: Any, step: Any) -> Any:
        held.append(step.input_ids.numel())
        assert not model.training
        assert not torch.is_grad_enabled()
        return inner(model, step)

    trainer.sp.loss = loss  # type: ignore[method-assign]
    value, tokens = trainer.evaluate(evaluation)
    assert trainer.model.training
    found = {"loss": value, "tokens": tokens, "held": held, "sent": int(trainer.sp.counter.forward.sum())}
    return found | {"one process": _one_process(config, evaluation, trainer) if world == 1 else None}


def _one_process(config: TrainConfig, evaluation: Dataset, trainer: Trainer) -> float:
    from torch.distributed.fsdp import FSDPModule

    from basp.train.model import build_model

    assert isinstance(trainer.model, FSDPModule)
    model = build_model(config, trainer.tokenizer).eval()  # the same random start
    loss, _ = oracle.run_model(model, [[evaluation.sequence(i)] for i in range(len(evaluation))])
    return float(loss)


def test_kf35_kf08_evaluation_is_parallel_and_exact(runs: Runs) -> None:
    single = run_ranks(1, evaluate_here, runs.folder)[0]
    assert single["loss"] == pytest.approx(single["one process"], rel=1e-12)
    ranks = run_ranks(2, evaluate_here, _other_folder(runs))
    assert [found["loss"] for found in ranks] == pytest.approx([single["loss"]] * 2, rel=1e-12)
    assert {found["tokens"] for found in ranks} == {single["tokens"]}
    assert len(single["held"]) > 1
    for one, *parts in zip(single["held"], *(found["held"] for found in ranks), strict=True):
        assert sum(parts) == one  # no rank sees it all
        assert max(parts) - min(parts) <= 1
    assert sum(found["sent"] for found in ranks) > 0
    assert single["sent"] == 0


def _other_folder(runs: Runs) -> Path:
    other = runs.folder / "other"
    other.mkdir()
    (other / "documents").symlink_to(runs.source)
    return other
