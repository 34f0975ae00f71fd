"""Documents to training sequences, and sequences to optimizer steps; pure functions of sizes and a seed.

Nothing here knows the number of ranks: a step is the same list of sequences however they are laid out over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from basp.errors import ConfigError, DataError

_LONG_DOCUMENTS = ("split", "truncate", "refuse")


class Span(NamedTuple):
    """One training sequence: tokens ``start`` to ``stop`` of a document."""

    document: int
    start: int
    stop: int


def cut_documents(
    lengths: NDArray[np.int64],
    *,
    max_length: int,
    long_documents: str,
    documents: NDArray[np.int64] | None = None,
    name: Callable[[int], str] = "document {}".format,
) -> NDArray[np.int64]:
    """Training sequences of at most ``max_length`` tokens: one Span per row, int64 [S, 3], in document order.

    A sequence of T tokens trains T - 1 labels, each token's successor. "split" therefore repeats one token at each
    cut: a piece ends with the token that the next one starts with, which is a label of the first and an input of the
    second. So the pieces' (input, label) pairs are exactly the document's, and no piece has fewer than 2 tokens.
    "truncate" keeps the first ``max_length`` tokens, and "refuse" accepts no longer document. Documents of one token
    have no label and give no sequence.

    Args:
        lengths: tokens of each document of the store, int64 [documents].
        max_length: at least 2.
        long_documents: "split", "truncate" or "refuse".
        documents: indices of the documents to cut, in this order; all of them if None.
        name: a document's name for the message of "refuse".

    Raises:
        ConfigError: ``max_length`` or ``long_documents`` out of range.
        DataError: under "refuse" a document is too long; or no document has 2 tokens.
    """
    if long_documents not in _LONG_DOCUMENTS:
        raise ConfigError(
            f"long_documents = {long_documents!r}",
            allowed=", ".join(f'"{kind}"' for kind in _LONG_DOCUMENTS),
            remedy="choose one of these for data.long_documents",
        )
    if max_length < 2:
        raise ConfigError(
            f"max_length = {max_length}",
            allowed="at least 2 tokens, since a token's label is the next token of its sequence",
            remedy="raise data.max_length",
        )
    chosen = np.arange(len(lengths)) if documents is None else np.asarray(documents)
    sizes = np.asarray(lengths, dtype=np.int64)[chosen]
    if long_documents == "refuse":
        _refuse_long(chosen, sizes, max_length, name)
    if not np.any(sizes >= 2):
        raise DataError(
            f"none of {len(sizes)} documents has 2 tokens",
            allowed="at least one document with a token and its successor",
            remedy="check the source and the tokenizer, or hold out fewer documents for evaluation",
        )
    # Each piece starts max_length - 1 after the one before and covers that many labels; the last takes the rest.
    stride = max_length - 1
    pieces = -(-(sizes - 1) // stride) if long_documents == "split" else np.minimum(sizes - 1, 1)
    pieces = np.maximum(pieces, 0)
    owner = np.repeat(np.arange(len(sizes)), pieces)
    piece = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = piece * stride
    return np.stack([chosen[owner], start, np.minimum(start + max_length, sizes[owner])], axis=1).astype(np.int64)


def _refuse_long(
    chosen: NDArray[np.int64], sizes: NDArray[np.int64], max_length: int, name: Callable[[int], str]
) -> None:
    too_long = np.flatnonzero(sizes > max_length)
    if len(too_long):
        others = f" (and {len(too_long) - 1} more are too long)" if len(too_long) > 1 else ""
        raise DataError(
            f"{name(int(chosen[too_long[0]]))} has {sizes[too_long[0]]} tokens{others}",
            allowed=f'at most max_length = {max_length} tokens when long_documents is "refuse"',
            remedy=f'raise data.max_length to {sizes.max()}, or set data.long_documents to "split" or "truncate"',
        )


def split_eval(documents: int, *, fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents to train on and documents to hold out: two sorted arrays of indices which share none.

    About ``fraction`` of the documents are held out, and at least one on each side if ``fraction`` is above 0. The
    choice depends on ``documents``, ``fraction`` and ``seed`` only.

    Raises:
        ConfigError: ``fraction`` outside [0, 1) or a negative seed.
        DataError: something is to be held out of fewer than 2 documents.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(
            f"eval_fraction = {fraction}",
            allowed="0 (no evaluation) up to, but not including, 1",
            remedy="set log.eval_fraction to the share of documents to hold out, such as 0.05",
        )
    _check_seed(seed)
    if fraction == 0:
        return np.arange(documents), np.arange(0)
    if documents < 2:
        raise DataError(
            f"eval_fraction = {fraction} of {documents} document{'s' * (documents != 1)}",
            allowed="at least 2 documents, one to train on and one to evaluate on",
            remedy="add documents, cut the one into several, or set log.eval_fraction to 0",
        )
    held_out = min(max(round(fraction * documents), 1), documents - 1)
    # Three words, so that no epoch's order (seed, epoch) is drawn from the same stream.
    order = np.random.default_rng((seed, 0, 1)).permutation(documents)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


@dataclass(frozen=True)
class Batches:
    """Which sequences each optimizer step trains on: a pure function of the step's index, so a run resumes anywhere.

    Every epoch holds every sequence exactly once. Its last step may have fewer or smaller micro-batches than the
    others, never an empty one, and no step reaches over the end of an epoch.

    Raises:
        ConfigError: a size below 1 or a negative seed.
    """

    spans: int
    """Sequences in the dataset."""
    sequences: int
    """Sequences per micro-batch, over all ranks together."""
    accumulation: int
    """Micro-batches per optimizer step."""
    shuffle: bool
    """A new order each epoch, drawn from (seed, epoch); otherwise the dataset's order."""
    seed: int
    _order: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_seed(self.seed)
        for name in ("spans", "sequences", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}",
                    allowed="at least 1",
                    remedy="give the run documents" if name == "spans" else f"raise batch.{name}",
                )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data; the same on any number of ranks."""
        return -(-self.spans // (self.sequences * self.accumulation))

    def step(self, index: int) -> list[list[int]]:
        """The micro-batches of optimizer step ``index`` (from 0, over all epochs), each a list of sequence indices."""
        if index < 0:
            raise IndexError(f"step {index}; steps count from 0")
        epoch, place = divmod(index, self.steps_per_epoch)
        size = self.sequences * self.accumulation
        chosen = self._epoch_order(epoch)[place * size : (place + 1) * size].tolist()
        return [chosen[start : start + self.sequences] for start in range(0, len(chosen), self.sequences)]

    def epoch_after(self, steps: int) -> float:
        """Passes over the data after ``steps`` optimizer steps, counted in sequences: 1.5 is one pass and a half."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs + rest * self.sequences * self.accumulation / self.spans

    def steps_for(self, epochs: float) -> int:
        """The fewest optimizer steps after which ``epochs`` passes are complete.

        Raises:
            ConfigError: ``epochs`` is not a number above 0.
        """
        if not (epochs > 0 and math.isfinite(epochs)):
            raise ConfigError(
                f"epochs = {epochs}",
                allowed="a number of passes above 0, such as 1 or 0.5",
                remedy="correct optim.epochs, or give optim.steps instead",
            )
        # In fractions of what was written (0.3 is 3/10): rounding up a float such as 3.0000000000000004 adds a step.
        whole, rest = divmod(Fraction(str(epochs)), 1)
        return whole * self.steps_per_epoch + math.ceil(rest * self.spans / (self.sequences * self.accumulation))

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Sequence indices in the order of ``epoch``, int64 [spans]; the last one drawn is kept."""
        if not self.shuffle:
            return np.arange(self.spans)
        order = self._order.get(epoch)
        if order is None:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.spans)
            self._order.clear()
            self._order[epoch] = order
        return order


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise ConfigError(f"seed = {seed}", allowed="0 or a positive integer", remedy="choose another seed")
