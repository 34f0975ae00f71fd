"""Documents out of a source: Python's own library, a folder, a JSON lines file or a Parquet file."""

from __future__ import annotations

import difflib
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from basp.data.formats import Document, read_jsonl, read_parquet, read_python, read_text, unreadable
from basp.errors import DataError

STDLIB = "stdlib"
_KINDS = f'"{STDLIB}", a folder of UTF-8 text files, a .jsonl file or a .parquet file'
# Installed packages are not the standard library; the tests hold sources that are wrong on purpose.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def read_documents(source: str, *, text_field: str = "text") -> Iterator[Document]:
    """The documents of ``source``, one at a time, in an order that depends only on its contents.

    - "stdlib": the ``*.py`` of the running Python's library, without its tests and without installed packages.
      (A folder of that name is "./stdlib".)
    - a folder: every regular file in it at any depth, sorted by path; hidden files and folders and linked folders are
      left out. ``.jsonl`` and ``.parquet`` files in it are read as such, all others as UTF-8 text.
    - a ``.jsonl`` file: the string ``text_field`` of each line's object; lines are numbered from 1, blank ones skipped.
    - a ``.parquet`` file: the string column ``text_field``; rows are numbered from 0.

    Documents without a character are skipped. ``text_field`` matters to JSON lines and Parquet only.

    Raises:
        DataError: nothing of that name (on the call); a file, line or row that cannot be read, or no document at all
            (while reading).
    """
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return _non_empty(source, _read_tree(root, _stdlib_files(root), read_python))
    path = Path(os.path.expanduser(source))

    def read_one(file: Path, name: str) -> Iterator[Document]:
        return _read_file(file, name, text_field)

    if source and path.is_dir():  # Path("") is the working folder
        return _non_empty(source, _read_tree(path, _folder_files(path), read_one))
    if path.is_file() and path.suffix.lower() in (".jsonl", ".parquet"):
        return _non_empty(source, read_one(path, path.name))
    return _refuse_source(source, path)


def _non_empty(source: str, documents: Iterator[Document]) -> Iterator[Document]:
    """``documents`` without those of no character; refuses if none is left."""
    found = False
    for document in documents:
        if document.text:
            found = True
            yield document
    if not found:
        raise DataError(
            f"source {source!r} holds no document with text in it",
            allowed="at least one document of at least one character",
            remedy="check the path, and that the files are not hidden or empty",
        )


def _read_tree(root: Path, names: list[str], read: Callable[[Path, str], Iterator[Document]]) -> Iterator[Document]:
    for name in names:
        yield from read(root / name, name)


def _read_file(path: Path, name: str, text_field: str) -> Iterator[Document]:
    if path.suffix.lower() == ".jsonl":
        return read_jsonl(path, name, text_field)
    if path.suffix.lower() == ".parquet":
        return read_parquet(path, name, text_field)
    return read_text(path, name)


def _folder_files(root: Path) -> list[str]:
    return _walk(root, lambda name: name.startswith("."))


def _stdlib_files(root: Path) -> list[str]:
    return [name for name in _walk(root, _STDLIB_SKIPPED.__contains__) if name.endswith(".py")]


def _walk(root: Path, skip: Callable[[str], bool]) -> list[str]:
    """Regular files under ``root`` as sorted relative names with "/"; ``skip`` sees a file's or folder's own name."""

    def refuse(error: OSError) -> NoReturn:
        raise unreadable(Path(error.filename or root), error) from error

    names: list[str] = []
    for folder, children, files in os.walk(root, onerror=refuse):
        children[:] = [child for child in children if not skip(child)]
        paths = [Path(folder, file) for file in files if not skip(file)]
        names.extend(path.relative_to(root).as_posix() for path in paths if path.is_file())
    return sorted(names)


def _refuse_source(source: str, path: Path) -> NoReturn:
    if path.is_file():
        raise DataError(
            f"data source {source!r} is a file of another kind ({path.suffix or 'no'} extension)",
            allowed=_KINDS,
            remedy="put text files into a folder and give the folder, or rename the file if it is one of the kinds",
        )
    beside = sorted(child.name for child in path.parent.iterdir()) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.5)
    if near:
        hint = f"did you mean {str(path.parent / near[0])!r}?"
    elif difflib.get_close_matches(source.lower(), [STDLIB]):
        hint = f'did you mean "{STDLIB}"?'
    else:
        hint = f"check the path; it was looked for as {str(path.absolute())!r}"
    raise DataError(f"data source {source!r} does not exist", allowed=_KINDS, remedy=hint)
