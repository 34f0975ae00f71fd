"""What a kernel is, and how it declares what it can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from basp.attention.spec import AttentionSpec


class Kernel(Protocol):
    """Attention of whole heads on one device, as the package's docstring says."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Compute softmax(q k^T x scale, as ``spec`` has it) v."""
        ...


@dataclass(frozen=True)
class Abilities:
    """What a kernel honours, of a layer's wishes and of the tensors that it is given.

    Attributes:
        window: a sliding window.
        softcap: a soft cap on scores.
        sinks: attention sinks, with a gradient.
        non_causal: queries that see later keys.
        head_dims: least and largest D and Dv.
        dim_multiple: that D has to be one of.
        wide_values: whether values may have a larger dim than keys.
        types: for each type of device that it runs on, the types of q, k and v there; None takes any.
        backward: types of device where it has a backward; None has it wherever it runs.
    """

    window: bool = True
    softcap: bool = True
    sinks: bool = True
    non_causal: bool = True
    head_dims: tuple[int, int] | None = None
    dim_multiple: int = 1
    wide_values: bool = True
    types: Mapping[str, tuple[torch.dtype, ...] | None] | None = None
    backward: tuple[str, ...] | None = None

    def lacks(self, q: Tensor, v: Tensor, spec: AttentionSpec, *, backward: bool) -> list[str]:
        """What of a call it cannot do, in words; nothing if it can.

        Args:
            q: [B, H, Tq, D].
            v: [B, K, Tk, Dv].
            spec: the layer's wishes.
            backward: whether gradients are wanted.
        """
        device, dim, value_dim = q.device.type, q.shape[-1], v.shape[-1]
        least, largest = self.head_dims or (1, max(dim, value_dim))
        dims = not least <= dim <= largest or dim % self.dim_multiple or (value_dim > dim and not self.wide_values)
        taken = {device: None} if self.types is None else self.types
        types = taken.get(device)
        said = {
            **{wish: not getattr(self, ability) for ability, wish in spec.wishes().items()},
            f"heads of dim {dim} with values of dim {value_dim}": bool(dims),
            f"tensors on {device}": device not in taken,
            f"{str(q.dtype).removeprefix('torch.')} on {device}": types is not None and q.dtype not in types,
            f"a backward on {device}": backward and self.backward is not None and device not in self.backward,
        }
        return [wish for wish, lacking in said.items() if lacking]
