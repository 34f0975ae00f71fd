"""Collated batches become the sequences that they were made of."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import basp
from basp.batches import split_batch
from basp.errors import BatchError

SEQUENCES = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
LABELS = [[5, -100, 7], [8], [-100, 10, 11, 12, -100]]


def joined(parts: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def padded(side: str) -> dict[str, torch.Tensor]:
    """Rows of 6 tokens; the padding id 0 may stand in a document as well, so only the mask tells."""

    def row(values: list[int], fill: int) -> list[int]:
        pad = [fill] * (6 - len(values))
        return pad + values if side == "left" else values + pad

    return {
        "input_ids": torch.tensor([row(sequence, 0) for sequence in SEQUENCES]),
        "labels": torch.tensor([row(labels, -100) for labels in LABELS]),
        "attention_mask": torch.tensor([row([1] * len(sequence), 0) for sequence in SEQUENCES]),
    }


def packed() -> dict[str, Any]:
    return {
        "input_ids": torch.tensor([joined(SEQUENCES)]),
        "labels": torch.tensor([joined(LABELS)]),
    }


def as_lists(parts: list[np.ndarray] | None) -> list[list[int]] | None:
    return None if parts is None else [part.tolist() for part in parts]


FORMS: dict[str, dict[str, Any]] = {
    "kf19 padded on the left": padded("left"),
    "kf19 padded on the right": padded("right"),
    "kf13 packed by positions": packed() | {"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4]])},
    "packed by borders": packed() | {"cu_seq_lens_q": torch.tensor([0, 3, 4, 9], dtype=torch.int32), "max_length_q": 5},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_list_of_sequences(form: str) -> None:
    sequences, labels = split_batch(FORMS[form])
    assert as_lists(sequences) == SEQUENCES
    assert as_lists(labels) == LABELS
    assert as_lists(split_batch({**FORMS[form], "labels": None})[1]) is None


@settings(deadline=None, derandomize=True, database=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
def test_padding_and_packing_are_undone(sequences: list[list[int]], left: bool) -> None:
    longest = max(map(len, sequences))
    pads = [[0] * (longest - len(sequence)) for sequence in sequences]
    pairs = list(zip(sequences, pads, strict=True))
    rows = [pad + sequence if left else sequence + pad for sequence, pad in pairs]
    ones = [[1] * len(sequence) for sequence in sequences]
    mask = [pad + one if left else one + pad for one, pad in zip(ones, pads, strict=True)]
    assert as_lists(split_batch({"input_ids": rows, "attention_mask": mask})[0]) == sequences
    positions = [list(range(len(sequence))) for sequence in sequences]
    assert as_lists(split_batch({"input_ids": joined(sequences), "position_ids": joined(positions)})[0]) == sequences


def test_transformers_own_collators() -> None:
    flattened = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [{"input_ids": sequence} for sequence in SEQUENCES]
    )
    assert as_lists(split_batch(flattened)[0]) == SEQUENCES


def test_kf19_the_loss_of_a_padded_batch_is_that_of_its_sequences() -> None:
    sp = basp.SequenceParallel()
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = basp.prepare(transformers.LlamaForCausalLM(config), sp)
    right = sp.loss(model, sp.shard(SEQUENCES, LABELS))
    for form in FORMS.values():
        assert torch.equal(sp.loss(model, sp.shard(form)), right)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"attention_mask": [[1]]}, "'input_ids'"),
    "a key that nobody reads": ({"input_ids": [[1]], "pixel_values": [[1]]}, "'pixel_values'"),
    "holes": ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "holes in row 0"),
    "a mask of four dimensions": (
        {"input_ids": [[1]], "attention_mask": [[[[1]]]]},
        "attention_mask of shape (1, 1, 1",
    ),
    "labels of another shape": ({"input_ids": [[1, 2]], "labels": [[1]]}, "labels of shape (1, 1)"),
    "positions that jump": ({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 5]]}, "count up from 0"),
    "positions that start late": ({"input_ids": [[1, 2]], "position_ids": [[3, 4]]}, "count up from 0"),
    "borders that end early": ({"input_ids": [[1, 2]], "cu_seq_lens_q": [0, 1]}, "cu_seq_lens_q [0, 1]"),
    "borders for two rows": ({"input_ids": [[1], [2]], "cu_seq_lens_q": [0, 1]}, "cu_seq_lens_q [0, 1]"),
    "fractions": ({"input_ids": [[0.5]]}, "type float64"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_batch_of_sequences_is_refused(case: str) -> None:
    batch, words = BAD[case]
    with pytest.raises(BatchError) as refused:
        split_batch(batch)
    for part in (words, "Allowed: ", "To do: "):
        assert part in str(refused.value)


def test_labels_stand_in_the_batch_or_beside_it_but_not_both() -> None:
    with pytest.raises(BatchError, match="labels beside a collated batch"):
        basp.SequenceParallel().shard(padded("left"), LABELS)
    with pytest.raises(BatchError, match="0 sequences"):
        basp.SequenceParallel().shard({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]})
