"""Text to token ids: plain bytes without a vocabulary file, or a transformers tokenizer from a local folder.

Both treat a document as text and nothing else: "</s>" or "<|endoftext|>" written inside a document is encoded letter by
letter, never as the control token of that name, so no document can end early or open a chat turn.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from basp.errors import DataError

BYTES = "bytes"
_PAD, _END, _UNKNOWN, _FIRST_BYTE = 0, 1, 2, 3  # the numbering of ByT5


class Tokenizer(Protocol):
    """What the rest of basp asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the largest id + 1."""
        ...

    @property
    def end_id(self) -> int | None:
        """Id that ends a document; None if the tokenizer has no such token."""
        ...

    def encode(self, text: str) -> NDArray[np.int32]:
        """One document's ids, int32 [T]; the last is ``end_id``, once, if there is one."""
        ...

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        """Text of ids [T], without control tokens."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write files that ``AutoTokenizer.from_pretrained(folder)`` reads, beside a model's or alone."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called ``name``: "bytes", or a local folder with a transformers tokenizer.

    Nothing is downloaded and no code from the folder is run.

    Raises:
        DataError: no such folder, or no tokenizer in it.
    """
    return ByteTokenizer() if name == BYTES else FolderTokenizer(name)


class ByteTokenizer:
    """UTF-8 bytes, with ByT5's ids: a byte b is b + 3; 0 pads, 1 ends a document, 2 is unknown (never produced)."""

    vocab_size: int = _FIRST_BYTE + 256
    end_id: int | None = _END

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of the UTF-8 bytes of ``text`` and the end id, int32 [bytes + 1]."""
        data = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        ids = np.empty(len(data) + 1, dtype=np.int32)
        np.add(data, _FIRST_BYTE, out=ids[:-1], dtype=np.int32)
        ids[-1] = _END
        return ids

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        """Text of ids [T]; a character cut in the middle (a piece of a long document) shows as U+FFFD."""
        ids = np.asarray(ids)
        data = ids[(ids >= _FIRST_BYTE) & (ids < self.vocab_size)] - _FIRST_BYTE
        return data.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the same ids as a ``tokenizer.json``.

        Not as a ByT5Tokenizer: beside a config.json of qwen2, AutoTokenizer 5.24 turns that class into an empty
        vocabulary silently, and beside mistral, mixtral, phi3 and olmo2 it refuses. A tokenizer.json loads
        beside every family.
        """
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        control = {"<pad>": _PAD, "</s>": _END, "<unk>": _UNKNOWN}
        letters = {letter: byte + _FIRST_BYTE for byte, letter in enumerate(_byte_letters())}
        backend = Backend(models.BPE(vocab=control | letters, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
        backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", _END)]
        )
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        )
        wrapped.save_pretrained(folder)


class FolderTokenizer:
    """A transformers tokenizer read from a local folder.

    Raises:
        DataError: the folder does not exist, or transformers finds no tokenizer it can load in it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(os.path.expanduser(folder))
        if not path.is_dir():
            raise DataError(
                f"tokenizer {str(folder)!r} is not a folder here",
                allowed=f'"{BYTES}" or a local folder written by save_pretrained (nothing is downloaded)',
                remedy="check the path, or save the tokenizer into a folder first and give that folder",
            )
        self._inner = _load_auto(path)
        self.vocab_size: int = max(self._inner.get_vocab().values()) + 1
        self.end_id: int | None = self._inner.eos_token_id

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of ``text`` with the tokenizer's own begin token, if it adds one, and one end id; int32 [T]."""
        # Truncation and padding may be stored in tokenizer.json; said here so that no default brings them back.
        # verbose=False: a document longer than model_max_length is what basp is for, not something to warn about.
        plain = {"truncation": False, "padding": False, "split_special_tokens": True, "verbose": False}
        ids = np.asarray(self._inner(text, **plain)["input_ids"], dtype=np.int32)
        if self.end_id is None:
            return ids
        stop = len(ids)
        while stop and ids[stop - 1] == self.end_id:  # some templates add it themselves
            stop -= 1
        return np.append(ids[:stop], np.int32(self.end_id))

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        """Text of ids [T], without control tokens and without tidying of spaces."""
        return self._inner.decode(
            np.asarray(ids).tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer's files with ``save_pretrained``."""
        self._inner.save_pretrained(folder)


def _load_auto(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        words = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    except Exception as error:  # the Rust backend raises bare Exception, transformers half a dozen kinds
        reason = str(error).strip().split("\n")[0]
        raise _not_a_tokenizer(folder, f"{type(error).__name__}: {reason}") from error
    # transformers may override the folder's tokenizer class by its model's, and fill that with a default word.
    if len(words) < 2:
        raise _not_a_tokenizer(folder, "its vocabulary has fewer than 2 words")
    return tokenizer


def _not_a_tokenizer(folder: Path, reason: str) -> DataError:
    return DataError(
        f"folder {str(folder)!r} holds no tokenizer that can be loaded ({reason})",
        allowed="a folder written by a tokenizer's save_pretrained that needs no code of its own",
        remedy=f'give another folder, or use tokenizer = "{BYTES}"',
    )


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE files use for each byte, in byte order: itself if printable, else from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]
