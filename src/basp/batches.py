"""What users hand over as a batch, as what it is: token ids and shifted targets of each sequence.

Lists of sequences are checked; what a collator made, padded or packed, is taken apart into them. Shape letters: B rows,
T columns. No torch here: tensors are read through numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from basp.errors import BatchError
from basp.plans import Ints

Sequences = Sequence[Any]
"""Token ids of each sequence, 1-D: lists, numpy arrays or tensors."""

Batch = Sequences | Mapping[str, Any]
"""Sequences, or what a collator makes of them: ``split_batch`` says what it may hold."""

IGNORED = -100
"""Label of a token that has no loss, as in transformers and torch."""

_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids", "cu_seq_lens_q")
_DERIVED = ("cu_seq_lens_k", "max_length_q", "max_length_k")
"""Given beside ``cu_seq_lens_q`` by packing collators, and nothing that it does not say."""


def split_batch(batch: Mapping[str, Any]) -> tuple[list[Ints], list[Ints] | None]:
    """Token ids and, if there are any, labels of each sequence of a collated batch.

    Args:
        batch: ``input_ids`` [B, T] (or [T]) with, as far as they apply, ``labels`` alike; ``attention_mask`` [B, T], 0
            where a row is padded on the left or the right; ``position_ids`` [B, T] that start again from 0 where
            another sequence begins; ``cu_seq_lens_q`` [sequences + 1], the borders in a single packed row.

    Returns:
        Sequences, row by row, and their labels (aligned, not shifted).

    Raises:
        BatchError: an unknown key, shapes that do not fit, holes in a mask, positions that are no count from 0.
    """
    unknown = [key for key in batch if key not in (*_KNOWN, *_DERIVED) and batch[key] is not None]
    if unknown or batch.get("input_ids") is None:
        raise BatchError(
            f"a batch with {', '.join(map(repr, unknown or batch)) or 'nothing'}",
            allowed=f"'input_ids' and any of {', '.join(map(repr, _KNOWN[1:]))}",
            remedy="drop what the model does not need, or pass a plain list of sequences",
        )
    ids = _rows(batch["input_ids"], "input_ids")
    labels = _alike(batch, "labels", ids)
    starts = _starts(batch, ids)
    real = _alike(batch, "attention_mask", ids)
    kept = np.ones(ids.shape, dtype=bool) if real is None else _unpadded(real)
    sequences: list[Ints] = []
    own_labels: list[Ints] = []
    for row in range(len(ids)):
        borders = [*np.flatnonzero(starts[row]).tolist(), ids.shape[1]]
        for start, stop in pairwise(borders):
            chosen = kept[row, start:stop]
            if chosen.any():
                sequences.append(ids[row, start:stop][chosen])
                if labels is not None:
                    own_labels.append(labels[row, start:stop][chosen])
    return sequences, None if labels is None else own_labels


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _rows(value: Any, name: str) -> NDArray[Any]:
    array = _array(value)
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2 or array.dtype.kind not in "iub":
        raise BatchError(
            f"{name} of shape {array.shape} and type {array.dtype}",
            allowed="integers [B, T]",
            remedy="a mask that is more than padding cannot be honoured: pass a plain list of sequences",
        )
    return array.astype(np.int64)


def _alike(batch: Mapping[str, Any], name: str, ids: NDArray[Any]) -> NDArray[Any] | None:
    if batch.get(name) is None:
        return None
    rows = _rows(batch[name], name)
    if rows.shape != ids.shape:
        raise BatchError(
            f"{name} of shape {rows.shape} beside input_ids of shape {ids.shape}",
            allowed="the same shape",
            remedy="collate both alike",
        )
    return rows


def _unpadded(mask: NDArray[Any]) -> NDArray[np.bool_]:
    """[B, T] the tokens that are no padding; each row has them in one stretch."""
    kept = mask != 0
    stretches = (np.diff(kept, axis=1, prepend=False) & kept).sum(axis=1)
    if (stretches > 1).any():
        raise BatchError(
            f"an attention_mask with holes in row {int(np.argmax(stretches > 1))}",
            allowed="0 at the left or the right end of a row only",
            remedy="pass packed documents by position_ids or cu_seq_lens_q, or as a plain list",
        )
    return kept


def _starts(batch: Mapping[str, Any], ids: NDArray[Any]) -> NDArray[np.bool_]:
    """[B, T] whether a sequence begins there; the first column always does."""
    starts = np.zeros(ids.shape, dtype=bool)
    starts[:, 0] = True
    borders = batch.get("cu_seq_lens_q")
    if borders is not None:
        cuts = _rows(borders, "cu_seq_lens_q")[0]
        if len(ids) != 1 or cuts[0] != 0 or cuts[-1] != ids.shape[1] or (np.diff(cuts) < 1).any():
            raise BatchError(
                f"cu_seq_lens_q {cuts.tolist()[:8]} for input_ids of shape {ids.shape}",
                allowed="rising from 0 to the number of tokens, for a single row",
                remedy="flatten the batch into one row",
            )
        starts[0, cuts[:-1]] = True
    positions = _alike(batch, "position_ids", ids)
    if positions is not None:
        mask = _alike(batch, "attention_mask", ids)
        counted = np.ones(ids.shape, dtype=bool) if mask is None else mask != 0
        begins = counted & ((positions == 0) | (np.diff(counted, axis=1, prepend=False) & counted))
        follows = np.diff(positions, axis=1, prepend=0) == 1
        if ((begins & (positions != 0)) | (counted & ~begins & ~follows)).any():
            raise BatchError(
                "position_ids that do not count up from 0 in each sequence",
                allowed="0, 1, 2, ... from the first token of each sequence",
                remedy="leave position_ids out: basp makes them",
            )
        starts |= begins
    return starts


def read_batches(
    micro_batches: Sequence[Batch], labels: Sequence[Sequences] | None
) -> tuple[list[list[Ints]], list[list[Ints]]]:
    """Token ids and shifted targets of each sequence of each micro-batch.

    Args:
        micro_batches: each a list of sequences, or a mapping as ``split_batch`` takes it.
        labels: for each micro-batch each sequence's labels, aligned; the token ids by default.

    Raises:
        BatchError: no micro-batch, an empty one, an empty sequence, labels that do not fit, ids below 0.
    """
    _check_list(micro_batches, "micro-batches")
    if len(micro_batches) == 0:
        raise BatchError("a step of 0 micro-batches", allowed="1 or more", remedy="skip the step on every rank")
    if labels is not None and len(labels) != len(micro_batches):
        raise BatchError(
            f"labels of {len(labels)} micro-batches for {len(micro_batches)}",
            allowed="one entry for each micro-batch",
            remedy="pass labels=None to train on the token ids themselves",
        )
    ids: list[list[Ints]] = []
    targets: list[list[Ints]] = []
    for number, batch in enumerate(micro_batches):
        where = f"micro-batch {number}, " if len(micro_batches) > 1 else ""
        own_labels = None if labels is None else labels[number]
        if isinstance(batch, Mapping):
            batch, own_labels = _split(batch, own_labels)
        _check_list(batch, f"{where}a batch")
        if len(batch) == 0:
            raise BatchError(f"{where}0 sequences", allowed="1 or more", remedy="skip empty batches on every rank")
        ids.append([_ids(sequence, f"{where}sequence {i}") for i, sequence in enumerate(batch)])
        targets.append(_targets(ids[-1], own_labels, where))
    return ids, targets


def _split(batch: Mapping[str, Any], labels: Sequences | None) -> tuple[Any, Any]:
    if labels is not None:
        raise BatchError(
            "labels beside a collated batch", allowed="labels within the batch", remedy='put them under "labels"'
        )
    return split_batch(batch)


def _check_list(value: Any, what: str) -> None:
    if isinstance(value, str | bytes) or not hasattr(value, "__len__") or getattr(value, "shape", None) == ():
        raise BatchError(
            f"{what} of type {type(value).__name__}",
            allowed="a list of sequences of token ids (shard_steps: a list of such lists)",
            remedy="pass sp.shard([ids, ids, ...])",
        )


def _ids(sequence: Any, where: str, *, lowest: tuple[int, ...] = ()) -> Ints:
    try:
        array = _array(sequence)
    except (ValueError, TypeError):  # a ragged list
        array = np.empty((0,), dtype=object)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise BatchError(
            f"{where} of shape {array.shape} and type {array.dtype}",
            allowed="a 1-D list, array or tensor of at least 1 integer",
            remedy="pass a list of sequences without padding, one entry for each; drop empty documents",
        )
    array = array.astype(np.int64)
    bad = np.flatnonzero((array < 0) & ~np.isin(array, lowest))
    if bad.size:
        raise BatchError(
            f"{where} has {array[bad[0]]} at position {bad[0]}",
            allowed=f"integers from 0{' or ' + str(lowest[0]) if lowest else ''}",
            remedy="check the tokenizer's output" if not lowest else "mark tokens without a loss by -100",
        )
    return array


def _targets(ids: list[Ints], labels: Sequences | None, where: str) -> list[Ints]:
    """Labels shifted within each sequence, before anything is cut: no label is lost at a shard's border."""
    if labels is not None and len(labels) != len(ids):
        raise BatchError(
            f"{where}labels of {len(labels)} sequences for {len(ids)}",
            allowed="labels for each sequence",
            remedy="pass labels=None to train on the token ids themselves",
        )
    targets: list[Ints] = []
    for number, sequence in enumerate(ids):
        own = sequence
        if labels is not None:
            own = _ids(labels[number], f"{where}labels of sequence {number}", lowest=(IGNORED,))
        if len(own) != len(sequence):
            raise BatchError(
                f"{where}sequence {number} has {len(sequence)} tokens and {len(own)} labels",
                allowed="as many labels as tokens, aligned and not shifted",
                remedy="pass labels as transformers takes them: basp shifts them",
            )
        targets.append(np.append(own[1:], IGNORED))
    return targets
