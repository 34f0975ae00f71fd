from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

import basp
from basp.errors import DataError
from basp.report import byte_unit, bytes_text, draw_report, read_metrics

TRAIN = [{"step": step, "loss": 5.0 - step, "lr": 1e-3} for step in (1, 2, 3)]
EVAL = [{"step": 3, "eval_loss": 2.5, "eval_tokens": 10}]


def both(lengths: list[int], ranks: int) -> dict[str, basp.Plan]:
    sizes: dict[str, Any] = {"ranks": ranks, "heads": 8, "kv_heads": 4}
    return {name: basp.plan(lengths, strategy=name, **sizes) for name in ("basp", "ulysses")}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, so that a test can read what they show."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or save(self, *a, **k))
    return figures


def draw(path: Path, metrics: list[dict[str, Any]], plans: dict[str, basp.Plan]) -> None:
    draw_report(metrics, plans, head_dim=16, itemsize=4, title="runs/a", path=path)


# ---- metrics


def test_metrics_are_read_in_order_and_blank_lines_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n\n".join(json.dumps(record) for record in [*TRAIN, *EVAL]) + "\n")
    assert read_metrics(path) == [*TRAIN, *EVAL]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 2, "lo', r"metrics\.jsonl: line 2 is not JSON"),
        ("[1]", r"""metrics\.jsonl: line 2 is '\[1\]'. Allowed: an object with a "step\""""),
        ('{"loss": 1}', "line 2 is"),
    ],
)
def test_a_broken_line_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_metrics(path)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (12 * 2**20, "12.0 MiB"),
        (2**31, "2.0 GiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_bytes_text(amount: int, text: str) -> None:
    assert bytes_text(amount) == text


def test_byte_unit() -> None:
    assert [byte_unit(amount) for amount in (0, 2**10, 2**20 - 1)] == [(1, "B"), (2**10, "KiB"), (2**10, "KiB")]


# ---- picture


def test_the_loss_panel_shows_training_and_held_out(drawn: list[Figure], tmp_path: Path) -> None:
    draw(tmp_path / "report.png", [*TRAIN, *EVAL], both([40, 30], 2))
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    np.testing.assert_array_equal(lines["training"].get_xydata(), [[1, 4], [2, 3], [3, 2]])
    np.testing.assert_array_equal(lines["held out"].get_xydata(), [[3, 2.5]])
    assert lines["held out"].get_linestyle() == "None"
    assert drawn[0].get_suptitle() == "runs/a"


def test_bars_are_the_shards_of_each_plan(drawn: list[Figure], tmp_path: Path) -> None:
    plans = both([40, 30, 10], 4)
    draw(tmp_path / "report.png", TRAIN, plans)
    for axes, (name, plan) in zip(drawn[0].axes[1:3], plans.items(), strict=True):
        assert axes.get_title() == f"{name}: who owns which tokens (3 sequences)"
        assert len(axes.collections) == 4
        for rank, bars in enumerate(axes.collections):
            spans = [path.get_extents() for path in bars.get_paths()]
            widths = [shard.stop - shard.start for shard in plan.shards[rank]]
            np.testing.assert_allclose([span.width for span in spans], widths)
            np.testing.assert_allclose(spans[0].x0, 0)
            np.testing.assert_allclose(spans[-1].x1, plan.tokens[rank])
            assert {span.y0 < rank < span.y1 for span in spans} == {True}
    assert {text.get_text() for text in drawn[0].axes[1].texts} == {"0", "1", "2"}


def test_heatmaps_share_one_scale_and_hold_the_plans_bytes(drawn: list[Figure], tmp_path: Path) -> None:
    plans = both([400, 300, 100], 4)
    draw(tmp_path / "report.png", TRAIN, plans)
    panels = drawn[0].axes[3:5]
    limits = set()
    for axes, (name, plan) in zip(panels, plans.items(), strict=True):
        traffic = plan.traffic(16, 4)
        (image,) = axes.images
        np.testing.assert_allclose(np.asarray(image.get_array()) * 1024, traffic)
        assert axes.get_title() == f"{name}: who sends to whom, {bytes_text(traffic.sum())} in all"
        limits.add(image.get_clim())
    largest = max(int(plan.traffic(16, 4).max()) for plan in plans.values())
    assert limits == {(0, largest / 1024)}
    assert drawn[0].axes[5].get_ylabel() == "KiB sent by one attention layer's forward"


@pytest.mark.parametrize(
    ("metrics", "plans"),
    [
        ([], both([5], 1)),
        ([], {}),
        (TRAIN[:1], both([3, 3], 2)),
        (EVAL, {"basp": both([9], 4)["basp"]}),
        ([{"step": 1, "loss": float("nan")}], both([1], 3)),  # ranks without a token
    ],
)
def test_sparse_runs_are_drawn(metrics: list[dict[str, Any]], plans: dict[str, basp.Plan], tmp_path: Path) -> None:
    draw(tmp_path / "report.png", metrics, plans)
    assert matplotlib.image.imread(tmp_path / "report.png").std() > 0


def test_a_single_step_is_ticked_by_whole_steps(drawn: list[Figure], tmp_path: Path) -> None:
    draw(tmp_path / "report.png", TRAIN[:1], {})
    assert [tick for tick in drawn[0].axes[0].get_xticks() if tick % 1] == []


@pytest.mark.parametrize(("ranks", "labelled"), [(64, True), (65, False)])
def test_many_ranks_and_sequences_stay_readable(
    ranks: int, labelled: bool, drawn: list[Figure], tmp_path: Path
) -> None:
    plan = basp.plan([100] * 64, ranks=ranks, heads=8)
    draw(tmp_path / "report.png", TRAIN, {"basp": plan})
    owners, traffic = drawn[0].axes[1:3]
    assert bool(owners.texts) is labelled
    assert len(owners.get_yticks()) <= 16
    assert not traffic.texts


def test_a_failed_drawing_leaves_the_old_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "report.png"
    path.write_bytes(b"old")

    def fail(self: Figure, file: Any, **options: Any) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        draw(path, TRAIN, {})
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom basp.report import draw_report\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"draw_report([], {{}}, head_dim=1, itemsize=1, title='t', path={str(tmp_path / 'r.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
