"""Small parts of training: the schedule, the run folder, gradients, what is printed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from basp.errors import ConfigError, TrainingError
from basp.files import written_whole
from basp.train.config import OptimConfig
from basp.train.loop import _decay_groups, learning_rate_factor
from basp.train.metrics import Reporter
from basp.train.run_dir import claim_run_dir
from basp.train.sharding import average_gradients, clip_gradients
from tests.support.ranks import run_ranks
from tests.train.running import snapshot

# ---- learning rate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [1 / 2, 1, 1, 1]),
        ("constant", 8, [1 / 8, 2 / 8, 3 / 8, 4 / 8]),
        ("linear", 0, [1, 3 / 4, 2 / 4, 1 / 4]),
        ("linear", 2, [1 / 2, 1, 1, 1 / 2]),
        ("linear", 4, [1 / 4, 2 / 4, 3 / 4, 1]),
        ("cosine", 0, [1, (1 + math.sqrt(0.5)) / 2, 1 / 2, (1 - math.sqrt(0.5)) / 2]),
        ("cosine", 1, [1, 1, 3 / 4, 1 / 4]),
    ],
)
def test_learning_rate_factor_of_four_steps(schedule: Any, warmup: int, expected: list[float]) -> None:
    optim = OptimConfig(schedule=schedule, warmup=warmup)
    factors = [learning_rate_factor(step, optim=optim, steps=4) for step in range(4)]
    assert factors == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedules_end_at_zero(schedule: Any, warmup: int) -> None:
    optim = OptimConfig(schedule=schedule, warmup=warmup)
    assert learning_rate_factor(7, optim=optim, steps=7) == pytest.approx(0, abs=1e-15)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    model[0].weight.requires_grad = False
    matrices, vectors = _decay_groups(model, 0.25)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.25, 0.0)
    assert [id(p) for p in matrices["params"]] == [id(model[2].weight)]
    assert [id(p) for p in vectors["params"]] == [id(model[1].weight), id(model[1].bias), id(model[2].bias)]


# ---- gradients -----------------------------------------------------------------------------------------------------


def average_on(rank: int, world: int) -> dict[str, Any]:
    """Four parameters of two dtypes; rank 0 has no gradient for one, no rank has one for another, one is frozen."""
    shapes = {"a": (2, 3), "b": (4,), "none here": (3,), "none anywhere": (2,), "frozen": (2,)}
    parameters = {
        name: nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16 if name == "b" else torch.float64))
        for name, shape in shapes.items()
    }
    parameters["frozen"].requires_grad = False
    parameters["a"].grad = torch.arange(6, dtype=torch.float64).view(2, 3) * (rank + 1)
    parameters["b"].grad = torch.full((4,), 4.0 * rank, dtype=torch.bfloat16)
    if rank == 1:
        parameters["none here"].grad = torch.tensor([2.0, 4.0, 6.0], dtype=torch.float64)
    assert dist.group.WORLD is not None
    average_gradients(parameters.values(), dist.group.WORLD)
    return {name: None if p.grad is None else (p.grad.dtype, p.grad.tolist()) for name, p in parameters.items()}


def test_kf05_gradients_are_averaged_also_where_a_rank_has_none() -> None:
    expected = {
        "a": (torch.float64, [[0.0, 1.5, 3.0], [4.5, 6.0, 7.5]]),
        "b": (torch.bfloat16, [2.0] * 4),
        "none here": (torch.float64, [1.0, 2.0, 3.0]),
        "none anywhere": (torch.float64, [0.0, 0.0]),
        "frozen": None,
    }
    assert run_ranks(2, average_on) == [expected, expected]


def _with_gradients(*values: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(len(value), dtype=torch.float64)) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value, dtype=torch.float64)
    return parameters


@pytest.mark.parametrize(("clip", "scale"), [(0.0, 1.0), (14.0, 1.0), (6.5, 0.5)])
def test_kf10_clipping_is_at_the_norm_of_all_gradients(clip: float, scale: float) -> None:
    parameters = _with_gradients([3.0, -4.0], [12.0])
    assert clip_gradients(parameters, clip) == pytest.approx(13.0)  # the norm before clipping
    grads = [value for parameter in parameters for value in parameter.grad.tolist()]  # type: ignore[union-attr]
    assert grads == pytest.approx([3 * scale, -4 * scale, 12 * scale], rel=1e-6)


def test_the_norm_of_a_nan_is_told() -> None:
    assert math.isnan(clip_gradients(_with_gradients([math.nan, 1.0]), 1.0))


# ---- the run folder ------------------------------------------------------------------------------------------------


def write_run(folder: Path, *, steps: int = 1) -> dict[str, bytes]:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "config.toml").write_text("seed = 7\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n' * steps)
    return snapshot(folder)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_a_new_or_an_empty_folder_is_claimed(tmp_path: Path, overwrite: bool, exists: bool) -> None:
    folder = tmp_path / "runs" / "a"
    if exists:
        folder.mkdir(parents=True)
    run = claim_run_dir(folder, overwrite=overwrite)
    assert (run.path, run.replaced) == (folder, None)
    assert list(folder.iterdir()) == []


def test_a_run_is_refused_and_untouched_without_overwrite(tmp_path: Path) -> None:
    before = write_run(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"'.*/a' exists already.*--run-dir.*--overwrite"):
        claim_run_dir(tmp_path / "a", overwrite=False)
    assert snapshot(tmp_path / "a") == before
    assert [item.name for item in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("stranger", ["notes.txt", ".git", "Model"])
def test_a_strangers_folder_is_refused_even_with_overwrite(tmp_path: Path, stranger: str) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "a" / stranger).mkdir()
    before = snapshot(tmp_path / "a")
    with pytest.raises(ConfigError, match=f"holds {stranger!r}, which no run of basp wrote"):
        claim_run_dir(tmp_path / "a", overwrite=True)
    assert snapshot(tmp_path / "a") == before


def test_a_folder_that_only_has_a_model_in_it_is_no_run(tmp_path: Path) -> None:
    """A folder of models with an unlucky name: every run of basp has a config.toml."""
    (tmp_path / "a" / "model").mkdir(parents=True)
    (tmp_path / "a" / "model" / "weights").write_text("mine")
    with pytest.raises(ConfigError, match=r"run of basp|config\.toml"):
        claim_run_dir(tmp_path / "a", overwrite=True)
    assert (tmp_path / "a" / "model" / "weights").read_text() == "mine"


@pytest.mark.parametrize("name", ["a", "model", "config.toml"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_never_replaced(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError):
        claim_run_dir(tmp_path / name, overwrite=overwrite)
    assert snapshot(tmp_path) == {name: b"mine"}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the run folder"):
        claim_run_dir(tmp_path / "file" / "a", overwrite=False)


def test_overwrite_keeps_the_old_run_until_the_new_one_has_finished(tmp_path: Path) -> None:
    before = write_run(tmp_path / "a")
    (tmp_path / "a.replaced-1").mkdir()  # of a run that failed midway: its name is taken
    run = claim_run_dir(tmp_path / "a", overwrite=True)
    assert run.replaced == tmp_path / "a.replaced-2"
    assert snapshot(run.replaced) == before
    assert list(run.path.iterdir()) == []
    (run.path / "tokens").mkdir()
    run.metrics.write_text('{"step": 1}\n')
    run.finish()
    assert {item.name for item in tmp_path.iterdir()} == {"a", "a.replaced-1"}
    assert [item.name for item in run.path.iterdir()] == ["metrics.jsonl"]


def test_overwrite_of_a_link_replaces_what_it_points_to(tmp_path: Path) -> None:
    """A run folder on a larger disk, linked to: the new run is there too, and the old one goes when it has finished."""
    write_run(tmp_path / "disk" / "a")
    (tmp_path / "a").symlink_to(tmp_path / "disk" / "a")
    run = claim_run_dir(tmp_path / "a", overwrite=True)
    run.config.write_text("seed = 8\n")
    run.finish()
    assert (tmp_path / "a").is_symlink()
    assert snapshot(tmp_path / "disk") == {"a/config.toml": b"seed = 8\n"}


def test_overwrite_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")
    run = claim_run_dir(".", overwrite=True)
    run.config.write_text("seed = 8\n")
    run.finish()
    assert snapshot(tmp_path) == {"a/config.toml": b"seed = 8\n"}


def test_a_run_that_never_took_a_step_leaves_no_trace(tmp_path: Path) -> None:
    run = claim_run_dir(tmp_path / "a", overwrite=False)
    run.config.write_text("")
    run.tokens(0).mkdir(parents=True)
    run.metrics.write_text("")
    run.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_never_took_a_step_puts_the_old_one_back(tmp_path: Path) -> None:
    before = write_run(tmp_path / "a")
    run = claim_run_dir(tmp_path / "a", overwrite=True)
    run.config.write_text("")
    run.abandon()
    assert snapshot(tmp_path) == {f"a/{name}": data for name, data in before.items()}


def test_a_run_that_failed_midway_keeps_its_records_and_the_old_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    run = claim_run_dir(tmp_path / "a", overwrite=True)
    run.config.write_text("")
    run.metrics.write_text('{"step": 1}\n')
    run.tokens(0).mkdir(parents=True)
    half = run.path / ".model.partial"  # a rank was killed while it wrote the model
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    run.abandon()
    assert {item.name for item in run.path.iterdir()} == {"config.toml", "metrics.jsonl"}
    assert (tmp_path / "a.replaced-1" / "config.toml").read_text() == "seed = 7\n"


# ---- files that are whole ------------------------------------------------------------------------------------------


def test_written_whole_is_there_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "report.png"
    target.write_text("old")
    with written_whole(target) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
    assert snapshot(tmp_path) == {"report.png": b"new"}


@pytest.mark.parametrize("folder", [False, True])
def test_written_whole_leaves_nothing_half_written(tmp_path: Path, folder: bool) -> None:
    target = tmp_path / "target"

    def fail() -> None:
        with written_whole(target) as partial:
            if folder:
                partial.mkdir()
            (partial / "a" if folder else partial).write_text("half")
            raise TrainingError("it", allowed="", remedy="")

    with pytest.raises(TrainingError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_written_whole_starts_clean_after_a_killed_writer(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with written_whole(target) as leftover:
        leftover.mkdir()
    target.rmdir()
    leftover.mkdir()
    (leftover / "shard-2-of-2").write_text("of another model")
    with written_whole(target) as partial:
        partial.mkdir(exist_ok=True)
        (partial / "weights").write_text("new")
    assert snapshot(tmp_path) == {"model/weights": b"new"}


# ---- what is told --------------------------------------------------------------------------------------------------

STEP = {"loss": 1.25, "tokens_per_second": 1234.5, "bytes_per_rank": 2048.0}


@pytest.mark.parametrize(
    ("steps", "lines"), [(1, [1]), (3, [1, 2, 3]), (25, list(range(1, 26))), (60, list(range(3, 61, 3)))]
)
def test_off_a_terminal_about_twenty_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, lines: list[int]
) -> None:
    with Reporter(tmp_path / "metrics.jsonl", steps=steps, speaks=True) as reporter:
        for step in range(1, steps + 1):
            reporter.show_step({"step": step, **STEP})
    told = capsys.readouterr().out.splitlines()
    text = "loss 1.2500  1,234 tokens/s  2.0 KiB exchanged per rank"
    assert told == [f"step {step}/{steps}  {text}" for step in lines]


def test_records_are_on_disk_at_once(tmp_path: Path) -> None:
    with Reporter(tmp_path / "metrics.jsonl", steps=2, speaks=True) as reporter:
        reporter.record({"step": 1, "loss": 0.1})
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.1}
        reporter.record({"step": 2})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path / "metrics.jsonl", steps=2, speaks=False) as reporter:
        reporter.say("hello")
        reporter.record({"step": 1})
        reporter.show_step({"step": 2, **STEP})
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_markup_in_a_name_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path / "metrics.jsonl", steps=2, speaks=True) as reporter:
        reporter.say("documents [bold]a[/bold][0:64] " + "x" * 200)
    assert capsys.readouterr().out == "documents [bold]a[/bold][0:64] " + "x" * 200 + "\n"
