"""The flash kernels: what they ask of flash-attn, by stand-ins that compute it as its documentation says.

The real ones need a GPU: where there is one, ``test_kernels.py`` runs them.
"""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from basp.attention import KERNELS, AttentionSpec, find_kernel
from basp.attention.kernels import flash
from basp.attention.kernels.eager import eager
from basp.errors import ModelError


def documented(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int | None, right: int | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """[B, T, H, D] -> out, and scores [B, H, Tq, Tk] without keys that are not seen."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
    for i in range(q.shape[1]):
        place = i + k.shape[1] - q.shape[1]
        for j in range(k.shape[1]):
            unseen = (causal and j > place) or (left is not None and j < place - left)
            if unseen or (right is not None and j > place + right):
                scores[:, :, i, j] = float("-inf")
    return v.repeat_interleave(group, 2), scores


def output(v: Tensor, scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., : v.shape[1]], v)


def flash_2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0) -> Tensor:
    assert dropout_p == 0
    left, right = (None if side < 0 else side for side in window_size)
    return output(*documented(q, k, v, softmax_scale, causal, left, right, softcap))


def flash_3(q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), softcap=0.0) -> Any:
    assert q.shape[-1] % 8 == 0
    out = flash_2(q, k, v, 0.0, softmax_scale, causal, window_size, softcap)
    return out, out.sum(-1)  # as versions did before July 2025


def flash_4(
    q, k, v, *, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0
) -> Any:
    assert q.shape[-1] % 8 == 0
    assert all(side is None or side >= 0 for side in window_size)
    return output(*documented(q, k, v, softmax_scale, causal, *window_size, softcap), learnable_sink), None


STAND_INS = {"flash2": ("flash_attn", flash_2), "flash3": ("flash_attn_interface", flash_3)}
STAND_INS |= {"flash4": ("flash_attn.cute", flash_4)}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, function = STAND_INS[name]
    parts = module.split(".")
    for end in range(len(parts)):
        made: Any = ModuleType(".".join(parts[: end + 1]))
        made.flash_attn_func = function
        monkeypatch.setitem(sys.modules, made.__name__, made)


WISHES = {
    "causal": {},
    "non-causal": {"causal": False},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "window beyond all keys": {"window": 50},
    "non-causal window": {"window": 2, "causal": False},
    "soft cap": {"softcap": 0.7},
    "soft cap and window": {"softcap": 0.7, "window": 4},
    "sinks": {"sinks": torch.linspace(-1, 2, 4, dtype=torch.float64)},
    "sinks and window": {"sinks": torch.linspace(-1, 2, 4, dtype=torch.float64), "window": 2},
}


@pytest.mark.parametrize("dims", [(8, 8), (16, 8)], ids=["equal dims", "narrow values"])
@pytest.mark.parametrize("lengths", [(7, 7), (3, 7), (1, 7), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("name", "wish"),
    [(name, wish) for name in STAND_INS for wish in WISHES if "sinks" not in wish or KERNELS[name].abilities.sinks],
)
def test_what_is_asked_of_them_is_attention_as_the_layer_wants_it(
    name: str, wish: str, lengths: tuple[int, int], dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, name)
    queries, keys = lengths
    spec = AttentionSpec(0.3, **WISHES[wish])
    q, k, v = (
        torch.randn(tokens, 2, heads, dim, dtype=torch.float64).permute(1, 2, 0, 3).requires_grad_()
        for tokens, heads, dim in ((queries, 4, dims[0]), (keys, 2, dims[0]), (keys, 2, dims[1]))
    )
    got, want = KERNELS[name].run(q, k, v, spec), eager(q, k, v, spec)
    torch.testing.assert_close(got, want, atol=1e-13, rtol=0)
    for ours, right in zip(*(torch.autograd.grad(out.cos().sum(), (q, k, v)) for out in (got, want)), strict=True):
        torch.testing.assert_close(ours, right, atol=1e-13, rtol=0)


# ---- what they declare ---------------------------------------------------------------------------------------------


def lacks(
    name: str, *, dtype: torch.dtype = torch.bfloat16, dims: tuple[int, int] = (64, 64), **wishes: Any
) -> list[str]:
    """On a GPU, which only has to be named for that."""
    q, v = (torch.empty(1, 2, 5, dim, dtype=dtype, device="meta") for dim in dims)
    q = type("OnGpu", (), {"device": torch.device("cuda"), "shape": q.shape, "dtype": dtype})()
    return KERNELS[name].abilities.lacks(q, v, AttentionSpec(0.3, **wishes), backward=True)


@pytest.mark.parametrize("name", STAND_INS)
def test_what_they_can_do_on_a_gpu(name: str) -> None:
    assert lacks(name) == []
    assert lacks(name, window=7, softcap=2.0, causal=False) == []
    assert lacks(name, dims=(72, 64)) == []
    assert lacks(name, dtype=torch.float32) == ["float32 on cuda"]
    assert lacks(name, dims=(64, 72)) == ["heads of dim 64 with values of dim 72"]
    assert bool(lacks(name, dims=(192, 128))) == (name == "flash4")
    assert bool(lacks(name, dims=(264, 264)))
    assert bool(lacks(name, dims=(68, 68))) == (name != "flash2")
    assert lacks(name, sinks=torch.zeros(2)) == ([] if name == "flash4" else ["attention sinks"])


@pytest.mark.parametrize("name", STAND_INS)
def test_on_the_cpu_they_are_never_taken(name: str) -> None:
    q = torch.zeros(1, 2, 5, 8, dtype=torch.bfloat16)
    assert KERNELS[name].abilities.lacks(q, q, AttentionSpec(0.3), backward=False) == ["tensors on cpu"]


# ---- whether they are there ----------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Set what is installed and which GPU there is."""

    def have(versions: dict[str, str], major: int | None) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(flash.metadata, "version", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: major is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
        flash.missing.cache_clear()

    yield have
    flash.missing.cache_clear()


ALL = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b36"}


def test_auto_prefers_what_the_machine_has(machine: Any) -> None:
    for versions, major, names in (
        ({}, 9, ("sdpa", "flex", "eager")),
        (ALL, None, ("sdpa", "flex", "eager")),
        (ALL, 8, ("flash2", "sdpa", "flex", "eager")),
        (ALL, 9, ("flash3", "flash4", "flash2", "sdpa", "flex", "eager")),
        (ALL, 10, ("flash4", "flash2", "sdpa", "flex", "eager")),
    ):
        machine(versions, major)
        assert find_kernel("auto").names == names


def test_one_that_is_not_there_is_refused_with_the_reason(machine: Any) -> None:
    for versions, major, why in (
        ({}, 9, "flash-attn-4 is not installed"),
        ({"flash-attn-4": "4.0.0b10"}, 9, "flash-attn-4 is 4.0.0b10, and 4.0.0b26 or newer is needed"),
        (ALL, None, "no CUDA device is visible"),
        (ALL, 8, "the GPU has compute capability 8.x, and flash-attn-4 is for 9.x to 11.x"),
    ):
        machine(versions, major)
        with pytest.raises(ModelError, match=why) as refused:
            find_kernel("flash4")
        assert "kernel 'auto' or " in refused.value.allowed
