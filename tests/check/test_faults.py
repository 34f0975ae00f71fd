"""``basp.check`` flags models that are broken on purpose, and names the place (known failures 2, 4, 6, 12, 17-26)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import basp
from basp.checks import DifferenceError, Report
from basp.cli import main

LENGTHS = (30, 9, 21)
"""Cut over 3 ranks into slices of 20 tokens: sequence 0 at its token 20; ranks end at 0:19, 1:8 + 2:0, and 2:20."""


@dataclass(frozen=True)
class Planted:
    fault: str
    model: str
    phase: str
    place: str
    sequence: int | None
    token: int | None
    detail: str = ""


Q_OF_LAYER_1 = "model.layers.1.self_attn.q_proj.weight"

PLANTED = [
    Planted("lost_border_label", "llama", "loss", "loss", 0, 19, "the label after sequence 0, token 19"),
    Planted("loss_times_ranks", "llama", "loss", "loss", 0, 0, "(3.0000 times)"),
    Planted("position_offset", "llama", "forward", "model.rotary_emb", 0, 20),
    Planted("kv_head_off_by_one", "qwen3", "forward", "model.layers.0.self_attn", 0, 0),
    Planted("dropped_window", "mistral", "forward", "model.layers.0.self_attn", 0, 10),
    Planted("dropped_softcap", "gemma2", "forward", "model.layers.0.self_attn", 0, 1),
    Planted("missing_sinks", "gpt_oss", "forward", "model.layers.0.self_attn", 0, 0),
    Planted("leaking_mask", "llama", "forward", "model.layers.0.self_attn", 1, 0),
    Planted("doubled_key_gradient", "llama", "backward", "model.layers.1.self_attn", 0, 0, "input_layernorm"),
    Planted("doubled_head_gradient", "llama", "gradient", Q_OF_LAYER_1, None, None, "rows 8 to 15"),
]


def check(model: str, fault: str | None = None, **options) -> Report:
    hook = None if fault is None else f"tests.check.faults:{fault}"
    return basp.check(model, ranks=3, lengths=LENGTHS, timeout=60, _in_each_rank=hook, **options)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.fault)
def test_a_planted_fault_is_flagged_where_it_is(planted: Planted, monkeypatch, capsys) -> None:
    reports = []

    def checked(*, model: str, **_: Any) -> Report:
        reports.append(check(model, planted.fault))
        return reports[0]

    monkeypatch.setattr("basp.checks.check", checked)
    assert main(["check", planted.model]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"first difference: {planted.phase}: {planted.place}: " in printed
    (report,) = reports
    assert not report.ok
    found = report.first_difference
    assert found is not None
    assert (found.phase, found.place) == (planted.phase, planted.place), found
    assert (found.sequence, found.token) == (planted.sequence, planted.token), found
    assert planted.detail in found.detail
    with pytest.raises(DifferenceError, match=planted.place) as raised:
        report.raise_if_wrong()
    assert isinstance(raised.value, AssertionError)


def test_only_what_a_fault_touches_fails() -> None:
    doubled = {row.what for row in check("llama", "doubled_head_gradient").rows if not row.ok}
    assert doubled == {"gradient: attention q", "gradient norm", "one SGD step"}
    lost = {row.what: row.ok for row in check("llama", "lost_border_label").rows}
    assert lost["logits"]
    assert not lost["loss"]
    assert not any(ok for what, ok in lost.items() if what.startswith("gradient"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_faults_show_in_the_models_own_types_too(dtype: str) -> None:
    assert check("mistral", dtype=dtype).ok
    found = check("mistral", "dropped_window", dtype=dtype).first_difference
    assert found is not None
    assert (found.phase, found.place) == ("forward", "model.layers.0.self_attn")
