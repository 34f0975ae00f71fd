from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basp.errors import ConfigError
from basp.train.config import (
    SMALL_LLAMA,
    BatchConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from basp.train.settings import check_settings, dump_settings, load_settings, nearest_name

STRATEGIES = ("basp", "ulysses")


def load(tmp_path: Path, text: str | bytes) -> TrainConfig:
    path = tmp_path / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_settings(path)


def refusal(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "run.toml") in caught.value.arrived
    return str(caught.value)


def check(config: TrainConfig) -> TrainConfig:
    return check_settings(config, strategies=STRATEGIES)


def with_key(key: str, value: object) -> TrainConfig:
    """The defaults with one dotted key changed."""
    config = TrainConfig()
    table, _, name = key.rpartition(".")
    if not table:
        return dataclasses.replace(config, **{name: value})
    return dataclasses.replace(config, **{table: dataclasses.replace(getattr(config, table), **{name: value})})


# ---- load


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == TrainConfig()


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        run_dir = "runs/a"
        overwrite = true
        [model]
        dtype = "float64"
        [model.config]
        model_type = "llama"
        rope_parameters = { rope_type = "default", rope_theta = 1e4 }
        [optim]
        steps = 7
        lr = 1
        """,
    )
    architecture = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert config == TrainConfig(
        run_dir="runs/a",
        overwrite=True,
        model=ModelConfig(dtype="float64", config=architecture),
        optim=OptimConfig(steps=7, lr=1.0),
    )
    assert type(config.optim.lr) is float


def test_model_config_may_be_json_text_for_its_nulls(tmp_path: Path) -> None:
    config = load(tmp_path, """model.config = '{"model_type": "mistral", "sliding_window": null}'""")
    assert config.model.config == {"model_type": "mistral", "sliding_window": None}


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbfseed = 3\r\n[optim]\r\nsteps = 4\r\n").optim.steps == 4


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("[optim]\nlrr = 1", "optim.lrr", "optim.lr"),
        ("lr = 1", "lr", "optim.lr"),
        ("ranks = 4", "ranks", "parallel.ranks"),
        ("[batch]\nseqences = 4", "batch.seqences", "batch.sequences"),
        ("[optim]\nranks = 4", "optim.ranks", "parallel.ranks"),
        ("[log]\neval-every = 4", "log.eval-every", "log.eval_every"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path, text: str, key: str, nearest: str) -> None:
    message = refusal(tmp_path, text)
    assert f"unknown key {key!r}" in message
    assert f"write {nearest!r}, the nearest key" in message


def test_an_unknown_key_like_no_other_lists_the_tables_keys(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[batch]\nzzzzzzzz = 1")
    assert "unknown key 'batch.zzzzzzzz'. Allowed: in [batch]: sequences, accumulation. To do: remove it." in message


@pytest.mark.parametrize(
    ("text", "arrived", "allowed"),
    [
        ('[optim]\nlr = "1e-3"', "optim.lr is '1e-3'", "a number"),
        ("[optim]\nlr = true", "optim.lr is True", "a number"),
        ("[optim]\nsteps = 1.0", "optim.steps is 1.0", "a whole number"),
        ("[optim]\nsteps = true", "optim.steps is True", "a whole number"),
        ("[data]\nshuffle = 1", "data.shuffle is 1", "true or false"),
        ("[data]\nsource = 1", "data.source is 1", "text in quotes"),
        ('[model]\ndtype = "float16"', "model.dtype is 'float16'", "'float32', 'bfloat16', 'float64'"),
        ("[model]\ndtype = 16", "model.dtype is 16", "'float32', 'bfloat16', 'float64'"),
        ("[model]\nconfig = 3", "model.config is 3", "a table"),
        ("[model]\nconfig = '[1]'", "model.config is '[1]'", "a table"),
        ("model = 3", "model is 3", "a table"),
        ("[seed]\nx = 3", "seed is {'x': 3}", "a whole number"),
        ("[optim]\nlr = " + "9" * 400, "optim.lr is 999", "a number"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(tmp_path: Path, text: str, arrived: str, allowed: str) -> None:
    message = refusal(tmp_path, text)
    assert arrived in message
    assert f"Allowed: {allowed}. To do: correct" in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed = 1\n[optim\nlr = 1", 2),
        ("seed = 1\n\nseed = 2\n", 3),
        ('seed = 1\nrun_dir = "x', 2),
        (b"seed = 1\n# ok\nrun_dir = '\xff'\n", 3),
        ("seed = " + "9" * 5000, 1),
        ("seed = " + "[" * 100_000, 1),
    ],
)
def test_invalid_toml_names_the_line(tmp_path: Path, text: str | bytes, line: int) -> None:
    assert f"run.toml: line {line} is not valid TOML" in refusal(tmp_path, text)


@pytest.mark.parametrize("name", ["absent.toml", "", "nul\0l"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot read settings from .*Allowed: a TOML file"):
        load_settings(f"{tmp_path}/{name}")


# ---- check


def test_open_choices_are_made() -> None:
    config = check(TrainConfig())
    assert config.model.config == SMALL_LLAMA
    assert config.model.config is not SMALL_LLAMA
    assert (config.optim.steps, config.optim.epochs) == (None, 1.0)


def test_choices_that_were_made_stay() -> None:
    config = check(TrainConfig(model=ModelConfig(path="m"), optim=OptimConfig(steps=3)))
    assert (config.model.path, config.model.config) == ("m", None)
    assert (config.optim.steps, config.optim.epochs) == (3, None)
    assert check(config) == config


@pytest.mark.parametrize(
    ("key", "refused", "accepted", "allowed"),
    [
        ("run_dir", "", "x", "at least one character"),
        ("seed", -1, 0, "0 to 2**63 - 1"),
        ("seed", 2**63, 2**63 - 1, "0 to 2**63 - 1"),
        ("model.path", "", "m", "at least one character"),
        ("data.source", "", "x", "at least one character"),
        ("data.text_field", "", "x", "at least one character"),
        ("data.tokenizer", "", "x", "at least one character"),
        ("data.max_length", 0, 2, "at least 1"),
        ("batch.sequences", 0, 1, "at least 1"),
        ("batch.accumulation", 0, 1, "at least 1"),
        ("parallel.ranks", 0, 1, "at least 1"),
        ("parallel.replicate", 0, 1, "at least 1"),
        ("parallel.gather_ahead", -1, 0, "at least 0"),
        ("optim.steps", 0, 1, "at least 1"),
        ("optim.epochs", 0.0, 0.1, "a number above 0"),
        ("optim.lr", 0.0, 1e-9, "a number above 0"),
        ("optim.warmup", -1, 0, "at least 0"),
        ("optim.weight_decay", -0.1, 0.0, "at least 0"),
        ("optim.clip_norm", -0.1, 0.0, "at least 0"),
        ("log.every", 0, 1, "at least 1"),
        ("log.eval_every", -1, 0, "at least 0"),
        ("log.eval_fraction", 1.0, 0.99, "0 up to, but not including, 1"),
        ("log.eval_fraction", -0.1, 0.0, "0 up to, but not including, 1"),
    ],
)
def test_ranges_hold_at_their_edges(key: str, refused: object, accepted: object, allowed: str) -> None:
    check(with_key(key, accepted))
    with pytest.raises(ConfigError) as caught:
        check(with_key(key, refused))
    assert caught.value.arrived == f"{key} is {refused!r}"
    assert caught.value.allowed == allowed
    assert caught.value.remedy == f"change {key} (--{key.replace('_', '-')})"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", ["optim.lr", "optim.epochs", "optim.clip_norm", "optim.weight_decay"])
def test_numbers_that_are_not_finite_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{key} is .*finite numbers"):
        check(with_key(key, value))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            TrainConfig(model=ModelConfig(path="m", config={"model_type": "llama"})),
            "model.path and model.config are both set. Allowed: one of the two",
        ),
        (
            TrainConfig(optim=OptimConfig(steps=1, epochs=1.0)),
            "leave one out; --optim.epochs None takes back what the TOML file sets",
        ),
        (TrainConfig(model=ModelConfig(config={"hidden_size": 8})), "model.config has no model_type, only hidden_size"),
        (TrainConfig(model=ModelConfig(config={})), "model.config has no model_type, only nothing"),
        (
            TrainConfig(data=DataConfig(max_length=1)),
            'data.max_length is 1 with data.long_documents = "split". Allowed: at least 2',
        ),
        (
            TrainConfig(log=LogConfig(eval_every=5)),
            "log.eval_every is 5, but log.eval_fraction is 0: no documents are held out",
        ),
        (
            TrainConfig(parallel=ParallelConfig(strategy="ulises")),
            "parallel.strategy is 'ulises'. Allowed: basp, ulysses. To do: use 'ulysses', the nearest",
        ),
        (TrainConfig(parallel=ParallelConfig(strategy="")), "choose one of these"),
        (
            TrainConfig(parallel=ParallelConfig(sharding="none", replicate=2)),
            'parallel.replicate is 2 with parallel.sharding = "none": nothing is sharded',
        ),
        (
            TrainConfig(parallel=ParallelConfig(sharding="none", gather_ahead=1)),
            "Allowed: parallel.gather_ahead = 0 without sharding",
        ),
    ],
)
def test_contradictions_are_refused(config: TrainConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert message in str(caught.value)


def test_related_settings_that_agree_are_accepted() -> None:
    check(TrainConfig(log=LogConfig(eval_every=5, eval_fraction=0.1)))
    check(TrainConfig(data=DataConfig(max_length=1, long_documents="truncate")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainConfig(seed=None), "seed is None. Allowed: a whole number"),  # pyright: ignore
        (TrainConfig(batch=BatchConfig(sequences=True)), "batch.sequences is True"),
        (TrainConfig(parallel=ParallelConfig(sharding="ddp")), "'fsdp', 'none'"),  # pyright: ignore
        (TrainConfig(run_dir="a\udcff"), "run_dir is 'a\\udcff'. Allowed: text that UTF-8 can encode"),
        (
            TrainConfig(model=ModelConfig(config={"model_type": "llama", "a": [1, {"b": math.nan}]})),
            "model.config.a[1].b is nan. Allowed: finite numbers. To do: change model.config.a[1].b",
        ),
        (
            TrainConfig(model=ModelConfig(config={"model_type": "llama", "a": Path("x")})),
            "Allowed: text, numbers, true and false, lists and tables",
        ),
    ],
)
def test_what_no_file_can_hold_is_refused(config: TrainConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert message in str(caught.value)


# ---- dump

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.just(""), inner, max_size=3),
    max_leaves=8,
)
architectures = st.dictionaries(texts, json_values, max_size=4).map(lambda table: {**table, "model_type": "llama"})
models = st.one_of(
    st.builds(ModelConfig, path=texts, compile=st.booleans()),
    st.builds(ModelConfig, config=architectures, dtype=st.sampled_from(["float32", "bfloat16", "float64"])),
)
configs = st.builds(
    TrainConfig,
    run_dir=texts,
    overwrite=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    model=models,
    data=st.builds(DataConfig, source=texts, max_length=st.integers(2), shuffle=st.booleans()),
    optim=st.one_of(
        st.builds(OptimConfig, steps=st.integers(1), lr=positive), st.builds(OptimConfig, epochs=positive, lr=positive)
    ),
    log=st.builds(LogConfig, eval_fraction=st.floats(0, 1, exclude_max=True)),
)


@given(configs)
def test_a_dumped_config_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, config: TrainConfig) -> None:
    resolved = check(config)
    assert resolved == config
    again = load(tmp_path_factory.getbasetemp(), dump_settings(resolved))
    assert again == resolved
    texts = [json.dumps(each.model.config, sort_keys=True) for each in (again, resolved)]
    assert texts[0] == texts[1]  # 1, 1.0 and True are equal, their texts are not


def test_every_character_survives_a_dump(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x100))) + "\u2028\ufeff\U0001f40d"
    config = check(TrainConfig(run_dir=text, model=ModelConfig(config={"model_type": "a", text: text})))
    assert load(tmp_path, dump_settings(config)) == config


def test_a_dump_reads_like_a_file_written_by_hand() -> None:
    text = dump_settings(check(TrainConfig(optim=OptimConfig(steps=2))))
    assert text.startswith('run_dir = "runs/stdlib"\noverwrite = false\nseed = 0\n\n[model]\ndtype = "float32"\n')
    assert '\n[model.config]\nmodel_type = "llama"\nhidden_size = 128\n' in text
    assert "\n[optim]\nsteps = 2\nlr = 0.0003\n" in text
    assert "None" not in text


def test_nearest_name() -> None:
    assert nearest_name("trian", ["train", "plan"]) == "train"
    assert nearest_name("qqq", ["train", "plan"]) is None
    assert nearest_name("x", []) is None
