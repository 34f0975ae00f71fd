from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from basp.casts import keep_float64
from tests.support.models import FAMILIES, tiny_model

PATCHED = [(torch.Tensor, ("to", "float", "type", "softmax", "log_softmax"))] + [
    (module, ("softmax", "log_softmax")) for module in (F, torch)
]


def doubles(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def error(a: torch.Tensor, b: np.ndarray) -> float:
    assert a.dtype is torch.float64
    return float(np.abs(a.detach().numpy() - b).max() / np.abs(b).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_true_float64(family):
    model = tiny_model(family)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(norms) >= 5
    for norm in norms:
        x, weight = doubles(5, norm.weight.shape[0]), norm.weight.detach().numpy()
        right = weight * x.numpy() / np.sqrt((x.numpy() ** 2).mean(-1, keepdims=True) + norm.variance_epsilon)
        assert error(norm(x), right) > 1e-9  # as shipped it goes through float32
        with keep_float64():
            assert error(norm(x), right) < 1e-15


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_angles_are_true_float64(family):
    rotary = tiny_model(family).model.rotary_emb
    positions = torch.tensor([[0, 1, 7, 100, 511]])
    angles = positions[0].numpy()[:, None] * rotary.inv_freq.numpy()
    right = np.cos(np.concatenate([angles, angles], axis=-1))[None]
    assert error(rotary(doubles(1, 5, 4), positions)[0], right) > 1e-9
    with keep_float64():
        assert error(rotary(doubles(1, 5, 4), positions)[0], right) < 1e-14


@pytest.mark.parametrize(
    "softmax",
    [
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype),
        lambda x: torch.softmax(x, -1, torch.float32).to(x.dtype),
        lambda x: x.softmax(-1, dtype=torch.float32).to(x.dtype),
        lambda x: x.float().softmax(-1).to(x.dtype),
        lambda x: F.log_softmax(x, dim=-1, dtype=torch.float32).to(x.dtype).exp(),
        lambda x: torch.log_softmax(x, -1, torch.float32).to(x.dtype).exp(),
        lambda x: x.log_softmax(-1, dtype=torch.float32).to(x.dtype).exp(),
    ],
)
def test_softmax_is_true_float64(softmax):
    x = doubles(3, 9)
    right = np.exp(x.numpy()) / np.exp(x.numpy()).sum(-1, keepdims=True)
    assert error(softmax(x), right) > 1e-9
    with keep_float64():
        assert error(softmax(x), right) < 1e-15


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(torch.zeros(1)),
        lambda x: x.float(),
        lambda x: x.type(torch.float32),
        lambda x: x.type("torch.FloatTensor"),
        lambda x: x.type(dtype=torch.float32),
    ],
)
def test_every_cast_to_float32_is_removed_and_comes_back(cast):
    x = doubles(3)
    with keep_float64():
        assert cast(x).dtype is torch.float64
        assert torch.equal(cast(x), x)
    assert cast(x).dtype is torch.float32


def test_other_casts_are_untouched():
    x = doubles(3)
    with keep_float64():
        assert x.to(torch.bfloat16).dtype is torch.bfloat16
        assert x.to(torch.int64).dtype is torch.int64
        assert x.type(torch.float16).dtype is torch.float16
        assert x.type() == "torch.DoubleTensor"
        assert x.to("cpu", copy=True) is not x
        assert x.half().dtype is torch.float16
        assert torch.arange(3).float().dtype is torch.float32
        assert torch.arange(3).to(torch.float32).dtype is torch.float32
        assert torch.zeros(3).to(torch.float64).dtype is torch.float64
        assert torch.zeros(3).bfloat16().float().dtype is torch.float32
        assert F.softmax(torch.zeros(3).bfloat16(), dim=-1, dtype=torch.float32).dtype is torch.float32
        assert F.softmax(x, dim=-1, dtype=torch.float16).dtype is torch.float16


def test_everything_is_restored_on_exit_also_after_an_error():
    before = [(vars(owner).get(name), getattr(owner, name)) for owner, names in PATCHED for name in names]
    with keep_float64(), keep_float64():
        assert torch.Tensor.to is not before[0][1]
    with pytest.raises(ZeroDivisionError), keep_float64():
        raise ZeroDivisionError
    assert before == [(vars(owner).get(name), getattr(owner, name)) for owner, names in PATCHED for name in names]
    assert "to" not in vars(torch.Tensor)


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_backward_and_recomputation_are_float64(use_reentrant):
    """Gradient of RMSNorm by hand, also when the forward runs again inside the backward."""
    norm = tiny_model("llama").model.norm
    x, weights = doubles(5, norm.weight.shape[0]).requires_grad_(), doubles(5, norm.weight.shape[0], seed=1)
    with keep_float64():
        y = norm(x) if use_reentrant is None else checkpoint(norm, x, use_reentrant=use_reentrant)
        (y * weights).sum().backward()
    values, scaled = x.detach().numpy(), weights.numpy() * norm.weight.detach().numpy()
    mean_square = (values**2).mean(-1, keepdims=True) + norm.variance_epsilon
    right = scaled / mean_square**0.5 - values * (scaled * values).mean(-1, keepdims=True) / mean_square**1.5
    assert error(x.grad, right) < 1e-14
