"""Kernels against attention written as plain loops."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from basp.attention import KERNELS, AttentionSpec, Kernel, find_kernel
from basp.attention.kernels.eager import eager
from basp.attention.kernels.sdpa import sdpa


class Case(NamedTuple):
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 7
    keys: int = 7
    dim: int = 8
    value_dim: int = 8
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def spec(self, scale: float, sinks: Tensor | None = None) -> AttentionSpec:
        if self.sinks and sinks is None:
            sinks = sinks_of(self)
        return AttentionSpec(scale, self.causal, self.window, self.softcap, sinks)


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
    "window": Case(window=3),
    "window of one": Case(window=1, heads=4),
    "window of all but one key": Case(window=6),
    "window of all keys": Case(window=7),
    "window beyond all keys": Case(window=50),
    "window, one token": Case(queries=1, keys=1, window=1),
    "window, a batch": Case(batch=3, heads=4, window=2),
    "window, later queries": Case(queries=3, window=2),
    "window, later queries, some see all": Case(queries=3, window=6),
    "window, last query": Case(queries=1, heads=4, kv_heads=1, window=4),
    "window of one, last query": Case(queries=1, window=1),
    "window, narrow values": Case(dim=12, value_dim=8, heads=4, window=3, queries=4, keys=9),
    "window, wide values": Case(dim=8, value_dim=12, heads=4, window=3),
    "soft cap": Case(softcap=0.7),
    "soft cap, non-causal": Case(softcap=0.7, causal=False),
    "soft cap, window, later queries": Case(softcap=0.7, window=3, queries=4, heads=4),
    "sinks": Case(sinks=True),
    "sinks, a batch": Case(sinks=True, batch=2, heads=6, kv_heads=3),
    "sinks, window of one": Case(sinks=True, window=1),
    "sinks, window, later queries": Case(sinks=True, window=3, queries=4, keys=9, heads=4, kv_heads=1),
    "everything": Case(sinks=True, softcap=0.7, window=3, queries=4, heads=4, dim=12, value_dim=8),
}
LONG = {  # sdpa computes a window in blocks of max(256, window) queries
    "one block and a query": Case(heads=2, kv_heads=1, queries=257, keys=257, dim=4, value_dim=4, window=3),
    "whole blocks": Case(heads=1, kv_heads=1, queries=512, keys=512, dim=4, value_dim=4, window=256),
    "blocks of the window's own length": Case(
        heads=1, kv_heads=1, queries=700, keys=700, dim=4, value_dim=4, window=300
    ),
    "window of one": Case(heads=1, kv_heads=1, queries=520, keys=520, dim=4, value_dim=4, window=1),
    "later queries": Case(heads=2, kv_heads=1, queries=300, keys=411, dim=4, value_dim=2, window=9),
    "later queries, long window": Case(heads=1, kv_heads=1, queries=300, keys=411, dim=4, value_dim=4, window=290),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
HERE = {name: entry for name, entry in KERNELS.items() if not entry.missing()}
each_kernel = pytest.mark.parametrize("kernel", [entry.run for entry in HERE.values()], ids=list(HERE))


@pytest.mark.parametrize("name", KERNELS)
def test_which_kernels_the_other_tests_run(name: str) -> None:
    if reason := KERNELS[name].missing():
        assert name.startswith("flash")
        pytest.skip(reason)
    assert find_kernel(name).names == (name,)


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as attend passes them: cut out of one token-first block, so that no dimension is contiguous."""
    generator = torch.Generator().manual_seed(7)

    def one(heads: int, tokens: int, dim: int) -> Tensor:
        x = torch.randn(tokens, case.batch, heads * dim + 5, generator=generator, dtype=torch.float64).to(dtype)
        return x[..., 5:].unflatten(-1, (heads, dim)).permute(1, 2, 0, 3).requires_grad_()

    k, v = (one(case.kv_heads, case.keys, dim) for dim in (case.dim, case.value_dim))
    return one(case.heads, case.queries, case.dim), k, v


def sinks_of(case: Case) -> Tensor:
    return torch.linspace(-1, 2, case.heads, dtype=torch.float64)


def skip_unless_able(kernel: Kernel, case: Case, dtype: torch.dtype = torch.float64) -> None:
    (abilities,) = [entry.abilities for entry in KERNELS.values() if entry.run is kernel]
    q, _, v = inputs(case, dtype)
    wishes = abilities.lacks(q, v, case.spec(0.3), backward=False)
    if wishes:
        assert kernel is not eager  # which can do everything
        pytest.skip(f"it cannot do {' and '.join(wishes)}")


def on_gpu(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], AttentionSpec]:
    """What ``inputs`` gives and the spec, on a GPU, all of it with gradients."""
    sinks = sinks_of(case).to("cuda", dtype).requires_grad_() if case.sinks else None
    return [x.detach().cuda().requires_grad_() for x in inputs(case, dtype)], case.spec(0.3, sinks)


def by_loops(q: Tensor, k: Tensor, v: Tensor, *, case: Case, scale: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    out = torch.zeros(batch, heads, queries, value_dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv_head = h // (heads // kv_heads)
            for i in range(queries):
                place = keys - queries + i
                seen = [
                    j
                    for j in range(keys)
                    if (j <= place or not case.causal) and (case.window is None or j > place - case.window)
                ]
                scores = [scale * float(q[b, h, i] @ k[b, kv_head, j]) for j in seen]
                if case.softcap is not None:
                    scores = [case.softcap * math.tanh(score / case.softcap) for score in scores]
                powers = [math.exp(score) for score in scores]
                sink = [math.exp(float(sinks_of(case)[h]))] if case.sinks else []
                total = math.fsum(powers + sink)
                for j, power in zip(seen, powers, strict=True):
                    out[b, h, i] += power / total * v[b, kv_head, j]
    return out


@each_kernel
@each_case
def test_equals_plain_loops(case: Case, kernel: Kernel) -> None:
    skip_unless_able(kernel, case)
    q, k, v = (x.detach() for x in inputs(case))
    for scale in (case.dim**-0.5, 0.3):
        expected = by_loops(q, k, v, case=case, scale=scale)
        torch.testing.assert_close(kernel(q, k, v, case.spec(scale)), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", [LONG["one block and a query"], LONG["later queries"]], ids=["257", "300 of 411"])
@each_kernel
def test_long_windows_equal_plain_loops(case: Case, kernel: Kernel) -> None:
    q, k, v = (x.detach() for x in inputs(case))
    expected = by_loops(q, k, v, case=case, scale=0.3)
    torch.testing.assert_close(kernel(q, k, v, case.spec(0.3)), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", [*CASES.values(), *LONG.values()], ids=[*CASES, *(f"long: {name}" for name in LONG)])
def test_gradients_of_sdpa_equal_those_of_eager(case: Case) -> None:
    skip_unless_able(sdpa, case)
    results = []
    for kernel in (eager, sdpa):
        q, k, v = inputs(case)
        out = kernel(q, k, v, case.spec(0.3))
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append((out, *torch.autograd.grad((out * weights).sum(), (q, k, v))))
    for of_eager, of_sdpa in zip(*results, strict=True):
        torch.testing.assert_close(of_sdpa, of_eager, rtol=0, atol=1e-12)


@each_case
def test_gradients_of_eager_are_its_differences(case: Case) -> None:
    """By finite differences, of the sinks as well."""
    small = case._replace(dim=2, value_dim=2)
    given = [*inputs(small), sinks_of(small).requires_grad_()]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return eager(q, k, v, small.spec(0.3, sinks if small.sinks else None))

    assert torch.autograd.gradcheck(run, given, atol=1e-7, rtol=1e-6)
    if small.sinks:
        (gradient,) = torch.autograd.grad(run(*given).sum(), given[3])
        assert bool(gradient.all())


def test_a_window_costs_keys_in_its_reach_only(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LONG["window of one"]._replace(window=40)
    sizes: list[tuple[int, int]] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def note(q: Tensor, k: Tensor, v: Tensor, **more: object) -> Tensor:
        sizes.append((q.shape[2], k.shape[2]))
        return original(q, k, v, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    sdpa(*inputs(case), case.spec(0.3))
    assert sizes == [(256, 256), (256, 256 + 39), (8, 8 + 39)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"])
@each_kernel
@each_case
def test_other_types_stay_close_and_keep_their_type(
    case: Case, kernel: Kernel, dtype: torch.dtype, tolerance: float
) -> None:
    skip_unless_able(kernel, case, dtype)
    q, k, v = (x.detach() for x in inputs(case, dtype))
    out = kernel(q, k, v, case.spec(0.3))
    assert out.dtype is dtype
    expected = eager(q.double(), k.double(), v.double(), case.spec(0.3))
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@each_kernel
def test_a_query_reads_nothing_that_comes_after_it(kernel: Kernel) -> None:
    q, k, v = (x.detach() for x in inputs(Case(heads=4, kv_heads=2, queries=3, keys=7)))
    out = kernel(q, k, v, AttentionSpec(0.3))
    k, v = k.clone(), v.clone()
    k[:, :, 6], v[:, :, 6] = 100.0, 100.0
    changed = kernel(q, k, v, AttentionSpec(0.3)) != out
    assert changed.flatten(0, 1).any(dim=0).any(dim=-1).tolist() == [False, False, True]


@each_kernel
def test_a_query_reads_nothing_from_before_its_window(kernel: Kernel) -> None:
    case = Case(heads=4, kv_heads=2, queries=3, keys=7, window=3)
    q, k, v = (x.detach() for x in inputs(case))
    out = kernel(q, k, v, case.spec(0.3))
    k, v = k.clone(), v.clone()
    k[:, :, 3], v[:, :, 3] = 100.0, 100.0  # key 3 is the third from query 5, the last that it does not leave behind
    changed = kernel(q, k, v, case.spec(0.3)) != out
    assert changed.flatten(0, 1).any(dim=0).any(dim=-1).tolist() == [True, True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=["f32", "bf16"])
@each_kernel
def test_on_a_gpu_values_and_gradients_are_those_of_eager(kernel: Kernel, dtype: torch.dtype, tolerance: float) -> None:
    (abilities,) = [entry.abilities for entry in KERNELS.values() if entry.run is kernel]
    able = 0
    for case in [*CASES.values(), *LONG.values()]:
        wide = case._replace(dim=16 * case.dim, value_dim=16 * case.value_dim)  # no kernel is for heads of dim 4
        qkv, spec = on_gpu(wide, dtype)
        if abilities.lacks(qkv[0], qkv[2], spec, backward=True):
            continue
        able += 1
        exact = [x.detach().double().requires_grad_() for x in qkv]
        sinks = None if spec.sinks is None else spec.sinks.detach().double().requires_grad_()
        got, want = kernel(*qkv, spec), eager(*exact, wide.spec(0.3, sinks))
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
        weights = torch.linspace(-1, 1, want.numel(), dtype=want.dtype, device="cuda").view(want.shape)
        ours = torch.autograd.grad((got * weights).sum(), [*qkv, *([spec.sinks] if spec.sinks is not None else [])])
        right = torch.autograd.grad((want * weights).sum(), [*exact, *([sinks] if sinks is not None else [])])
        for gradient, expected in zip(ours, right, strict=True):
            torch.testing.assert_close(gradient.double(), expected, atol=tolerance, rtol=tolerance)
    assert able or (abilities.types is not None and dtype not in (abilities.types["cuda"] or ()))
