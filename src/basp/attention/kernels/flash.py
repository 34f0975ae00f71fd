"""flash-attn 2, 3 and 4, where they are installed: fused kernels for half precision on CUDA.

All three take [B, T, H, D], read kv heads by groups, and have the last query see every key, as ours do. A window is
(left, right) in keys beside the query's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from basp.attention.kernels.declare import Abilities
from basp.attention.spec import AttentionSpec

_HALF = {"cuda": (torch.float16, torch.bfloat16)}
# Where sinks are missing, a backward ignores the logsumexp's gradient: scaling the output by it would train them wrong.
FLASH_2 = Abilities(sinks=False, head_dims=(1, 256), wide_values=False, types=_HALF)
FLASH_3 = Abilities(sinks=False, head_dims=(8, 256), dim_multiple=8, wide_values=False, types=_HALF)
FLASH_4 = Abilities(head_dims=(8, 128), dim_multiple=8, wide_values=False, types=_HALF)


def flash2(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """flash-attn 2."""
    return _call("flash_attn", q, k, v, spec, everything=-1)


def flash3(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """flash-attn 3, for Hopper."""
    return _call("flash_attn_interface", q, k, v, spec, everything=-1)


def flash4(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """flash-attn 4, for Hopper and Blackwell."""
    sinks = {} if spec.sinks is None else {"learnable_sink": spec.sinks}
    return _call("flash_attn.cute", q, k, v, spec, everything=None, **sinks)


def _call(
    module: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, everything: int | None, **more: Any
) -> Tensor:
    """``everything`` is what the package calls an open side of a window."""
    value_dim = v.shape[-1]
    if value_dim < q.shape[-1]:  # they take one dim only: zeros beyond the values' own leave it exact (MLA)
        v = F.pad(v, (0, q.shape[-1] - value_dim))
    # A query sees itself and ``window - 1`` keys before it; without causality it sees all that come after.
    left = everything if spec.window is None else spec.window - 1
    given = import_module(module).flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)),
        softmax_scale=spec.scale,
        causal=spec.causal,
        window_size=(left, 0 if spec.causal and spec.window is not None else everything),
        softcap=spec.softcap or 0.0,
        **more,
    )
    out = given[0] if isinstance(given, tuple) else given  # some versions give the logsumexp as well
    return out.transpose(1, 2)[..., :value_dim]


@dataclass(frozen=True)
class _Package:
    distribution: str
    least: str
    """Version. 2.7.4 runs on every GPU from Ampere on; before 4.0.0b26 a sink had no gradient, and nothing said so."""
    majors: tuple[int, int]
    """First and last major compute capability of a GPU."""


_PACKAGES = {
    "flash2": _Package("flash-attn", "2.7.4", (8, 12)),
    "flash3": _Package("flash-attn-3", "3.0.0b1", (9, 9)),
    "flash4": _Package("flash-attn-4", "4.0.0b26", (9, 11)),
}


@cache
def missing(name: str) -> str | None:
    """Why the kernel of that name cannot run on this machine, in words; None if it can."""
    package = _PACKAGES[name]
    try:
        version = metadata.version(package.distribution)
    except metadata.PackageNotFoundError:
        return f"{package.distribution} is not installed"
    if Version(version) < Version(package.least):
        return f"{package.distribution} is {version}, and {package.least} or newer is needed"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    major = torch.cuda.get_device_capability()[0]
    first, last = package.majors
    if not first <= major <= last:
        return f"the GPU has compute capability {major}.x, and {package.distribution} is for {first}.x to {last}.x"
    return None
