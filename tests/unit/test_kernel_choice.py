"""Which kernel is chosen for a call, and how a user learns of it."""

from __future__ import annotations

import logging
from typing import get_args, get_type_hints

import pytest
import torch

import basp
from basp.attention import KERNELS, AttentionSpec, find_kernel
from basp.errors import ModelError
from basp.train.config import ModelConfig
from tests.support.models import random_batch, tiny_model

Q = torch.zeros(1, 2, 5, 8)


def pick(kernel: str, **wishes) -> str:
    return find_kernel(kernel).pick(Q, Q, AttentionSpec(0.3, **wishes), backward=True)


def test_auto_takes_the_first_that_can_do_it() -> None:
    assert pick("auto") == "sdpa"
    assert pick("auto", window=4) == "sdpa"
    assert pick("auto", causal=False) == "sdpa"
    assert pick("auto", softcap=4.0) == "eager"
    assert pick("auto", sinks=torch.zeros(2)) == "eager"


def test_flex_is_automatic_on_cuda_only() -> None:
    """On the CPU it is not compiled, and has no backward."""
    kernel = find_kernel("auto")
    assert kernel.pick(Q, Q, AttentionSpec(0.3, softcap=4.0), backward=False) == "eager"
    on_gpu = type("OnGpu", (), {"device": torch.device("cuda"), "shape": Q.shape, "dtype": torch.float32})()
    assert kernel.pick(on_gpu, Q, AttentionSpec(0.3, softcap=4.0), backward=True) == "flex"
    on_gpu.dtype = torch.float64
    assert kernel.pick(on_gpu, Q, AttentionSpec(0.3, softcap=4.0), backward=True) == "eager"


def test_a_kernel_that_cannot_says_which_could() -> None:
    with pytest.raises(ModelError, match=r"a soft cap of 4.0 on scores with kernel 'sdpa'\. Allowed: kernel 'eager'\."):
        pick("sdpa", softcap=4.0)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("sdpaa", "did you mean 'sdpa'"), ("flash", "did you mean 'flash"), ("Auto", "did you mean 'auto'")],
)
def test_an_unknown_kernel_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ModelError, match=f"kernel '{name}'.*'auto', .*'sdpa', .*'eager'.*{hint}"):
        find_kernel(name)


def train(family: str, **more) -> basp.SequenceParallel:
    sp = basp.SequenceParallel()
    model = basp.prepare(tiny_model(family, **more), sp)
    for _ in range(2):
        sp.loss(model, sp.shard(random_batch((7, 3)))).backward()
    return sp


def test_what_was_chosen_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "basp"):
        train("mistral", window=4)
        train("gpt-oss", window=4)
    assert caplog.messages == [
        "attention kernel: sdpa for a sliding window of 4",
        "attention kernel: eager for a sliding window of 4 with attention sinks, attention sinks",
    ]


def test_or_printed_where_logging_is_not_set_up(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    sp = train("llama")
    assert capsys.readouterr().err == "basp: attention kernel: sdpa for causal attention\n"
    assert str(sp.kernel) == "sdpa for causal attention"


def test_a_run_may_name_any_of_them() -> None:
    assert set(get_args(get_type_hints(ModelConfig)["kernel"])) == {"auto", *KERNELS}
