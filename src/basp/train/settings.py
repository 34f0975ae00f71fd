"""From a TOML file to a checked configuration and back: load, check, dump."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from basp.errors import ConfigError
from basp.train.config import SMALL_LLAMA, TrainConfig, parse_json_object

_Table = TypeVar("_Table")


def load_settings(path: str | Path) -> TrainConfig:
    """The configuration in a TOML file; keys that it leaves out keep their defaults.

    Raises:
        ConfigError: no such file, invalid TOML, an unknown key, a value of the wrong type. Ranges are for
            ``check_settings``, once flags have had their say.
    """
    return _build(TrainConfig, _read_toml(Path(path)), source=f"{path}: ")


def check_settings(config: TrainConfig, *, strategies: Collection[str]) -> TrainConfig:
    """The configuration with its open choices made: a model and a duration.

    Args:
        config: as loaded, parsed or built in Python.
        strategies: names that ``parallel.strategy`` may have.

    Raises:
        ConfigError: a value of the wrong type or out of range, or settings that contradict each other.
    """
    # Through the same door as a file: a config built in Python gets the same type checks.
    config = _build(TrainConfig, _as_table(config), source="")
    for key, value in _leaves(config):
        _check_portable(key, value)
    for key, accepts, allowed in _RANGES:
        value = _get(config, key)
        if value is not None and not accepts(value):
            raise ConfigError(f"{key} is {value!r}", allowed=allowed, remedy=f"change {_named(key)}")
    check_name("parallel.strategy", config.parallel.strategy, strategies)
    _check_together(config)
    return _resolve(config)


def dump_settings(config: TrainConfig) -> str:
    """A checked configuration as TOML that ``load_settings`` reads back to an equal one."""
    table = _as_table(config)
    if config.model.config is not None and _holds_null(config.model.config):
        table["model"]["config"] = json.dumps(config.model.config)  # TOML has no null
    lines: list[str] = []
    _emit_table(table, (), lines)
    return "\n".join(lines) + "\n"


def check_name(what: str, name: str, names: Collection[str]) -> None:
    """Raise ConfigError, with the nearest of ``names``, unless ``name`` is one of them."""
    if name not in names:
        nearest = nearest_name(name, names)
        remedy = f"use {nearest!r}, the nearest" if nearest else "choose one of these"
        raise ConfigError(f"{what} is {name!r}", allowed=", ".join(sorted(names)), remedy=remedy)


def nearest_name(name: str, names: Collection[str]) -> str | None:
    """The most similar of ``names`` (by the whole dotted name or its last part), or None when nothing is close."""

    def similarity(candidate: str) -> float:
        pairs = [(name, candidate), (name.rpartition(".")[2], candidate.rpartition(".")[2])]
        whole, last = (difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return max(whole, last) + whole / 100  # the whole name decides between equal last parts

    best = max(sorted(names), key=similarity, default=None)
    return best if best is not None and similarity(best) >= 0.6 else None


# ---- TOML to dataclasses -------------------------------------------------------------------------------------------


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot read settings from {str(path)!r}: {reason}",
            allowed="a TOML file",
            remedy="check the path; options start with --",
        ) from error
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # -sig: some editors start a file with a byte order mark
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: line {_line_of(error, data)} is not valid TOML: {error}",
            allowed="TOML 1.0 in UTF-8",
            remedy='write one setting per line under its [table], as in lr = 1e-3 or source = "stdlib"',
        ) from error


def _line_of(error: Exception, data: bytes) -> int:
    if isinstance(error, UnicodeDecodeError):
        return data.count(b"\n", 0, error.start) + 1
    found = re.search(r"\(at line (\d+),", str(error))
    return int(found[1]) if found else max(1, len(data.splitlines()))


def _build(table: type[_Table], values: dict[str, Any], *, source: str, prefix: str = "") -> _Table:
    hints = get_type_hints(table)
    for key in values:
        if key not in hints:
            raise _unknown_key(prefix + key, table=prefix[:-1], siblings=hints, source=source)
    return table(**{key: _convert(hints[key], value, source, prefix + key) for key, value in values.items()})


def _unknown_key(key: str, *, table: str, siblings: Collection[str], source: str) -> ConfigError:
    nearest = nearest_name(key, [name for name, _ in _leaves(TrainConfig())])
    place = f"[{table}]" if table else "the top level"
    return ConfigError(
        f"{source}unknown key {key!r}",
        allowed=f"in {place}: {', '.join(siblings)}",
        remedy=f"write {nearest!r}, the nearest key" if nearest else "remove it",
    )


def _convert(hint: Any, value: Any, source: str, key: str) -> Any:
    """``value`` as the type ``hint`` of ``key``: exactly that type, except that an int may stand for a float."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return _build(hint, value, source=source, prefix=f"{key}.")
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if get_origin(kind) is Literal and isinstance(value, str) and value in get_args(kind):
            return value
        if type(value) is kind:  # not isinstance: a bool is no int
            return value
        if get_origin(kind) is dict and (architecture := _as_dict(value)) is not None:
            return architecture
    if float in kinds and type(value) is int and abs(value) < 2**1023:
        return float(value)
    allowed = " or ".join(_described(kind) for kind in kinds if kind is not types.NoneType)
    raise ConfigError(f"{source}{key} is {value!r}", allowed=allowed, remedy=f"correct {key!r}")


def _as_dict(value: Any) -> dict[str, Any] | None:
    """A table, or the same as a JSON object in text: TOML has no null, and some architectures need it."""
    if isinstance(value, str):
        try:
            return parse_json_object(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(repr(name) for name in get_args(kind))
    if get_origin(kind) is dict or dataclasses.is_dataclass(kind):
        return "a table"
    return {str: "text in quotes", bool: "true or false", int: "a whole number", float: "a number"}[kind]


# ---- rules ---------------------------------------------------------------------------------------------------------


def _at_least(bound: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value >= bound, f"at least {bound}"


_ABOVE_ZERO = (lambda value: value > 0, "a number above 0")
_NOT_EMPTY = (lambda value: value != "", "at least one character")

_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("run_dir", *_NOT_EMPTY),
    ("seed", lambda value: 0 <= value < 2**63, "0 to 2**63 - 1"),
    ("model.path", *_NOT_EMPTY),
    ("data.source", *_NOT_EMPTY),
    ("data.text_field", *_NOT_EMPTY),
    ("data.tokenizer", *_NOT_EMPTY),
    ("data.max_length", *_at_least(1)),
    ("batch.sequences", *_at_least(1)),
    ("batch.accumulation", *_at_least(1)),
    ("parallel.ranks", *_at_least(1)),
    ("parallel.replicate", *_at_least(1)),
    ("parallel.gather_ahead", *_at_least(0)),
    ("parallel.timeout", *_ABOVE_ZERO),
    ("optim.steps", *_at_least(1)),
    ("optim.epochs", *_ABOVE_ZERO),
    ("optim.lr", *_ABOVE_ZERO),
    ("optim.warmup", *_at_least(0)),
    ("optim.weight_decay", *_at_least(0)),
    ("optim.clip_norm", *_at_least(0)),
    ("log.every", *_at_least(1)),
    ("log.eval_every", *_at_least(0)),
    ("log.eval_fraction", lambda value: 0 <= value < 1, "0 up to, but not including, 1"),
)


def _check_together(config: TrainConfig) -> None:
    """Rules between settings; nothing that was set may end up without effect."""
    for one, other in (("model.path", "model.config"), ("optim.steps", "optim.epochs")):
        if _get(config, one) is not None and _get(config, other) is not None:
            raise ConfigError(
                f"{one} and {other} are both set",
                allowed="one of the two",
                remedy=f"leave one out; {_flag(other)} None takes back what the TOML file sets",
            )
    if config.model.config is not None and not isinstance(config.model.config.get("model_type"), str):
        raise ConfigError(
            f"model.config has no model_type, only {', '.join(config.model.config) or 'nothing'}",
            allowed="a table with the model_type of a transformers architecture",
            remedy='add model_type = "llama" (or another) to [model.config]',
        )
    if config.data.long_documents == "split" and config.data.max_length < 2:
        raise ConfigError(
            f'data.max_length is {config.data.max_length} with data.long_documents = "split"',
            allowed="at least 2: a piece of one token has no next token to learn",
            remedy=f"raise {_named('data.max_length')}",
        )
    for key, default in (("parallel.replicate", 1), ("parallel.gather_ahead", 0)):
        if config.parallel.sharding == "none" and _get(config, key) != default:
            raise ConfigError(
                f'{key} is {_get(config, key)} with parallel.sharding = "none": nothing is sharded',
                allowed=f"{key} = {default} without sharding",
                remedy=f'leave it out, or set {_named("parallel.sharding")} to "fsdp"',
            )
    if config.log.eval_every > 0 and config.log.eval_fraction == 0:
        raise ConfigError(
            f"log.eval_every is {config.log.eval_every}, but log.eval_fraction is 0: no documents are held out",
            allowed="eval_every above 0 only with eval_fraction above 0",
            remedy=f"set {_named('log.eval_fraction')}, for example to 0.05, or eval_every to 0",
        )


def _check_portable(key: str, value: Any) -> None:
    """Refuse what a TOML or JSON file cannot hold, at any depth: config.toml must be able to repeat the run."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_portable(key, name)
            _check_portable(f"{key}.{name}", item)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            _check_portable(f"{key}[{place}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} is {value!r}", allowed="finite numbers", remedy=f"change {_named(key)}")
    elif isinstance(value, str) and not _is_unicode(value):
        raise ConfigError(f"{key} is {value!r}", allowed="text that UTF-8 can encode", remedy=f"change {_named(key)}")
    elif value is not None and not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise ConfigError(
            f"{key} is {value!r}, a {kind}",
            allowed="text, numbers, true and false, lists and tables",
            remedy=f"write {key} as text or numbers",
        )


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _resolve(config: TrainConfig) -> TrainConfig:
    model, optim = config.model, config.optim
    if model.path is None and model.config is None:
        model = dataclasses.replace(model, config=dict(SMALL_LLAMA))
    if optim.steps is None and optim.epochs is None:
        optim = dataclasses.replace(optim, epochs=1.0)
    return dataclasses.replace(config, model=model, optim=optim)


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of a configuration."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value


def _get(config: TrainConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _named(key: str) -> str:
    """A key as both of its names: in the file and on the command line."""
    return f"{key} ({_flag(key)})" if key in {name for name, _ in _leaves(TrainConfig())} else key


# ---- dataclasses to TOML -------------------------------------------------------------------------------------------


def _as_table(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts; unlike dataclasses.asdict it leaves values, model.config's too, as they are."""
    pairs = ((item.name, getattr(config, item.name)) for item in dataclasses.fields(config))
    return {name: _as_table(value) if dataclasses.is_dataclass(value) else value for name, value in pairs}


def _emit_table(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    """Append a table's own keys, then its sub-tables, each under a header: TOML wants them in this order."""
    if path:
        lines += ["", f"[{'.'.join(path)}]"]
    for key, value in table.items():
        if value is not None and not isinstance(value, dict):
            lines.append(f"{_emit_key(key)} = {_emit(value)}")
    for key, value in table.items():
        if isinstance(value, dict):
            _emit_table(value, (*path, _emit_key(key)), lines)


def _holds_null(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(_holds_null(item) for item in items)


def _emit(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_emit_key(key)} = {_emit(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_emit(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _emit_text(value) if isinstance(value, str) else repr(value)


def _emit_text(text: str) -> str:
    # JSON's escapes are all TOML's too; only DEL is legal in JSON and not in TOML.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _emit_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _emit_text(key)
