"""``basp.check``: every family, what can be checked, what is refused."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import basp
from basp.checks import Report
from basp.checks.command import _data
from basp.checks.reference import run_reference
from basp.checks.shrink import shrink
from basp.checks.subject import build, find_subject
from basp.errors import ConfigError, ModelError, TrainingError
from tests.check.own import OwnModel

FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"),
    *("gemma2", "gemma3", "phi3", "olmo2", "gpt_oss", "deepseek_v3"),
]
SMALL = {"ranks": 2, "lengths": (7, 12), "timeout": 60}


class OwnLM(LlamaForCausalLM):
    """A user's class, found by its path."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_equal(family: str) -> None:
    report = basp.check(family, ranks=2, lengths=(40, 1, 25), timeout=60)
    report.raise_if_wrong()
    assert report.ok
    assert report.first_difference is None
    assert all(row.error < 1e-13 for row in report.rows)
    grouped = {row.what for row in report.rows}
    assert {"loss", "logits", "gradient: embedding", "gradient: mlp", "gradient norm", "one SGD step"} <= grouped
    assert "gradient: other" not in grouped
    assert ("gradient: attention sinks" in grouped) == (family == "gpt_oss")


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_are_right_as_shipped(family: str, dtype: str) -> None:
    report = basp.check(family, dtype=dtype, **SMALL)
    report.raise_if_wrong()
    assert any(dtype in note for note in report.notes)
    assert max(row.error for row in report.rows) > 1e-9


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_the_reference_is_what_transformers_computes_itself(family: str) -> None:
    config = shrink(find_subject(family).config, longest=30)
    ids, labels = _data((30, 11), config.vocab_size)
    traces = [
        run_reference(build(find_subject(config), torch.float32), ids, labels, **chosen)
        for chosen in ({}, {"attention": "eager"})
    ]
    assert torch.allclose(traces[0].losses, traces[1].losses, rtol=1e-6)
    for own, theirs in zip(*(trace.records for trace in traces), strict=True):
        assert torch.allclose(own.outputs["logits"], theirs.outputs["logits"], atol=1e-4)
    for name, gradient in traces[0].gradients.items():
        assert torch.allclose(gradient, traces[1].gradients[name], atol=1e-4), name


@pytest.mark.parametrize("options", [{"strategy": "ulysses"}, {"kernel": "eager"}, {"ranks": 1}, {"lengths": (1, 1)}])
def test_other_settings(options: dict) -> None:
    basp.check("qwen2", **SMALL | options).raise_if_wrong()


# ---- what can be checked -------------------------------------------------------------------------------------------


def tiny_llama(**more) -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaConfig(**sizes | {"vocab_size": 33, "max_position_embeddings": 16, "bos_token_id": None} | more)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(tiny_llama()).save_pretrained(folder)
    return folder


def test_a_checkpoint_in_full_a_config_file_and_a_class_path(checkpoint: Path) -> None:
    full = basp.check(str(checkpoint), full=True, **SMALL)
    full.raise_if_wrong()
    assert "its own size: 1 layers, 2 heads, width 16" in full.notes[0]
    for model in (str(checkpoint / "config.json"), f"{__name__}:OwnLM"):
        report = basp.check(model, **SMALL)
        report.raise_if_wrong()
        assert report.notes[0].startswith("shrunk")


def test_a_module_of_ones_own_by_its_path_or_itself() -> None:
    by_path = basp.check("tests.check.own:OwnModel", ranks=3, lengths=(17, 1, 6), timeout=60)
    itself = basp.check(OwnModel(tiny_llama()), **SMALL)
    for report in (by_path, itself):
        report.raise_if_wrong()
        assert report.title.startswith("OwnModel")
        assert {"gradient: attention q", "gradient: embedding", "gradient: mlp"} <= {row.what for row in report.rows}
    wrong = basp.check("tests.check.own:OwnModel", **SMALL, _in_each_rank="tests.check.faults:position_offset")
    assert wrong.first_difference is not None
    assert wrong.first_difference.place == "positions"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tests.check.own:Mixes", "Mixes mixes tokens outside of its attention"),
        ("tests.check.own:Ignores", "Ignores does not pass keyword arguments of its forward on to attention"),
        ("torch.nn:Linear", "no nn.Module class with a config_class"),
    ],
)
def test_a_module_of_ones_own_that_basp_cannot_honour_is_refused(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        basp.check(model, **SMALL)


def test_modules_without_a_config_or_weights_to_save_are_refused() -> None:
    with pytest.raises(ModelError, match="a Linear without a transformers config"):
        basp.check(torch.nn.Linear(2, 2), **SMALL)
    with pytest.raises(ConfigError, match="full=True with a OwnModel"):
        basp.check(OwnModel(tiny_llama()), full=True, **SMALL)


def test_a_model_keeps_its_weights_and_its_attention() -> None:
    model = OwnLM(tiny_llama())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    for full in (False, True):
        report = basp.check(model, full=full, **SMALL)
        report.raise_if_wrong()
        assert report.title.startswith("OwnLM")
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_router_loss_is_part_of_the_loss(tmp_path: Path) -> None:
    losses = []
    for weight in (0.0, 1.0):
        path = tmp_path / "config.json"
        path.write_text(
            json.dumps({"model_type": "mixtral", "output_router_logits": True, "router_aux_loss_coef": weight})
        )
        basp.check(str(path), **SMALL).raise_if_wrong()
        config = shrink(find_subject(str(path)).config, longest=12)
        trace = run_reference(build(find_subject(config), torch.float32), *_data(SMALL["lengths"], config.vocab_size))
        losses.append(float(trace.losses[0]))
    assert losses[1] - losses[0] > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_shrunk_models_keep_every_kind_of_layer(family: str) -> None:
    config = find_subject(family).config
    small = shrink(config, longest=60)
    assert type(small) is type(config)
    assert small.num_hidden_layers <= 3
    assert set(getattr(small, "layer_types", None) or []) == set(getattr(config, "layer_types", None) or [])
    if getattr(config, "sliding_window", None):
        assert small.sliding_window == 20
    if config.num_attention_heads > config.num_key_value_heads:
        assert small.num_attention_heads > small.num_key_value_heads > 1
    layers = build(find_subject(small), torch.float32).model.layers
    kinds = {type(layer.mlp).__name__ for layer in layers}
    assert len(kinds) == (2 if family == "deepseek_v3" else 1)


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_bad_settings_are_refused(checkpoint: Path) -> None:
    refused = [
        (ConfigError, "sequence 1 has 0 tokens", {"lengths": (4, 0)}),
        (ConfigError, "ranks is 0", {"ranks": 0}),
        (ConfigError, "batch is 0", {"lengths": None, "batch": 0}),
        (ConfigError, "strategy is 'basb'.*use 'basp'", {"strategy": "basb"}),
        (ConfigError, "dtype is 'float16'", {"dtype": "float16"}),
        (ModelError, "kernel", {"kernel": "fast"}),
        (ConfigError, "17 tokens with a model of max_position_embeddings 16", {"lengths": (17,)}),
    ]
    for kind, message, options in refused:
        with pytest.raises(kind, match=message):
            basp.check(str(checkpoint), **SMALL | options)


def test_models_that_are_none_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    empty, broken, cut = tmp_path / "empty", tmp_path / "broken.json", tmp_path / "cut"
    empty.mkdir()
    broken.write_text('{"model_type": ')
    cut.mkdir()
    (cut / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (cut / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:-100])
    refused = {
        "lama": "write 'llama'",
        str(empty): "config.json' cannot be read",
        str(tmp_path / "gone.json"): "cannot be read: No such file",
        str(broken): "cannot be read: Expecting value",
        str(cut): "is incomplete",
        "nowhere.at.all:Model": "cannot be imported",
        "json:JSONDecoder": "no nn.Module class",
        "bert_generation_x": "no folder, file or model_type",
        "bloom": "0 times for its 2 layers",
        "mamba": "mamba has no attention heads",
    }
    for model, message in refused.items():
        with pytest.raises(ModelError, match=message):
            basp.check(model, **SMALL)


@pytest.mark.parametrize("heads", [(6, 4), (0, None), (4, 0), (-2, 2), ("four", 2)])
def test_head_counts_that_make_no_sense_are_refused(tmp_path: Path, heads: tuple) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "llama", "num_attention_heads": heads[0], "num_key_value_heads": heads[1]})
    )
    with pytest.raises(ModelError, match=f"has {heads[0]} query heads and "):
        basp.check(str(path), **SMALL)


def test_a_checkpoint_that_lacks_a_weight_is_refused_in_full(tmp_path: Path) -> None:
    model = LlamaForCausalLM(tiny_llama())
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"lacks model\.norm\.weight"):
        basp.check(str(tmp_path), full=True, **SMALL)


def test_ranks_that_fail_or_hang_are_told_of() -> None:
    with pytest.raises(TrainingError, match=r"(?s)rank [01] of a check failed.*ZeroDivisionError: planted"):
        basp.check("llama", **SMALL, _in_each_rank="tests.check.faults:crash")
    start = time.monotonic()
    with pytest.raises(TrainingError, match=r"did not end in time|rank [01] of a check failed"):
        basp.check("llama", **SMALL | {"timeout": 3}, _in_each_rank="tests.check.faults:hang")
    assert time.monotonic() - start < 20


def test_a_report_that_holds_a_nan_is_not_ok() -> None:
    row = basp.checks.Row("loss", math.nan, 1e-12)
    assert not row.ok
    assert not Report("", (), (row,)).ok
