"""What one layer wants of attention, beside its queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention over one sequence, as a layer asks for it.

    Attributes:
        scale: multiplies q k^T.
        causal: a query sees only keys at and before its position.
        window: keys that a query sees, its own among them: positions above ``query - window`` (transformers'
            sliding_window). None sees all.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma2). None leaves them.
        sinks: [H] a score for each query head that takes part in the softmax and has no value (gpt-oss). None has none.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def for_heads(self, start: int, stop: int) -> AttentionSpec:
        """The same for query heads ``start:stop`` only."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[start:stop])

    def wishes(self) -> dict[str, str]:
        """What goes beyond plain causal attention: the ability that a kernel needs for it, and the wish in words."""
        said = {
            "window": (self.window is not None, f"a sliding window of {self.window}"),
            "softcap": (self.softcap is not None, f"a soft cap of {self.softcap} on scores"),
            "sinks": (self.sinks is not None, "attention sinks"),
            "non_causal": (not self.causal, "non-causal attention"),
        }
        return {ability: wish for ability, (wanted, wish) in said.items() if wanted}
