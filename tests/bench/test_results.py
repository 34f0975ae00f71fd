"""The page of the study that is kept here is the one that its rows give."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEWEST = max((ROOT / "bench" / "results").iterdir())


def test_the_newest_page_says_what_its_rows_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench" / "study")
    folder = tmp_path / NEWEST.name
    shutil.copytree(NEWEST / "rows", folder / "rows")
    try:
        page = importlib.import_module("page").make_page(folder)
    finally:
        for name in ("page", "cases"):
            sys.modules.pop(name, None)
    assert page == (NEWEST / "README.md").read_text(encoding="utf-8"), "make it again: bench/study FOLDER --page"
    for picture in ("ratios.png", "sharding.png"):
        assert f"![]({picture})" in page
        assert (folder / picture).stat().st_size > 10_000
        assert (NEWEST / picture).exists()
