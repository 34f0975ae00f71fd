"""The models' own casts to float32, removed for float64 runs.

Stock models compute norms, rotary angles, softmax and router logits in float32 whatever their weights are, which ends
float64 parity at 1e-7. Here a float64 tensor that is asked to become float32 stays as it is, and nothing else changes.
The methods themselves are replaced, not a torch function mode: they are then the same in backward and in the
recomputation of gradient checkpointing, wherever it is entered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FLOAT32_NAMES = ("torch.FloatTensor", "torch.cuda.FloatTensor")


@contextmanager
def keep_float64() -> Iterator[None]:
    """Within it, float64 tensors stay float64 when they are asked to become float32."""
    patches = [
        (torch.Tensor, "to", _to),
        (torch.Tensor, "float", _float),
        (torch.Tensor, "type", _type),
        (F, "softmax", _with_dtype),
        (F, "log_softmax", _with_dtype),
        (torch, "softmax", _with_dtype),
        (torch, "log_softmax", _with_dtype),
        (torch.Tensor, "softmax", _with_dtype),
        (torch.Tensor, "log_softmax", _with_dtype),
    ]
    before = [(owner, name, name in vars(owner), getattr(owner, name)) for owner, name, _ in patches]
    try:
        for (owner, name, wrap), (*_, original) in zip(patches, before, strict=True):
            setattr(owner, name, wrap(original))
        yield
    finally:
        for owner, name, own, original in before:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)  # it was inherited


def _to(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype is not torch.float64:
            return original(self, *args, **kwargs)
        kept = [torch.float64 if arg is torch.float32 else arg for arg in args]
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float32:
            kept[:1] = [args[0].device, torch.float64]
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return original(self, *kept, **kwargs)

    return to


def _float(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def float(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.dtype is torch.float64 else original(self, *args, **kwargs)

    return float


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is torch.float64 and (dtype is torch.float32 or dtype in _FLOAT32_NAMES):
            return self
        return original(self, dtype, *args, **kwargs)

    return type


def _with_dtype(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def normalise(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.dtype is torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return original(input, *args, **kwargs)

    return normalise
