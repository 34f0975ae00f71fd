"""Kinds of values on the command line that tyro does not know: lists with commas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import tyro

_Item = TypeVar("_Item")


def parse_lengths(words: list[str]) -> tuple[int, ...]:
    """``["16384,9000"]`` as numbers; ValueError for anything else."""
    try:
        return tuple(int(word) for word in words[0].split(","))
    except ValueError:
        raise ValueError(f"expected whole numbers with commas between, as in 16384,9000, not {words[0]!r}") from None


def parse_names(words: list[str]) -> tuple[str, ...]:
    """``["basp,ulysses"]`` as names."""
    return tuple(name.strip() for name in words[0].split(",") if name.strip())


def _with_commas(
    metavar: str, parse: Callable[[list[str]], tuple[_Item, ...]]
) -> tyro.constructors.PrimitiveConstructorSpec[tuple[_Item, ...]]:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


Lengths = Annotated[tuple[int, ...], _with_commas("INT,INT,...", parse_lengths)]
Names = Annotated[tuple[str, ...], _with_commas("NAME,NAME,...", parse_names)]
