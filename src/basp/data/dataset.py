"""The sequences that a run trains or evaluates on: a store and the spans cut from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from basp.data.sampling import Span
from basp.data.store import TokenStore


@dataclass(frozen=True, eq=False)
class Dataset:
    """Sequences in a fixed order; ``len(dataset)`` of them."""

    store: TokenStore
    spans: NDArray[np.int64]
    """One Span per row, int64 [S, 3], as ``cut_documents`` returns."""

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, int64 [S]."""
        return self.spans[:, 2] - self.spans[:, 1]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences; the one that two pieces of a split document share counts in both."""
        return int(self.lengths.sum())

    def span(self, index: int) -> Span:
        """Where sequence ``index`` comes from; IndexError if there is none."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return Span(*self.spans[index].tolist())

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Token ids of one sequence, int64 [T]."""
        return self.store.read(*self.span(index))

    def describe(self, index: int) -> str:
        """A sequence's place for messages: "json/decoder.py[0:4096]"."""
        span = self.span(index)
        return f"{self.store.name(span.document)}[{span.start}:{span.stop}]"
