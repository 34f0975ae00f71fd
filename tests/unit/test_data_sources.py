"""Sources: which documents are read, in which order, and what each refusal says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from basp.data.formats import Document
from basp.data.sources import read_documents
from basp.errors import DataError


def read(path, **options):
    return list(read_documents(str(path), **options))


def refusal(path, **options):
    with pytest.raises(DataError) as caught:
        read(path, **options)
    return str(caught.value)


# --- stdlib ---


def test_stdlib_is_this_pythons_library():
    documents = read("stdlib")
    names = [document.name for document in documents]
    assert names == sorted(set(names))
    assert "json/decoder.py" in names
    assert not [name for name in names if "site-packages" in name or "/test/" in name or name.startswith("test/")]
    assert all(document.text for document in documents)
    assert dict(documents)["json/decoder.py"] == Path(json.decoder.__file__).read_text("utf-8")
    assert len(documents) > 300


def test_stdlib_reads_declared_encodings(tmp_path, monkeypatch):
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# é\n".encode("latin-1"))
    (tmp_path / "empty.py").touch()
    (tmp_path / "notes.txt").write_text("not a source")
    for folder in ("test", "site-packages", "__pycache__", "pkg/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.py").write_text("pass")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert read("stdlib") == [Document("latin.py", "# -*- coding: latin-1 -*-\n# é\n")]
    (tmp_path / "bad.py").write_bytes(b"\xff\n")
    assert f"{tmp_path}/bad.py: cannot be read" in refusal("stdlib")


# --- folders ---


def test_folder_reads_regular_files_in_order(tmp_path):
    (tmp_path / "b" / ".git").mkdir(parents=True)
    (tmp_path / "b" / "deep.txt").write_bytes("é\r\n".encode())
    (tmp_path / "b" / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "z").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert read(tmp_path) == [("a.md", "first"), ("b/deep.txt", "é\r\n"), ("z", "marked")]


def test_folder_reads_jsonl_and_parquet_files_as_such(tmp_path):
    (tmp_path / "part-0.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    pq.write_table(pa.table({"body": ["three"]}), tmp_path / "part-1.PARQUET")
    assert read(tmp_path, text_field="body") == [
        ("part-0.jsonl:1", "one"),
        ("part-0.jsonl:2", "two"),
        ("part-1.PARQUET:0", "three"),
    ]


def test_folder_file_that_is_not_utf8_is_refused_with_its_place(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo\nthr\xe9\n")
    message = refusal(tmp_path)
    assert f"{tmp_path}/bad.txt:3: byte 0xe9 at offset 11 is not UTF-8 text" in message
    assert "convert the file to UTF-8" in message


def test_folder_without_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    assert f"source '{tmp_path}' holds no document with text in it" in refusal(tmp_path)


# --- JSON lines ---


def test_jsonl_reads_the_field_of_each_line(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes('\ufeff{"text": "a\\nb", "id": 1}\n\n{"text": ""}\r\n{"text": "\u2028😀\\ud83d\\ude00"}'.encode())
    assert read(path) == [("d.jsonl:1", "a\nb"), ("d.jsonl:4", "\u2028😀😀")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": ', "not JSON (Expecting value"),
        (b"[" * 100_000, "not JSON (maximum recursion"),
        (b"[1]", "a JSON array. Allowed: one JSON object per line"),
        (b"3", "a JSON number"),
        (b'{"title": "t", "body": "b"}', "no field 'text'. Allowed: one of the fields there: body, title"),
        (b"{}", "no field 'text'. Allowed: an object with fields; this one has none"),
        (b'{"text": null}', "field 'text' is a JSON null"),
        (b'{"text": ["a"]}', "field 'text' is a JSON array"),
        (b'{"text": "a\xff"}', "byte 0xff at offset 11 is not UTF-8"),
        (b'{"text": "ab\\ud83d"}', "field 'text' has half of a surrogate pair at character 2"),
    ],
)
def test_jsonl_refusals_name_file_and_line(tmp_path, line, expected):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    assert f"{path}:2: {expected}" in refusal(path)


def test_many_fields_are_not_all_listed(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({f"f{i:02}": "" for i in range(40)}))
    message = refusal(path)
    assert "f00, " in message
    assert "f11, ..." in message
    assert "f12" not in message


# --- Parquet ---


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_reads_string_columns(tmp_path, kind):
    texts = [f"text {i}" for i in range(600)] + [""]
    pq.write_table(pa.table({"id": range(601), "text": pa.array(texts).cast(kind)}), tmp_path / "d.parquet")
    documents = read(tmp_path / "d.parquet")
    assert [document.text for document in documents] == texts[:600]
    assert documents[-1].name == "d.parquet:599"


def test_parquet_refusals_name_file_and_row(tmp_path):
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": [*map(str, range(300)), None], "id": range(301)}), path)
    assert f"{path}: row 300 (the first is 0): column 'text' is null" in refusal(path)
    assert f"{path}: no field 'body'. Allowed: one of the fields there: id, text" in refusal(path, text_field="body")
    assert f"{path}: column 'id' is of type int64. Allowed: a column of strings" in refusal(path, text_field="id")
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    assert f"{path}: cannot be read (2 columns are called 'text')" in refusal(path)
    broken = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"ab\xff"))
    pq.write_table(pa.table({"text": broken}), path)
    assert f"{path}: row 1: byte 0xff at offset 1 is not UTF-8" in refusal(path)
    path.write_bytes(b"PAR1 not really")
    assert f"{path}: cannot be read (" in refusal(path)


# --- no such source ---


def test_unknown_source_names_the_kinds_and_the_nearest(tmp_path):
    (tmp_path / "corpus.jsonl").touch()
    message = refusal(tmp_path / "corpus.json")
    assert (
        'does not exist. Allowed: "stdlib", a folder of UTF-8 text files, a .jsonl file or a .parquet file' in message
    )
    assert f"did you mean '{tmp_path}/corpus.jsonl'?" in message
    assert 'did you mean "stdlib"?' in refusal("Stdlb")
    assert f"it was looked for as '{tmp_path}/elsewhere/x'" in refusal(tmp_path / "elsewhere" / "x")
    assert "does not exist" in refusal("")


def test_unknown_source_is_refused_on_the_call(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_documents(str(tmp_path / "nothing"))


def test_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.pkl").touch()
    assert "is a file of another kind (.pkl extension)" in refusal(tmp_path / "a.pkl")


def test_data_layer_loads_neither_torch_nor_transformers():
    code = (
        "import sys, basp.data.dataset, basp.data.sources; "
        "next(basp.data.sources.read_documents('stdlib')); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
