"""The flex kernel: its mask in blocks, and what is compiled, on the CPU; the rest of it is in ``test_kernels.py``."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from basp.attention import AttentionSpec, find_kernel
from basp.attention.kernels import flex
from basp.attention.kernels.eager import eager
from basp.errors import ModelError


def by_torch(queries: int, keys: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Blocks that are seen in part, and whole: from every single score."""

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query + keys - queries
        visible = (key <= place) if spec.causal else (key >= 0)
        return visible & (key > place - (spec.window or keys + queries))

    mask = create_block_mask(seen, None, None, queries, keys, device="cpu")
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    return _dense(mask.kv_num_blocks, mask.kv_indices), _dense(mask.full_kv_num_blocks, mask.full_kv_indices)


def _dense(count: Tensor, indices: Tensor) -> Tensor:
    """[Q, K] from [1, 1, Q] and [1, 1, Q, K]."""
    dense = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, (number, listed) in enumerate(zip(count[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        dense[row, listed[:number]] = True
    return dense


LENGTHS = [(128, 128), (1, 1), (384, 384), (300, 411), (129, 640), (1, 700)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 300])
def test_blocks_are_those_that_torch_finds_score_by_score(window: int | None, causal: bool) -> None:
    for queries, keys in LENGTHS:
        spec = AttentionSpec(1.0, causal=causal, window=window)
        mask = flex.block_mask(queries, keys, spec, torch.device("cpu"))
        partly, whole = by_torch(queries, keys, spec)
        # A ragged last block is whole for us, in part for torch, which counts keys that are not there.
        ragged = torch.zeros_like(partly)
        ragged[-1:] |= queries % flex.BLOCK > 0
        ragged[:, -1:] |= keys % flex.BLOCK > 0
        ours = [_dense(mask.kv_num_blocks, mask.kv_indices), _dense(mask.full_kv_num_blocks, mask.full_kv_indices)]
        assert torch.equal(ours[0] | ours[1], partly | whole), (queries, keys)
        assert not (ours[0] & ours[1]).any()
        assert torch.equal(ours[1] & ~ragged, whole & ~ragged), (queries, keys)
        assert mask.seq_lengths == (queries, keys)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compiled_once_it_takes_any_length_window_and_cap() -> None:
    """What runs on CUDA, compiled for the CPU: it skips blocks, and is right."""
    counted: list[int] = []
    for number, ((queries, keys), window) in enumerate(product([(260, 900), (300, 411), (400, 401)], [9, 300, None])):
        given = [
            torch.randn(1, tokens, heads, 16).transpose(1, 2) for tokens, heads in ((queries, 4), (keys, 2), (keys, 2))
        ]
        spec = AttentionSpec(0.3, window=window, softcap=1.5 + number)
        with torch.no_grad():
            mask = flex.block_mask(queries, keys, spec, torch.device("cpu"))
            out, _ = flex._compiled(*given, mask, flex._soft_cap(torch.tensor(spec.softcap)), spec.scale, False)
        torch.testing.assert_close(out, eager(*given, spec), atol=2e-6, rtol=0)
        counted.append(counters["stats"]["unique_graphs"])
    assert counted[-1] == counted[0], counted  # or another length, window or cap compiled it anew


def test_no_backward_on_the_cpu_is_said_in_time() -> None:
    kernel = find_kernel("flex")
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    with pytest.raises(ModelError, match=r"a backward on cpu with kernel 'flex'.*kernel 'sdpa' or 'eager'"):
        kernel(q, q, q, AttentionSpec(0.3))
    with torch.no_grad():
        assert kernel(q.detach(), q.detach(), q.detach(), AttentionSpec(0.3)).shape == (1, 2, 5, 16)


def test_it_does_not_warn() -> None:
    q = torch.randn(1, 2, 5, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flex.flex(q, q, q, AttentionSpec(0.3))
    assert [str(warning.message) for warning in caught] == []
