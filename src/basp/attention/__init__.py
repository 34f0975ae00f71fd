"""Attention over a plan: ``attend``, what a layer may ask of it, and the kernels that it calls."""

from basp.attention.attend import attend, row_type
from basp.attention.context import Context
from basp.attention.kernels import KERNELS, Kernel, find_kernel
from basp.attention.spec import AttentionSpec

__all__ = ["KERNELS", "AttentionSpec", "Context", "Kernel", "attend", "find_kernel", "row_type"]
