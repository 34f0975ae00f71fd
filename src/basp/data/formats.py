"""One file's documents: UTF-8 text, Python source, JSON lines, Parquet. Data is parsed, never executed."""

from __future__ import annotations

import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from basp.errors import DataError

_PARQUET_ROWS = 256  # rows in memory at once: documents are long
_LISTED_FIELDS = 12


class Document(NamedTuple):
    """One text and what to call it in messages: "json/decoder.py", or "data.jsonl:7" for a line or row."""

    name: str
    text: str


def read_python(path: Path, name: str) -> Iterator[Document]:
    """A Python source file in the encoding that it declares; DataError if it cannot be decoded."""
    try:
        with tokenize.open(path) as file:  # honours the coding line (PEP 263)
            yield Document(name, file.read())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def read_text(path: Path, name: str) -> Iterator[Document]:
    """A UTF-8 text file, line ends untouched; DataError with line and offset of the first byte that is not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_utf8(f"{path}:{line}", data[error.start], error.start) from error
    yield Document(name, text.removeprefix("\ufeff"))  # a byte order mark is not text


def _not_utf8(place: str, byte: int, offset: int) -> DataError:
    return DataError(
        f"{place}: byte 0x{byte:02x} at offset {offset} is not UTF-8 text",
        allowed="UTF-8 text",
        remedy="convert the file to UTF-8 (iconv -t UTF-8), or move it out of the source if it is not text",
    )


def unreadable(path: Path, error: Exception) -> DataError:
    """The refusal of a file or folder that the system, the decoder or the format's reader gave up on."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(
        f"{path}: cannot be read ({reason.strip()})",
        allowed="files that this user may read, whole and of the kind that their name says",
        remedy="repair the file or its permissions, or take it out of the source",
    )


def read_jsonl(path: Path, name: str, text_field: str) -> Iterator[Document]:
    """The string ``text_field`` of each line's object, blank lines skipped; DataError with the line otherwise."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield Document(f"{name}:{number}", _line_text(line, f"{path}:{number}", text_field))
    except OSError as error:
        raise unreadable(path, error) from error


def _line_text(line: bytes, place: str, text_field: str) -> str:
    """The string ``text_field`` of one line's object; ``place`` is "file:line" for messages."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(place, line[error.start], error.start) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: not JSON ({error})",
            allowed="one JSON object per line",
            remedy="repair or delete that line (an array over several lines is .json, not .jsonl)",
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f"{place}: a JSON {_json_kind(record)}",
            allowed=f'one JSON object per line, such as {{"{text_field}": "..."}}',
            remedy="wrap the value in an object",
        )
    if text_field not in record:
        raise _no_field(place, text_field, [str(key) for key in record])
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(
            f"{place}: field {text_field!r} is a JSON {_json_kind(text)}",
            allowed="a string",
            remedy="write the text as a string, drop the line, or name another field with data.text_field",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON may spell half of a surrogate pair, which no text encoding has
        raise DataError(
            f"{place}: field {text_field!r} has half of a surrogate pair at character {error.start}",
            allowed="text that UTF-8 can hold",
            remedy="repair the escape (\\ud83d\\ude00 is one character in two halves) or drop the line",
        ) from error
    return text


def _json_kind(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _no_field(place: str, text_field: str, present: list[str]) -> DataError:
    listed = ", ".join(sorted(present)[:_LISTED_FIELDS]) + (", ..." if len(present) > _LISTED_FIELDS else "")
    return DataError(
        f"{place}: no field {text_field!r}",
        allowed=f"one of the fields there: {listed}" if present else "an object with fields; this one has none",
        remedy="set data.text_field to the field that holds the text",
    )


def read_parquet(path: Path, name: str, text_field: str) -> Iterator[Document]:
    """The string column ``text_field``, a few rows in memory at a time; DataError with the row otherwise."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            _check_column(file.schema_arrow, path, text_field)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_field]):
                for value in batch.column(0):
                    yield Document(f"{name}:{row}", _row_text(value.as_py(), f"{path}: row {row}", text_field))
                    row += 1
    except UnicodeDecodeError as error:  # Parquet does not check that its strings are UTF-8
        raise _not_utf8(f"{path}: row {row}", error.object[error.start], error.start) from error
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from error


def _check_column(schema: Any, path: Path, text_field: str) -> None:
    import pyarrow as pa

    if text_field not in schema.names:
        raise _no_field(str(path), text_field, schema.names)
    if schema.names.count(text_field) > 1:
        raise unreadable(path, ValueError(f"{schema.names.count(text_field)} columns are called {text_field!r}"))
    kind = schema.field(text_field).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(text) or pa.types.is_large_string(text) or pa.types.is_string_view(text)):
        raise DataError(
            f"{path}: column {text_field!r} is of type {kind}",
            allowed="a column of strings",
            remedy="name the column that holds the text with data.text_field, or convert it to strings",
        )


def _row_text(value: str | None, place: str, text_field: str) -> str:
    if value is None:
        raise DataError(
            f"{place} (the first is 0): column {text_field!r} is null",
            allowed="a string in every row",
            remedy="drop the rows without text before training",
        )
    return value
