"""The tested releases are the whole set that the package and its tests ask for, each at least its lower bound."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]


def releases() -> dict[str, Version]:
    lines = (ROOT / "constraints" / "tested.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {name: Version(version) for name, version in pins}


@pytest.mark.parametrize("asked", ASKED)
def test_each_requirement_has_a_tested_release_within_its_bounds(asked: str) -> None:
    requirement = Requirement(asked)
    assert releases()[requirement.name] in requirement.specifier


def test_nothing_is_tested_that_a_gpu_machine_could_not_install() -> None:
    assert not [str(version) for version in releases().values() if version.local]
    assert not [name for name in releases() if name.startswith(("nvidia-", "cuda-"))]


def test_the_package_itself_has_lower_bounds_only() -> None:
    operators = {part.operator for asked in ASKED for part in Requirement(asked).specifier}
    assert operators <= {">=", "!="}
