"""Tokens on disk: every document's ids end to end in one file, read through a memory map.

A store is a folder with three files:

- ``tokens.bin``: ids of all documents, int32, little endian, nothing between them
- ``offsets.npy``: int64 [documents + 1]; document i is ``tokens[offsets[i]:offsets[i + 1]]``
- ``names.jsonl``: one JSON string per document (a file's name may hold any character, a line break too)
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from basp.data.formats import Document
from basp.data.tokenizers import Tokenizer
from basp.errors import DataError

_TOKENS, _OFFSETS, _NAMES = "tokens.bin", "offsets.npy", "names.jsonl"
_ID = np.dtype("<i4")


def write_store(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: str | os.PathLike[str],
    on_document: Callable[[int, int], None] | None = None,
) -> TokenStore:
    """Tokenize ``documents`` one at a time into a new store, and open it.

    Memory holds one document and 8 bytes per document before it. The files are written beside ``folder`` under a
    hidden name and renamed at the end, so ``folder`` either does not exist or is complete. Documents that the
    tokenizer turns into no token at all are left out.

    Args:
        documents: read once.
        tokenizer: gives each document's ids.
        folder: must not exist yet, or be empty. Its parents are created.
        on_document: called after each document with (documents so far, tokens so far).

    Raises:
        DataError: ``folder`` is taken, no document has a token, or reading ``documents`` raised it.
    """
    target = Path(folder)
    _refuse_taken(target)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir(parents=True)
    try:
        _write_files(documents, tokenizer, partial, on_document)
        _refuse_taken(target)  # another process may have been faster
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after the rename there is nothing of that name
    return TokenStore.open(target)


def _write_files(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    on_document: Callable[[int, int], None] | None,
) -> None:
    offsets = array("q", [0])
    with (folder / _TOKENS).open("wb") as tokens, (folder / _NAMES).open("w", encoding="ascii") as names:
        for document in documents:
            ids = tokenizer.encode(document.text)
            if len(ids) == 0:
                continue
            tokens.write(ids.astype(_ID, copy=False).tobytes())
            names.write(json.dumps(document.name) + "\n")
            offsets.append(offsets[-1] + len(ids))
            if on_document is not None:
                on_document(len(offsets) - 1, offsets[-1])
    if len(offsets) == 1:
        raise DataError(
            "no document has a single token",
            allowed="at least one document that the tokenizer turns into tokens",
            remedy="check the source and that the tokenizer fits its language",
        )
    np.save(folder / _OFFSETS, np.asarray(offsets, dtype=np.int64))


def _refuse_taken(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(
            f"{str(folder)!r} exists already",
            allowed="a folder that does not exist yet or is empty",
            remedy="open it with TokenStore.open, delete it, or write to another folder",
        )


class TokenStore:
    """The documents of one store, each int64 [T]; made by ``write_store`` or ``TokenStore.open``.

    ``len(store)`` is the number of documents, ``store[i]`` one document's ids, and iterating gives all in order.
    """

    def __init__(self, tokens: NDArray[np.int32], offsets: NDArray[np.int64], names: list[str]) -> None:
        self._tokens, self._offsets, self._names = tokens, offsets, names

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> TokenStore:
        """Map the store in ``folder``; tokens are read from disk when they are asked for.

        Raises:
            DataError: no store there, or files that do not belong together.
        """
        path = Path(folder)
        try:
            offsets = np.load(path / _OFFSETS, allow_pickle=False)
            names = [json.loads(line) for line in (path / _NAMES).read_text(encoding="ascii").splitlines()]
            size = (path / _TOKENS).stat().st_size
        except FileNotFoundError as error:
            _refuse_store(path, f"there is no {Path(str(error.filename)).name}", error)
        except (OSError, ValueError, EOFError) as error:
            _refuse_store(path, str(error), error)
        if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0:
            _refuse_store(
                path, f"{_OFFSETS} is {offsets.dtype} {list(offsets.shape)}, not int64 [documents + 1] from 0"
            )
        if np.any(np.diff(offsets) <= 0):
            _refuse_store(path, f"{_OFFSETS} does not increase")
        if len(names) != len(offsets) - 1:
            _refuse_store(path, f"{_NAMES} has {len(names)} names for {len(offsets) - 1} documents")
        if size != int(offsets[-1]) * _ID.itemsize:
            _refuse_store(path, f"{_TOKENS} has {size} bytes where {int(offsets[-1]) * _ID.itemsize} are expected")
        return cls(np.memmap(path / _TOKENS, dtype=_ID, mode="r"), offsets, names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, document: int) -> NDArray[np.int64]:
        return self.read(document, 0, None)

    def read(self, document: int, start: int, stop: int | None) -> NDArray[np.int64]:
        """Ids ``start`` to ``stop`` (None: the end) of one document, a new int64 array; IndexError if out of range."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        first, end = int(self._offsets[document]), int(self._offsets[document + 1])
        stop = end - first if stop is None else stop
        if not 0 <= start <= stop <= end - first:
            raise IndexError(f"tokens {start} to {stop} of document {document}, which has {end - first}")
        return self._tokens[first + start : first + stop].astype(np.int64)

    def name(self, document: int) -> str:
        """What the source called this document."""
        return self._names[document]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self._offsets)

    @property
    def tokens(self) -> int:
        """Tokens of all documents together."""
        return int(self._offsets[-1])


def _refuse_store(folder: Path, why: str, cause: Exception | None = None) -> NoReturn:
    raise DataError(
        f"{str(folder)!r} is not a complete token store: {why}",
        allowed=f"a folder with {_TOKENS}, {_OFFSETS} and {_NAMES} as write_store leaves them",
        remedy="delete the folder and tokenize again",
    ) from cause
