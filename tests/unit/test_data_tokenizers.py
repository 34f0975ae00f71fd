"""Tokenizers: ids against ByT5's own, control tokens that stay text, and folders that AutoTokenizer reads back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basp.data.tokenizers import load_tokenizer
from basp.errors import DataError

TEXTS = [
    "plain",
    "naïve é",
    "日本語",
    "😀 👩‍👩‍👧",
    "tab\tline\r\nend\n",
    "\x00\x7f",
    "a</s>b",
    " <pad> ",
    "x<unk>",
    "</s>",
    "ends</s>",
]
MODEL_TYPES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "gemma3_text",
    "phi3",
    "olmo2",
    "gpt_oss",
    "deepseek_v3",
]


@pytest.fixture(scope="module")
def byt5():
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=0)


@pytest.fixture
def bpe_folder(tmp_path):
    """A small byte-level BPE tokenizer that stores traps: truncation to 4 tokens, 8 as model_max_length."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def build(*, end: str | None = "<eos>", template: str = "<bos> $A"):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(["hello world hello there"] * 5, trainer)
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<bos>", 0), ("<eos>", 1)]
        )
        backend.enable_truncation(4)
        backend.enable_padding(length=64)
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<bos>", eos_token=end, pad_token="<bos>", model_max_length=8
        )
        folder = tmp_path / "bpe"
        wrapped.save_pretrained(folder)
        return folder

    return build


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_equal_byt5(byt5, text):
    ids = load_tokenizer("bytes").encode(text)
    # ByT5 itself makes control tokens of "</s>" in a text unless it is told to split them; we never do.
    assert ids.tolist() == byt5(text, split_special_tokens=True).input_ids
    assert ids.dtype == np.int32
    assert ids.tolist() == [*(byte + 3 for byte in text.encode()), 1]


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert (ids == 1).sum() == 1
    assert ids[-1] == tokenizer.end_id == 1
    assert ids.max() < tokenizer.vocab_size == 259


def test_bytes_decode_leaves_out_control_ids_and_marks_cut_characters():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(np.array([0, 2, 3 + ord("a"), 1, 259, 700])) == "a"
    assert tokenizer.decode(tokenizer.encode("aé")[:2]) == "a\ufffd"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_saved_bytes_load_beside_any_model(byt5, tmp_path, model_type):
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    load_tokenizer("bytes").save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    every_byte = "".join(map(chr, range(0x250))) + "😀日本"
    assert loaded(every_byte).input_ids == byt5(every_byte).input_ids
    assert loaded.decode(loaded(every_byte).input_ids, skip_special_tokens=True) == every_byte
    assert (len(loaded), loaded.eos_token_id, loaded.pad_token_id, loaded.unk_token_id) == (259, 1, 0, 2)


def test_saved_bytes_are_the_same_tokenizer_from_the_folder(tmp_path):
    load_tokenizer("bytes").save(tmp_path)
    ours, loaded = load_tokenizer("bytes"), load_tokenizer(str(tmp_path))
    assert (loaded.vocab_size, loaded.end_id) == (259, 1)
    for text in TEXTS:
        np.testing.assert_array_equal(loaded.encode(text), ours.encode(text))
        assert loaded.decode(loaded.encode(text)) == text


def test_folder_tokenizer_encodes_whole_documents_as_text(bpe_folder, caplog, capfd):
    tokenizer = load_tokenizer(str(bpe_folder()))
    text = "hello world " * 50 + "<eos> and <bos>"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids[0] == 0  # the begin token of its own template
    assert ids[-1] == tokenizer.end_id == 1
    assert (ids == 1).sum() == 1
    assert (ids == 0).sum() == 1
    assert len(ids) > 64  # neither the stored truncation nor the stored padding
    assert tokenizer.decode(ids) == text
    assert ids.max() < tokenizer.vocab_size
    assert not caplog.records
    assert "longer than" not in capfd.readouterr().err


@pytest.mark.parametrize("template", ["$A", "$A <eos>", "<bos> $A <eos> <eos>"])
def test_folder_tokenizer_ends_with_exactly_one_end_id(bpe_folder, template):
    ids = load_tokenizer(str(bpe_folder(template=template))).encode("hello")
    assert ids[-2:].tolist().count(1) == 1
    assert ids[-1] == 1


def test_folder_tokenizer_without_end_token(bpe_folder):
    tokenizer = load_tokenizer(str(bpe_folder(end=None, template="$A")))
    assert tokenizer.end_id is None
    assert tokenizer.decode(tokenizer.encode("hello there")) == "hello there"
    assert 1 not in tokenizer.encode("hello there")


def test_folder_tokenizer_saves(bpe_folder, tmp_path):
    tokenizer = load_tokenizer(str(bpe_folder()))
    tokenizer.save(tmp_path / "copy")
    np.testing.assert_array_equal(load_tokenizer(str(tmp_path / "copy")).encode("hello"), tokenizer.encode("hello"))


def test_missing_folder_is_refused():
    with pytest.raises(DataError, match=r"tokenizer 'gpt2' is not a folder here.*nothing is downloaded"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize("files", [{}, {"config.json": '{"model_type": "llama"}'}, {"tokenizer.json": '{"a":'}])
def test_folder_without_a_tokenizer_is_refused(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(
        DataError, match=r"holds no tokenizer that can be loaded \(\w+Error: .*save_pretrained"
    ) as caught:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_folder_that_would_load_empty_is_refused(byt5, tmp_path):
    byt5.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(DataError, match=r"\(its vocabulary has fewer than 2 words\)"):
        load_tokenizer(str(tmp_path))


def test_code_in_a_tokenizer_folder_is_not_run(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: pass\n")
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()
