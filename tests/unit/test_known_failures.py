"""docs/known-failures.md is true: each of its lines has a test by its number, or says where it will be handled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = range(1, 41)


class Row(NamedTuple):
    number: int
    elsewhere: str
    here: str
    tests: str

    @property
    def later(self) -> str | None:
        """The area of work that will handle it, if that is still to come."""
        found = re.search(r"\blater, ([a-z ]+)$", self.here)
        return found and found[1]


def read_rows() -> list[Row]:
    lines = (ROOT / "docs" / "known-failures.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| *\d", line)]
    return [Row(int(number), *rest) for number, *rest in cells]


def numbered(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"kf(\d\d)", text)}


def names_of_tests(path: Path) -> Iterator[str]:
    """Names of a file's tests, and of the cases that they are parametrised by: the keys of a literal dict."""
    tree = ast.parse(path.read_text())
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    yield from (test.name for test in tests)
    used = {name.id for test in tests for part in test.decorator_list for name in find(part, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node.value, ast.Dict) and used & {t.id for t in targets if isinstance(t, ast.Name)}:
                yield from (key.value for key in node.value.keys if is_text(key))


def is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def find(tree: ast.AST, kind: type) -> list:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


@pytest.fixture(scope="module")
def tested() -> dict[int, set[str]]:
    """For each number the files that have a test or a case by it."""
    found: dict[int, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in names_of_tests(path):
            for number in numbered(name):
                found.setdefault(number, set()).add(path.name)
    return found


def test_every_line_is_there_once_and_in_order() -> None:
    assert [row.number for row in read_rows()] == list(NUMBERS)


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: f"line {row.number}")
def test_a_line_has_a_test_by_its_number_or_says_where_it_will_be_handled(
    row: Row, tested: dict[int, set[str]]
) -> None:
    assert row.elsewhere
    assert row.here
    assert row.later or row.number in numbered(row.tests), "the line names no test by its number"
    for number in numbered(row.tests):
        assert number in tested, f"no test is named kf{number:02}"
    for file in re.findall(r"`(test_\w+\.py)`", row.tests):
        assert file in tested[row.number], f"{file} has no test named kf{row.number:02}"


def test_tests_have_no_other_numbers(tested: dict[int, set[str]]) -> None:
    assert set(tested) <= set(NUMBERS)
    rows = {row.number: row for row in read_rows()}
    unnamed = {number for number in tested if number not in numbered(rows[number].tests)}
    assert not unnamed, "lines that do not name their tests"
