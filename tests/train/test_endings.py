"""How runs end that do not finish: a loss that is not finite, Ctrl-C, a rank or the run that is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.running import ONE_LAYER, command, flags, read_records, train, wait_until, write_documents

pytestmark = pytest.mark.timeout(180)

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LONG = 20_000  # steps: minutes, should a test fail to end them


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A suite that a shell started in the background inherits that it is ignored, and so would the commands here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endings") / "documents"
    write_documents(folder)
    return folder


def endless(source: Path, run_dir: Path) -> list[str]:
    return flags(source, run_dir, ONE_LAYER, optim__steps=LONG, optim__lr=1e-4)


def assert_whole(run_dir: Path) -> None:
    """The records of an ended run, each line whole, and nothing else but its settings."""
    assert {item.name for item in run_dir.iterdir()} == {"config.toml", "metrics.jsonl"}
    assert [record["step"] for record in read_records(run_dir)] == list(range(1, len(read_records(run_dir)) + 1))


# ---- a loss that is not finite -------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_with_step_and_documents(source: Path, tmp_path: Path) -> None:
    words = flags(source, tmp_path / "run", ONE_LAYER, optim__lr=1e30, optim__warmup=0, data__shuffle=False)
    outcome = train([*words, "--optim.steps", "5", "--optim.schedule", "constant"])
    assert outcome.code == 1
    assert re.search("step 2 has a loss of .* and a gradient norm of (nan|inf)", outcome.errors), outcome.errors
    # Sequences 3, 4 and 5: the rest of 1.txt, and the start of 2.txt.
    assert "on 1.txt[126:151], 2.txt[0:64], 2.txt[63:71]." in outcome.errors
    assert "the step was not taken, and no model was written" in outcome.errors
    assert "optim.lr" in outcome.errors
    assert "Traceback" not in outcome.errors
    assert [record["step"] for record in outcome.records] == [1]
    assert_whole(outcome.run_dir)


# ---- in this process: the command's own handling -------------------------------------------------------------------


@contextlib.contextmanager
def once_there(path: Path, do: object) -> Iterator[None]:
    """``do()`` in a thread as soon as ``path`` exists and holds something."""

    def wait() -> None:
        wait_until(lambda: path.exists() and path.stat().st_size > 0, 60)
        do()  # type: ignore[operator]

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join(60)


def test_ctrl_c_before_the_first_step_leaves_no_trace(source: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with once_there(run_dir / "config.toml", lambda: os.kill(os.getpid(), signal.SIGINT)):
        outcome = train(endless(source, run_dir))
    assert (outcome.code, outcome.errors) == (130, "basp: interrupted\n")
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not multiprocessing.active_children(), 5)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_ends_all_and_is_named(source: Path, tmp_path: Path, rank: int) -> None:
    run_dir, killed = tmp_path / "run", []

    def kill() -> None:
        ranks = sorted(child.pid or 0 for child in multiprocessing.active_children())  # in the order of their start
        assert len(ranks) == 3
        killed.extend([ranks[rank], time.monotonic()])
        os.kill(ranks[rank], signal.SIGKILL)

    with once_there(run_dir / "metrics.jsonl", kill):
        outcome = train([*endless(source, run_dir), "--ranks", "3"])
    assert outcome.code == 1
    assert f"rank {rank} (process {killed[0]}) was ended by SIGKILL" in outcome.errors
    assert "out of memory" in outcome.errors
    assert "Traceback" not in outcome.errors
    assert time.monotonic() - killed[1] < 10
    assert multiprocessing.active_children() == []
    assert_whole(run_dir)


# ---- as commands ---------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_all_ranks(source: Path, tmp_path: Path) -> None:
    """A terminal sends it to every process of the command."""
    run_dir = tmp_path / "run"
    with command(endless(source, run_dir), run_dir=run_dir) as running:
        running.wait_for_steps()
        assert len(running.ranks()) == 2
        os.killpg(running.process.pid, signal.SIGINT)
        printed = running.finish(5)
        assert running.process.returncode == 130
        wait_until(lambda: not running.alive(), 5)
    assert printed.splitlines()[-1] == "basp: interrupted"
    assert "Traceback" not in printed
    assert_whole(run_dir)


def test_sigterm_ends_all_ranks(source: Path, tmp_path: Path) -> None:
    """What a batch system sends before it kills: the run tidies up."""
    run_dir = tmp_path / "run"
    with command(endless(source, run_dir), run_dir=run_dir) as running:
        running.wait_for_steps()
        os.kill(running.process.pid, signal.SIGTERM)
        running.process.wait(5)
        assert running.process.returncode == 128 + signal.SIGTERM
        wait_until(lambda: not running.alive(), 5)
    assert_whole(run_dir)


def test_ranks_do_not_outlive_a_killed_run(source: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with command(endless(source, run_dir), run_dir=run_dir) as running:
        running.wait_for_steps()
        assert len(running.ranks()) == 2
        os.kill(running.process.pid, signal.SIGKILL)
        wait_until(lambda: not running.alive(), 5)
    assert "model" not in {item.name for item in run_dir.iterdir()}
    records = (run_dir / "metrics.jsonl").read_text()
    assert records.endswith("}\n")


# ---- torchrun ------------------------------------------------------------------------------------------------------


def test_torchrun_trains_as_local_ranks_do(source: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "torchrun"
    with command(flags(source, run_dir, ONE_LAYER), run_dir=run_dir, launcher=TORCHRUN) as running:
        printed = running.finish(120)
        assert running.process.returncode == 0, printed
        assert running.alive() == []
    assert {item.name for item in run_dir.iterdir()} == {"config.toml", "metrics.jsonl", "report.png", "model"}
    assert printed.count("LlamaForCausalLM") == 1  # one rank speaks
    assert "2 steps on 2 ranks" in printed
    local = train(flags(source, tmp_path / "local", ONE_LAYER, ranks=2))
    for name in ("loss", "grad_norm", "tokens", "bytes_per_rank"):
        assert [record[name] for record in read_records(run_dir)] == local.column(name)


def test_torchrun_ends_when_a_worker_is_killed(source: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with command(endless(source, run_dir), run_dir=run_dir, launcher=TORCHRUN) as running:
        running.wait_for_steps()
        agent = running.process.pid
        workers = [
            pid for pid in running.alive() if pid != agent and b"basp" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(workers) == 2
        os.kill(max(workers), signal.SIGKILL)
        running.process.wait(15)
        assert running.process.returncode == 1
        wait_until(lambda: not running.alive(), 5)
    assert "model" not in {item.name for item in run_dir.iterdir()}
    assert (run_dir / "metrics.jsonl").read_text().endswith("}\n")
