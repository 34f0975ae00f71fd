"""Local attention kernels behind one signature, and what each can honour.

    kernel(q, k, v, spec) -> out

q [B, H, Tq, D], k [B, K, Tk, D], v [B, K, Tk, Dv], out [B, H, Tq, Dv], any strides; H a multiple of K, query head h
reads kv head h // (H // K). Query i stands at position ``Tk - Tq + i`` of its sequence: the last one sees every key.
"""

from basp.attention.kernels.choose import KERNELS, ChosenKernel, KernelEntry, find_kernel
from basp.attention.kernels.declare import Abilities, Kernel

__all__ = ["KERNELS", "Abilities", "ChosenKernel", "Kernel", "KernelEntry", "find_kernel"]
