"""Attention over a plan: ``attend`` and the kernels that it calls."""

from basp.attention.attend import attend
from basp.attention.context import Context
from basp.attention.kernels import KERNELS, Kernel, find_kernel

__all__ = ["KERNELS", "Context", "Kernel", "attend", "find_kernel"]
