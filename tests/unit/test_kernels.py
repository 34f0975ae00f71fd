"""Kernels against attention written as plain loops."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from basp.attention import KERNELS, Kernel, find_kernel
from basp.attention.kernels import eager, sdpa
from basp.errors import ModelError


class Case(NamedTuple):
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 7
    keys: int = 7
    dim: int = 8
    value_dim: int = 8
    causal: bool = True


CASES = {
    "causal": Case(),
    "non-causal": Case(causal=False),
    "a batch": Case(batch=3, heads=4, kv_heads=2),
    "grouped": Case(heads=6, kv_heads=2),
    "one kv head": Case(heads=5, kv_heads=1),
    "later queries": Case(queries=3, keys=7),
    "later queries, grouped": Case(batch=2, heads=4, kv_heads=2, queries=3, keys=7),
    "later queries, non-causal": Case(queries=3, keys=7, causal=False),
    "last query": Case(queries=1, keys=7, heads=4, kv_heads=1),
    "one token": Case(queries=1, keys=1),
    "narrow values": Case(dim=12, value_dim=8),
    "wide values, grouped": Case(dim=8, value_dim=12, heads=4, kv_heads=2),
    "narrow values, later queries, grouped": Case(dim=12, value_dim=8, heads=4, kv_heads=2, queries=4, keys=9),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as attend passes them: cut out of one token-first block, so that no dimension is contiguous."""
    generator = torch.Generator().manual_seed(7)

    def one(heads: int, tokens: int, dim: int) -> Tensor:
        x = torch.randn(tokens, case.batch, heads * dim + 5, generator=generator, dtype=torch.float64).to(dtype)
        return x[..., 5:].unflatten(-1, (heads, dim)).permute(1, 2, 0, 3).requires_grad_()

    k, v = (one(case.kv_heads, case.keys, dim) for dim in (case.dim, case.value_dim))
    return one(case.heads, case.queries, case.dim), k, v


def by_loops(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    out = torch.zeros(batch, heads, queries, value_dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv_head = h // (heads // kv_heads)
            for i in range(queries):
                seen = range(keys - queries + i + 1) if causal else range(keys)
                powers = [math.exp(scale * float(q[b, h, i] @ k[b, kv_head, j])) for j in seen]
                for j, power in zip(seen, powers, strict=True):
                    out[b, h, i] += power / math.fsum(powers) * v[b, kv_head, j]
    return out


@each_kernel
@each_case
def test_equals_plain_loops(case: Case, kernel: Kernel) -> None:
    q, k, v = (x.detach() for x in inputs(case))
    for scale in (case.dim**-0.5, 0.3):
        expected = by_loops(q, k, v, causal=case.causal, scale=scale)
        torch.testing.assert_close(kernel(q, k, v, causal=case.causal, scale=scale), expected, rtol=0, atol=1e-13)


@each_case
def test_gradients_of_sdpa_equal_those_of_eager(case: Case) -> None:
    results = []
    for kernel in (eager, sdpa):
        q, k, v = inputs(case)
        out = kernel(q, k, v, causal=case.causal, scale=0.3)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append((out, *torch.autograd.grad((out * weights).sum(), (q, k, v))))
    for of_eager, of_sdpa in zip(*results, strict=True):
        torch.testing.assert_close(of_sdpa, of_eager, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"])
@each_kernel
@each_case
def test_other_types_stay_close_and_keep_their_type(
    case: Case, kernel: Kernel, dtype: torch.dtype, tolerance: float
) -> None:
    q, k, v = (x.detach() for x in inputs(case, dtype))
    out = kernel(q, k, v, causal=case.causal, scale=0.3)
    assert out.dtype is dtype
    expected = eager(q.double(), k.double(), v.double(), causal=case.causal, scale=0.3)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@each_kernel
def test_a_query_reads_nothing_that_comes_after_it(kernel: Kernel) -> None:
    q, k, v = (x.detach() for x in inputs(Case(heads=4, kv_heads=2, queries=3, keys=7)))
    out = kernel(q, k, v, causal=True, scale=0.3)
    k, v = k.clone(), v.clone()
    k[:, :, 6], v[:, :, 6] = 100.0, 100.0
    changed = kernel(q, k, v, causal=True, scale=0.3) != out
    assert changed.flatten(0, 1).any(dim=0).any(dim=-1).tolist() == [False, False, True]


def test_kernels_are_found_by_name() -> None:
    assert [find_kernel(name) for name in KERNELS] == list(KERNELS.values())
    assert find_kernel("auto") is sdpa
    assert find_kernel("eager") is eager


def test_an_unknown_kernel_names_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"kernel 'sdpaa'.*'auto', 'eager', 'sdpa'.*did you mean 'sdpa'\?"):
        find_kernel("sdpaa")
    with pytest.raises(ModelError, match=r"kernel 'flash'.*choose one of these"):
        find_kernel("flash")
    with pytest.raises(ModelError, match=r"kernel 'Auto'.*did you mean 'auto'\?"):
        find_kernel("Auto")
