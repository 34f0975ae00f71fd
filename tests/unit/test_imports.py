"""What may import what: read from the source, and from what a fresh interpreter has loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import basp

SOURCE = Path(basp.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

NUMPY_ONLY = ["basp", "basp.errors", "basp.plans", "basp.strategies", "basp.exchange"]

LAYERS = [
    {"errors"},
    {"files", "processes"},
    {"plans"},
    {"batches", "strategies"},
    {"exchange"},
    {"collectives", "agreement", "losses", "ranks"},
    {"attention"},
    {"fit"},
    {"parallel"},
    {"hf"},
    {"data"},
    {"report", "flags"},
    {"train"},
    {"casts"},
    {"checks"},
    {"lab"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
"""Lowest first. A module imports from lower layers and its own package, never from another of its own layer."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

READS_ENVIRONMENT = {"ranks.py", "lab/ranks.py", "bench/stamp.py", "bench/peers/deepspeed_alst.py", "cli.py"}
"""A launcher is told its rank by the environment, or tells it, and a stamp tells of it; all else goes by arguments."""


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def top_of(path: Path) -> str:
    """``attention`` for attention/attend.py, ``plans`` for plans.py."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports: on top, within functions, and for type checkers only."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way_through_the_layers(path: Path) -> None:
    top = top_of(path)
    if top == "__init__":  # the package's front names what is below it, and imports it on first use
        return
    assert top in LEVEL, f"{top} is new: put it into LAYERS, below everything that may import it"
    for line, name in imports_of(path):
        package, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if package != "basp" or target in ("", top):
            continue
        where = f"{name_of(path)}:{line}: {top} imports {name}"
        assert target not in basp.__all__ or target in LEVEL, f"{where} from the package's front, not from its module"
        assert LEVEL.get(target, len(LAYERS)) < LEVEL[top], f"{where}, which is not below it"


def test_modules_do_not_import_in_a_circle() -> None:
    modules = {name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        dotted = {name.removeprefix("basp.") for _, name in imports_of(path) if name.startswith("basp.")}
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in dotted} - {"", module}
    list(TopologicalSorter(graph | {"__init__": set()}).static_order())  # raises CycleError


def test_only_the_front_and_the_command_line_import_the_front() -> None:
    importers = {name_of(path) for path in FILES for _, name in imports_of(path) if name == "basp"}
    assert importers <= {"cli.py"}


def test_no_layer_is_listed_that_does_not_exist() -> None:
    assert set(LEVEL) <= {top_of(path) for path in FILES}
    assert len(LEVEL) == sum(map(len, LAYERS))


def test_modules_below_the_collectives_never_name_torch() -> None:
    below = [path for path in FILES if LEVEL.get(top_of(path), len(LAYERS)) < LEVEL["collectives"]]
    assert below
    for path in below:
        roots = {name.split(".")[0] for _, name in imports_of(path)} - sys.stdlib_module_names
        assert roots <= {"basp", "numpy"}, name_of(path)


def test_planning_loads_no_torch() -> None:
    code = f"""
import sys
import {", ".join(NUMPY_ONLY)}
plan = basp.plan([5, 3], ranks=2, heads=4, strategy="ulysses")
basp.exchange.compile_exchange(plan, 0, head_dim=8)
assert dir(basp) and basp.Plan and basp.Shard and basp.Tile
print(sorted(name for name in ("torch", "transformers", "pyarrow", "tyro", "matplotlib") if name in sys.modules))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr


@pytest.mark.parametrize("module", NUMPY_ONLY)
def test_each_planning_module_can_be_imported_first(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr


def test_every_public_name_exists() -> None:
    for name in basp.__all__:
        found = getattr(basp, name)
        assert getattr(found, "__module__", found.__name__).startswith("basp.")
    assert set(basp.__all__) <= set(dir(basp))
    with pytest.raises(AttributeError, match=r"no attribute 'Plann'; it has: .*Plan"):
        _ = basp.Plann  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_environment_is_read_where_ranks_are_launched_only(path: Path) -> None:
    words = ("environ", "environb", "getenv", "putenv")
    lines = [
        node.lineno
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in words)
        or (isinstance(node, ast.ImportFrom) and any(alias.name in words for alias in node.names))
    ]
    assert not lines or name_of(path) in READS_ENVIRONMENT, f"{name_of(path)}, lines {lines}"


RUNS_WHAT_IT_READS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_that_is_read_can_run_code(path: Path) -> None:
    for line, name in imports_of(path):
        assert name.split(".")[0] not in RUNS_WHAT_IT_READS, f"{name_of(path)}:{line}: {name}"
        assert not name.startswith(("torch.load", "torch.serialization")), f"{name_of(path)}:{line}: {name}"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("eval", "exec", "compile", "torch.load"), (
                f"{name_of(path)}:{node.lineno}: {ast.unparse(node.func)}"
            )
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            assert ast.unparse(node.value) == "False", f"{name_of(path)}:{node.value.lineno}: {node.arg}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_module_keeps_state_in_globals(path: Path) -> None:
    lines = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Global)]
    assert not lines, f"{name_of(path)}, lines {lines}"
