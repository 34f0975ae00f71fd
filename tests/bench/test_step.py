"""``basp bench step`` over real ranks: what its rows say, and who gets no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from basp.bench.contender import Unavailable
from basp.bench.options import StepOptions
from basp.bench.rows import read_rows
from basp.bench.step import run_step
from basp.cli import main
from basp.errors import TrainingError
from basp.strategies import plan

pytestmark = pytest.mark.timeout(240)

MODEL: dict[str, Any] = {"layers": 2, "hidden": 32, "mlp": 48, "heads": 4, "kv_heads": 2, "vocab": 64}
WRONG = {
    name: f"tests.bench.contenders:build_{name}" for name in ("loud", "broken", "alone", "steep", "unhappy", "crashing")
}


def options(out: Path, contenders: tuple[str, ...], **changes: Any) -> StepOptions:
    given: dict[str, Any] = {"lengths": (32, 32), "ranks": 2, "rounds": 2, "warmup": 1, "timeout": 60.0}
    return StepOptions(contenders=contenders, out=str(out), **{**MODEL, **given, **changes})


run = partial(run_step, version="1.2.3")


def sent(strategy: str, lengths: tuple[int, ...], ranks: int, itemsize: int = 4) -> Any:
    """[N, N] bytes of a step: each layer sends as much backward as forward, the other way."""
    each = plan(lengths, strategy=strategy, ranks=ranks, heads=4, kv_heads=2).traffic(8, itemsize)
    return MODEL["layers"] * (each + each.T)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sequences on two nodes of two ranks each."""
    out = tmp_path_factory.mktemp("two-nodes")
    assert run(options(out, ("basp", "ulysses", "basp"), ranks=4), nodes=(0, 0, 1, 1)) == 0
    return out


def test_rows_are_complete_and_fit_together(two_nodes: Path) -> None:
    environment, rows = read_rows(two_nodes / "rows.jsonl")
    assert [row["name"] for row in rows] == ["basp", "basp #2", "ulysses"]
    assert (environment["world"], environment["nodes"], environment["node_of_rank"]) == (4, 2, [0, 0, 1, 1])
    assert {"date", "command", "basp", "torch", "transformers", "cpu", "cores", "backend"} <= environment.keys()
    assert environment["basp"] == "1.2.3"
    assert environment["workload"]["lengths"] == [32, 32]
    for row in rows:
        assert row["refusal"] is None
        assert row["tokens"] == [16, 16, 16, 16]
        assert {name: len(losses) for name, losses in row["losses"].items()} == {"sgd": 4, "adamw": 4}
        raw = row["raw"]
        lists = ("seconds", "cpu", "exchanging", "gathering", "inside", "across")
        assert all(len(raw[name]) == 2 for name in lists)
        ratios = [mine / base for mine, base in zip(raw["seconds"], rows[0]["raw"]["seconds"], strict=True)]
        assert row["step_ratio"]["median"] == pytest.approx(sum(ratios) / 2)
        assert (row["step_ratio"]["min"], row["step_ratio"]["max"]) == (min(ratios), max(ratios))
        assert row["all_to_all_share"] > 0
        assert row["weights_share"] > 0
        assert row["all_to_all_share"] + row["weights_share"] < 1
        assert 0 < row["peak_bytes"] < 2**30
        assert row["interface_bytes"] is None
    assert set(rows[0]["step_ratio"].values()) == {1.0}
    assert rows[0]["losses"]["sgd"][0] == rows[0]["losses"]["adamw"][0]
    for losses in rows[0]["losses"].values():
        assert losses == sorted(losses, reverse=True)  # it trains, so that a wrong gradient can show
    assert [row["loss_difference"] is not None and row["loss_difference"] < 1e-6 for row in rows] == [False, True, True]


def test_counted_bytes_are_the_plans_and_none_cross_nodes_with_a_sequence_on_each(two_nodes: Path) -> None:
    _, (basp, again, ulysses) = read_rows(two_nodes / "rows.jsonl")
    ours, theirs = sent("basp", (32, 32), 4), sent("ulysses", (32, 32), 4)
    assert (basp["bytes_inside"], basp["bytes_across"]) == (ours.sum(), 0)
    assert (again["bytes_inside"], again["bytes_across"]) == (ours.sum(), 0)
    across = theirs[:2, 2:].sum() + theirs[2:, :2].sum()
    assert across > 0
    assert (ulysses["bytes_inside"], ulysses["bytes_across"]) == (theirs.sum() - across, across)
    assert ulysses["bytes_across_ratio"] is None  # of nothing
    assert ulysses["raw"]["calls"] == [2 * 2 * MODEL["layers"]] * 2  # there and back, forward and backward


def test_table_and_picture_are_written(two_nodes: Path) -> None:
    assert {item.name for item in two_nodes.iterdir()} == {"rows.jsonl", "table.md", "plot.png"}
    table = (two_nodes / "table.md").read_text()
    assert table.startswith("# one training step, 2 x 32 tokens, float32, 4 ranks on 2 nodes\n")
    for name in ("basp", "basp #2", "ulysses"):
        assert table.count(f"\n| {name} | ") == 4
        assert f"- {name}: plan '" in table
    picture = (two_nodes / "plot.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_contenders_that_compute_something_else_get_no_time(tmp_path: Path) -> None:
    names = ("loud", "broken", "alone", "steep", "unhappy", "ring-of-none")
    known = WRONG | {"ring-of-none": "tests.bench.nowhere:build"}
    assert run(options(tmp_path, names), known=known) == 0
    _, rows = read_rows(tmp_path / "rows.jsonl")
    assert [row["name"] for row in rows] == ["basp", *names]
    told = {row["name"]: row for row in rows if "raw" not in row}
    assert set(told) == set(names)
    assert "1.0e-02 relative in step" in told["loud"]["refusal"]
    assert told["loud"]["loss_difference"] == pytest.approx(0.01, rel=1e-3)
    assert told["broken"]["loss_difference"] is None
    assert "by inf relative" in told["broken"]["refusal"]
    assert told["alone"]["loss_difference"] > 0.1
    assert "in step 3 under sgd" in told["steep"]["refusal"]
    assert told["steep"]["losses"]["adamw"] == pytest.approx(rows[0]["losses"]["adamw"], rel=1e-6)
    assert "no luck" in told["unhappy"]["refusal"]
    assert "No module named 'tests.bench.nowhere'" in told["ring-of-none"]["refusal"]
    table = (tmp_path / "table.md").read_text()
    for name in names:
        assert f"| {name} | no time |" in table
        assert f"- {name} has no time: " in table


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [("unhappy", Unavailable, "no luck"), ("loud", TrainingError, "loud was required, and its loss differs")],
)
def test_what_is_required_must_have_a_time(tmp_path: Path, name: str, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        run(options(tmp_path, ("basp",), require=(name,)), known=WRONG)
    assert list(tmp_path.iterdir()) == []


def test_a_contender_that_crashes_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"(?s)rank [01] of the benchmark failed:.*ZeroDivisionError: planted"):
        run(options(tmp_path, ("crashing",)), known=WRONG)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_hybrid_sharding_of_unequal_sequences_trains_alike(tmp_path: Path, dtype: str) -> None:
    losses = []
    for replicate in (1, 2):
        out = tmp_path / f"{replicate}"
        changes: dict[str, Any] = {"lengths": (40, 9, 2), "ranks": 4, "replicate": replicate, "dtype": dtype}
        run(options(out, ("basp", "ulysses"), optimizer="sgd", rounds=1, warmup=0, **changes))
        _, rows = read_rows(out / "rows.jsonl")
        assert all("raw" in row for row in rows)
        itemsize = 2 if dtype == "bfloat16" else 8
        assert rows[0]["bytes_inside"] == sent("basp", (40, 9, 2), 4, itemsize).sum()
        losses.append(rows[0]["losses"]["sgd"])
    tolerance = 1e-3 if dtype == "bfloat16" else 1e-9
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


def test_what_is_not_counted_is_not_zero(tmp_path: Path) -> None:
    known = {"uncounted": "tests.bench.contenders:build_uncounted"}
    run(options(tmp_path, ("basp", "ulysses", "uncounted")), known=known)
    _, (_, ulysses, uncounted) = read_rows(tmp_path / "rows.jsonl")
    keys = {key for key, value in uncounted.items() if value is None} - {"refusal", "interface_bytes"}
    assert keys == {"all_to_all_seconds", "all_to_all_share", "all_to_all_ratio"} | {
        f"bytes_{key}" for key in ("inside", "across", "across_ratio")
    }
    assert ulysses["bytes_inside"] > 0
    assert "| uncounted | – | – | – | – |" in (tmp_path / "table.md").read_text()


def test_one_contender_may_be_sharded_in_another_way(tmp_path: Path) -> None:
    own = "basp:replicate=2:gather_ahead=1"
    run(options(tmp_path, ("basp", own), ranks=4), nodes=(0, 0, 1, 1))
    _, (plain, other) = read_rows(tmp_path / "rows.jsonl")
    assert (plain["name"], other["name"]) == ("basp", own)
    assert "FSDP2, one copy of the model;" in plain["does"]
    assert "FSDP2, 2 copies of the model, weights gathered 1 ahead;" in other["does"]
    assert other["loss_difference"] < 1e-6


# ---- the command ---------------------------------------------------------------------------------------------------


def flags(*more: str) -> list[str]:
    sizes = [word for name, value in MODEL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["bench", "step", "--lengths", "24,8", "--rounds", "1", "--warmup", "0", *sizes, *more]


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 4}))
    assert main(flags("--ranks", "2", "--config", str(config), "--contenders", "ulysses")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "one training step, 2 sequences of 32 tokens, float32, 2 ranks on one node"
    assert [line.split()[0] for line in lines if line.startswith(("  basp ", "  ulysses "))] == ["basp", "ulysses"] * 4
    assert any(line.startswith("- Ratios are to basp") for line in lines)


def test_torchrun_is_joined(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    out = tmp_path / "results"
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "VIRTUAL_ENV", "LANG") if key in os.environ}
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "basp", *flags("--out", str(out))],
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("one training step") == 1  # one rank speaks
    environment, rows = read_rows(out / "rows.jsonl")
    assert environment["interfaces"] == ["lo"]
    assert [row["name"] for row in rows] == ["basp", "ulysses"]
    # The interface carries attention's bytes, and those of weights and gradients.
    assert all(row["interface_bytes"] > row["bytes_inside"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contenders", "basp,ulises"], "a contender is 'ulises'"),
        (["--require", "alone"], "a contender is 'alone'"),
        (["--contenders", ","], "--contenders is empty"),
        (["--rounds", "0"], "--rounds is 0. Allowed: at least 1"),
        (["--heads", "0"], "--heads is 0"),
        (["--lr", "nan"], "--lr is nan"),
        (["--lengths", "5,x"], "expected whole numbers"),
        (["--lengths", "5,1"], "at least 2 tokens each"),
        (["--batch", "2", "--lengths", "5"], "--lengths together with --batch or --length"),
        (["--config", "absent.json"], "--config 'absent.json' cannot be read"),
        (["--optimizer", "adam"], "adamw"),
        (["--replicate", "3", "--ranks", "2"], "3 copies of the model on 2 ranks"),
        (["--contenders", "basp:replicate=0"], "'replicate=0' behind a contender's name, in 'basp:replicate=0'"),
        (["--contenders", "ulysses:heads=2"], "Allowed: replicate=1 and more or gather_ahead=0 and more"),
        (["--contenders", "ulises:replicate=2"], "a contender is 'ulises'"),
        (["--kv-heads", "3", "--ranks", "2"], "heads"),
    ],
)
def test_bad_options_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_rows_of_another_run_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("mine")
    assert main(flags("--ranks", "2", "--out", str(tmp_path))) == 2
    assert "holds the rows of another run" in capsys.readouterr().err
    assert (tmp_path / "rows.jsonl").read_text() == "mine"


def test_bench_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "usage: basp bench COMMAND" in capsys.readouterr().out
    assert main(["bench", "stop"]) == 2
