"""``basp bench attention`` over real ranks: all contenders compute the same, and those that cannot say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from basp.bench import attention
from basp.bench.attention import run_attention
from basp.bench.contender import Unavailable
from basp.bench.options import AttentionOptions
from basp.bench.rows import read_rows
from basp.cli import main
from basp.plans import Plan
from basp.strategies import plan

pytestmark = pytest.mark.timeout(240)


def measure(out: Path, contenders: tuple[str, ...], **changes: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 8, "ranks": 2, "rounds": 2, "warmup": 0}
    options = AttentionOptions(contenders=contenders, out=str(out), timeout=60.0, **{**given, **changes})
    assert run_attention(options, version="1.2.3") == 0
    assert {item.name for item in out.iterdir()} == {"rows.jsonl", "table.md", "plot.png"}
    return read_rows(out / "rows.jsonl")[1]


def sent(made: Plan) -> int:
    return 2 * int(made.traffic(8, 4).sum())


@pytest.mark.parametrize(("inside", "ranks"), [("attention", 4), ("exchange", 2)])
def test_contenders_compute_the_same_and_send_the_same_for_one_sequence(
    tmp_path: Path, inside: str, ranks: int
) -> None:
    names = ("by-hand", "by-hand-packed", "ulysses", "basp")
    rows = measure(tmp_path, names, lengths=(64,), inside=inside, ranks=ranks)
    assert [row["name"] for row in rows] == list(names)
    expected = sent(plan((64,), strategy="ulysses", ranks=ranks, heads=8, kv_heads=4))
    for row in rows:
        assert row["refusal"] is None
        assert row["tokens"] == [64 // ranks] * ranks
        assert row["bytes_inside"] == expected
    assert rows[0]["loss_difference"] is None
    assert all(row["loss_difference"] < 1e-6 for row in rows[1:])
    assert [row["raw"]["calls"][0] for row in rows] == [8, 4, 4, 4]


def test_tokens_lie_elsewhere_and_results_are_the_same_for_several_sequences(tmp_path: Path) -> None:
    rows = measure(tmp_path, ("by-hand", "ulysses", "basp", "by-hand-packed"), lengths=(16, 16, 16), dtype="float64")
    assert all(row["loss_difference"] < 1e-13 for row in rows[1:])
    assert rows[2]["bytes_inside"] == 2 * sent(plan((16,) * 3, strategy="basp", ranks=2, heads=8, kv_heads=4))
    assert rows[2]["bytes_inside"] < rows[1]["bytes_inside"] == rows[0]["bytes_inside"]


def test_ranks_without_a_token_take_part(tmp_path: Path) -> None:
    rows = measure(tmp_path, ("basp", "ulysses"), lengths=(2,), ranks=3)
    assert sorted(rows[0]["tokens"]) == [0, 1, 1]
    assert rows[1]["refusal"] is None


def test_uneven_batches_and_missing_peers_get_a_row_without_a_time(tmp_path: Path) -> None:
    rows = measure(tmp_path, ("basp", "by-hand", "yunchang", "ring"), lengths=(16, 5), inside="exchange")
    assert ["raw" in row for row in rows] == [True, False, False, False]
    assert "sequences of 16, 5 tokens with 8/4 heads on 2 ranks" in rows[1]["refusal"]


def test_what_is_required_must_run(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="sequences of 5 tokens"):
        measure(tmp_path, ("basp",), lengths=(5,), require=("by-hand",))


def test_another_result_is_noticed_in_each_tensor() -> None:
    right = [attention.Projection(3.0, 100.0)] * 4
    for place, name in enumerate(("output", "gradient of q", "gradient of k", "gradient of v")):
        for value, told in ((3.0 + 5e-3, "5.0e-05"), (float("nan"), "inf")):
            found = list(right)
            found[place] = attention.Projection(value, 100.0)
            trial = attention.Trial("mine", "mine")
            attention._compare(trial, found, right, tolerance=1e-5, baseline="base")
            assert trial.refusal == f"its {name} differs from base's by {told} relative"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contenders", "by-hand,hand"], "a contender is 'hand'"),
        (["--kv-heads", "3"], "16 query heads with 3 kv heads"),
        (["--head-dim", "0"], "--head-dim is 0"),
        (["--inside", "nothing"], "exchange"),
    ],
)
def test_bad_options_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", "").split())
