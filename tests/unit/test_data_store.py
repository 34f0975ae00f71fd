"""Token stores: what is written is what is read, and nothing half-written is opened."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basp.data.dataset import Dataset
from basp.data.formats import Document
from basp.data.sampling import Span, cut_documents
from basp.data.store import TokenStore, write_store
from basp.data.tokenizers import load_tokenizer
from basp.errors import DataError

BYTES = load_tokenizer("bytes")
DOCUMENTS = [Document("a/b.py", "hello"), Document("line\nbreak \udcff é", "é😀"), Document("c", "x" * 1000)]


class Halves:
    """A tokenizer without end token: one id for two characters, so one character gives none."""

    vocab_size, end_id = 10, None

    def encode(self, text):
        return np.full(len(text) // 2, 7, dtype=np.int32)

    def decode(self, ids):
        return "ab" * len(ids)

    def save(self, folder):
        raise NotImplementedError


@pytest.fixture
def store(tmp_path):
    return write_store(DOCUMENTS, BYTES, tmp_path / "deep" / "store")


def test_store_gives_back_every_document(store, tmp_path):
    for opened in (store, TokenStore.open(tmp_path / "deep" / "store")):
        assert len(opened) == 3
        assert opened.tokens == 6 + 7 + 1001
        assert opened.lengths.tolist() == [6, 7, 1001]
        assert opened.lengths.dtype == np.int64
        for i, document in enumerate(DOCUMENTS):
            assert opened[i].dtype == np.int64
            np.testing.assert_array_equal(opened[i], BYTES.encode(document.text))
            assert opened.name(i) == document.name
    assert [len(ids) for ids in store] == [6, 7, 1001]


def test_files_are_as_documented(store, tmp_path):
    folder = tmp_path / "deep" / "store"
    assert sorted(path.name for path in folder.iterdir()) == ["names.jsonl", "offsets.npy", "tokens.bin"]
    assert [path.name for path in folder.parent.iterdir()] == ["store"]
    raw = np.frombuffer((folder / "tokens.bin").read_bytes(), dtype="<i4")
    np.testing.assert_array_equal(raw, np.concatenate([BYTES.encode(document.text) for document in DOCUMENTS]))
    assert np.load(folder / "offsets.npy").tolist() == [0, 6, 13, 1014]


@settings(deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=8))
def test_any_text_survives(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("any") / "store"
    written = write_store([Document(text, text) for text in texts], BYTES, folder)
    assert [BYTES.decode(ids) for ids in written] == texts
    assert [written.name(i) for i in range(len(written))] == texts


def test_reads_are_copies_and_bounds_are_checked(store):
    store[0][:] = 0
    assert BYTES.decode(store[0]) == "hello"
    assert store.read(2, 3, 5).tolist() == [3 + ord("x")] * 2
    for document, start, stop in [(-1, 0, 1), (3, 0, 1), (0, 0, 7), (0, -1, 2), (0, 4, 3)]:
        with pytest.raises(IndexError):
            store.read(document, start, stop)


def test_progress_is_reported_per_document(tmp_path):
    seen = []
    write_store(iter(DOCUMENTS), BYTES, tmp_path / "s", on_document=lambda *so_far: seen.append(so_far))
    assert seen == [(1, 6), (2, 13), (3, 1014)]


def test_documents_without_tokens_are_left_out(tmp_path):
    store = write_store([Document("a", "x"), Document("b", "xxxx")], Halves(), tmp_path / "s")
    assert (len(store), store.name(0), store[0].tolist()) == (1, "b", [7, 7])
    with pytest.raises(DataError, match="no document has a single token"):
        write_store([Document("a", "x")], Halves(), tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("failure", [DataError("line 7", allowed="a", remedy="b"), KeyboardInterrupt()])
def test_nothing_is_left_of_an_interrupted_write(tmp_path, failure):
    def documents():
        yield DOCUMENTS[0]
        assert not (tmp_path / "s").exists()
        raise failure

    with pytest.raises(type(failure)):
        write_store(documents(), BYTES, tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_taken_folder_is_refused_before_reading(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "precious").touch()
    with pytest.raises(DataError, match=r"exists already.*TokenStore\.open"):
        write_store(iter([None]), BYTES, tmp_path / "s")  # type: ignore[list-item]
    assert (tmp_path / "s" / "precious").exists()
    (tmp_path / "empty").mkdir()
    assert len(write_store(DOCUMENTS, BYTES, tmp_path / "empty")) == 3


def test_folder_taken_meanwhile_is_left_alone(tmp_path):
    def documents():
        yield DOCUMENTS[0]
        write_store(DOCUMENTS[1:], BYTES, tmp_path / "s")

    with pytest.raises(DataError, match="exists already"):
        write_store(documents(), BYTES, tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert len(TokenStore.open(tmp_path / "s")) == 2


@pytest.mark.parametrize("missing", ["tokens.bin", "offsets.npy", "names.jsonl"])
def test_missing_file_is_refused(store, tmp_path, missing):
    folder = tmp_path / "deep" / "store"
    (folder / missing).unlink()
    with pytest.raises(DataError, match=rf"is not a complete token store: there is no {missing}.*tokenize again"):
        TokenStore.open(folder)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokens.bin", b"\0" * 4052, "tokens.bin has 4052 bytes where 4056 are expected"),
        ("names.jsonl", b'"a"\n"b"\n', "names.jsonl has 2 names for 3 documents"),
        ("names.jsonl", b'"a\n', "Unterminated string"),
        ("offsets.npy", b"", "No data left"),
        ("offsets.npy", np.array([0, 6, 13, 1014], dtype=np.int32), "is int32"),
        ("offsets.npy", np.array([0, 6, 6, 1014]), "does not increase"),
        ("offsets.npy", np.array([1, 6, 13, 1014]), "from 0"),
    ],
)
def test_damaged_store_is_refused(store, tmp_path, file, content, expected):
    path = tmp_path / "deep" / "store" / file
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(DataError, match="not a complete token store") as caught:
        TokenStore.open(path.parent)
    assert expected in str(caught.value)


def test_pickled_offsets_are_not_loaded(store, tmp_path):
    folder = tmp_path / "deep" / "store"
    np.save(folder / "offsets.npy", np.array([object()], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="allow_pickle=False"):
        TokenStore.open(folder)


def test_dataset_ties_store_and_spans(store):
    spans = cut_documents(store.lengths, max_length=400, long_documents="split")
    dataset = Dataset(store, spans)
    assert len(dataset) == 5
    assert dataset.lengths.tolist() == [6, 7, 400, 400, 203]
    assert dataset.tokens == 6 + 7 + 1001 + 2  # two cuts, each repeats a token
    assert dataset.span(3) == Span(2, 399, 799)
    assert dataset.describe(0) == "a/b.py[0:6]"
    assert dataset.describe(4) == "c[798:1001]"
    assert dataset.sequence(4).dtype == np.int64
    np.testing.assert_array_equal(dataset.sequence(4), store[2][798:])
    for index in (-1, 5):
        with pytest.raises(IndexError):
            dataset.sequence(index)
