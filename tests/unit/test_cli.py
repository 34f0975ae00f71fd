from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import basp
from basp.cli import COMMANDS, Command, _runs, main
from basp.errors import BatchError, ConfigError, DataError, DisagreementError, ModelError, PlanError, TrainingError
from basp.train.config import SMALL_LLAMA, TrainConfig
from basp.train.settings import _leaves

REFUSAL = {"allowed": "b", "remedy": "c"}


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Configs that ``basp train`` handed to the launcher, which starts nothing here."""
    configs: list[TrainConfig] = []
    module = ModuleType("basp.train.launch")
    module.run = lambda config: configs.append(config) or 0  # pyright: ignore
    monkeypatch.setitem(sys.modules, "basp.train.launch", module)
    return configs


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(arguments: list[str]) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "fail", Command("fails", run))


# ---- dispatch


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: basp COMMAND [OPTIONS]\n")
    for name, command in COMMANDS.items():
        assert f"  {name}" in out
        assert command.summary in out


def test_no_command_is_help_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: basp COMMAND")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"basp {basp.__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("basp: error: the command is 'trian'. Allowed: bench, check, lab, plan, train")
    assert "use 'train', the nearest" in error


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ConfigError, 2),
        (DataError, 2),
        (ModelError, 2),
        (PlanError, 2),
        (BatchError, 2),
        (TrainingError, 1),
        (DisagreementError, 1),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    kind: type, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, kind("a", **REFUSAL))
    assert main(["fail"]) == code
    assert capsys.readouterr() == ("", "basp: error: a. Allowed: b. To do: c.\n")


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert main(["fail"]) == 130
    assert capsys.readouterr().err == "basp: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["fail"])


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("3", False)])
def test_under_torchrun_only_rank_0_complains(
    rank: str, speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert main(["trian"]) == 2
    assert main(["train", "--optim.lrr", "1"]) == 2
    assert bool(capsys.readouterr().err) is speaks


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["train", "--optim.lrr", "1"], ["trian"]])
def test_answers_come_before_heavy_imports(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom basp.cli import main\nmain(sys.argv[1:])\n"
        "print('HEAVY', sorted({'torch', 'transformers', 'matplotlib', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("HEAVY []\n"), done.stdout + done.stderr


def test_python_m_basp_is_the_command_and_survives_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "basp", "train", "--help"]
    with open(writer, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# ---- train


def test_train_without_arguments_runs_the_small_llama(launched: list[TrainConfig]) -> None:
    assert main(["train"]) == 0
    assert launched[0].model.config == SMALL_LLAMA
    assert launched[0].optim.epochs == 1.0


@pytest.mark.parametrize("file_first", [True, False])
def test_flags_override_the_file(launched: list[TrainConfig], tmp_path: Path, file_first: bool) -> None:
    path = tmp_path / "run.toml"
    path.write_text('seed = 5\n[optim]\nlr = 0.5\nsteps = 3\n[parallel]\nranks = 2\n[model.config]\nmodel_type = "a"\n')
    flags = ["--optim.lr", "0.25", "--ranks", "4", "--data.no-shuffle", "--strategy", "ulysses"]
    assert main(["train", str(path), *flags] if file_first else ["train", *flags, str(path)]) == 0
    (config,) = launched
    assert (config.seed, config.optim.steps, config.model.config) == (5, 3, {"model_type": "a"})
    assert (config.optim.lr, config.parallel.ranks, config.parallel.strategy) == (0.25, 4, "ulysses")
    assert config.data.shuffle is False


def test_model_config_is_json_on_the_command_line(launched: list[TrainConfig]) -> None:
    assert main(["train", "--model.config", '{"model_type": "llama", "sliding_window": null}', "--steps", "2"]) == 0
    assert launched[0].model.config == {"model_type": "llama", "sliding_window": None}
    assert launched[0].optim.steps == 2


def test_none_takes_back_what_the_file_sets(launched: list[TrainConfig], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[optim]\nepochs = 2\n[model.config]\nmodel_type = "a"\n')
    changes = ["--steps", "3", "--optim.epochs", "None", "--model.config", "None", "--model.path", "m"]
    assert main(["train", str(path), *changes]) == 0
    assert (launched[0].optim.steps, launched[0].optim.epochs) == (3, None)
    assert (launched[0].model.path, launched[0].model.config) == ("m", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optim.lrr", "1"], "--optim.lr FLOAT"),
        (["--optim.schedule", "cosin"], "cosine"),
        (["--optim.lr", "fast"], "--optim.lr"),
        (["--model.config", "[1]"], "expected a JSON object such as"),
        (["--model.config", '{"a": NaN}'], "NaN is not a JSON number"),
        (["--ranks", "0"], "basp: error: parallel.ranks is 0. Allowed: at least 1"),
        (["--strategy", "bsap"], "use 'basp', the nearest"),
        (["--optim.lr", "nan"], "optim.lr is nan. Allowed: finite numbers"),
        (["--steps", "1", "--optim.epochs", "1"], "optim.steps and optim.epochs are both set"),
        (["absent.toml"], "cannot read settings from 'absent.toml': No such file"),
        (["--overwrite", "true"], "options start with --"),
    ],
)
def test_bad_settings_exit_2_and_launch_nothing(
    arguments: list[str], message: str, launched: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert launched == []


def test_a_date_in_the_file_is_refused_not_a_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model.config]\nmodel_type = "a"\nday = 2020-01-01\n')
    assert main(["train", str(path)]) == 2
    assert "model.config.day is datetime.date(2020, 1, 1), a date" in capsys.readouterr().err


def test_train_help_shows_the_file_every_key_and_every_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: basp train [-h] [OPTIONS] [run.toml]" in out
    for key, _ in _leaves(TrainConfig()):
        assert f"--{key.replace('_', '-')}" in out
    for alias in ("--ranks INT", "--steps {None}|INT", "--strategy STR", "--model.config {None}|JSON", "--run-dir STR"):
        assert alias in out
    assert "Peak learning rate. (default: 0.0003)" in out


# ---- plan

PLAN = ["plan", "--ranks", "4", "--heads", "8", "--kv-heads", "4", "--head-dim", "16"]


def test_plan_prints_each_rank_and_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--lengths", "64,64"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # Each rank sends half its q (8 heads), k and v (4 each), then half of what it computed, of 32 tokens: 2 bytes each.
    sent = 32 * 16 * 2 * (8 + 4 + 4 + 8) // 2
    assert sent == 12 * 1024
    work = f"{4 * 64 * 65 // 2:.2e}"
    assert ["0", "32", "0[0:32]", "0[0:4]", work, "12.0", "KiB", "12.0", "KiB"] in lines
    assert ["3", "32", "1[32:64]", "1[4:8]", work, "12.0", "KiB", "12.0", "KiB"] in lines
    total = "One layer's forward, all ranks: basp sends 48.0 KiB; ulysses 72.0 KiB (ratio 0.67)"
    assert " ".join(lines[-1]) == total


def test_plan_joins_sequences_that_are_cut_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--lengths", "64,64,64,8", "--strategy", "ulysses"]) == 0
    out = capsys.readouterr().out
    assert "0-2[0:16]" in out
    assert "0-3[0:2]" in out
    assert out.splitlines()[-1].startswith("One layer's forward, all ranks: ulysses sends ")


def test_only_neighbouring_sequences_are_joined() -> None:
    assert _runs([(0, "[a]"), (2, "[a]"), (3, "[a]"), (4, "[b]")]) == "0[a]\n2-3[a]\n4[b]"


def test_plan_on_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--lengths", "5", "--ranks", "1", "--heads", "3"]) == 0
    assert capsys.readouterr().out.endswith("basp sends 0 B; ulysses 0 B\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--lengths", "5,x"], "expected whole numbers with commas between, as in 16384,9000, not '5,x'"),
        (["--lengths", ""], "expected whole numbers"),
        (["--lengths", "5,0"], "sequence 1 has 0 tokens"),
        (["--lengths", "5", "--ranks", "0"], "0 ranks"),
        (["--lengths", "5", "--kv-heads", "3"], "8 query heads with 3 kv heads"),
        (["--lengths", "5", "--head-dim", "0"], "--head-dim is 0. Allowed: at least 1"),
        (["--lengths", "5", "--itemsize", "-1"], "--itemsize is -1. Allowed: at least 1"),
        (["--lengths", "5", "--strategy", "ulysse"], "use 'ulysses', the nearest"),
        ([], "--lengths"),
    ],
)
def test_plan_refuses_bad_input(change: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *change]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", "").split())
