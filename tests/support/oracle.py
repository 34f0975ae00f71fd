"""What every parity test is compared with: one process, one sequence at a time, plain float64 attention and loss.

Shares no code with basp. Shape letters: T tokens, H query heads, K kv heads, D head dim, Dv value dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

NAME = "oracle"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest max |a - b| / max |b| of one tensor (DESIGN, invariant 1)."""
ZERO_TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-7}
"""Largest max |a - b| where all of b is zero."""

VOCABULARY = 32
"""Token ids of ``TinyLM``."""

_MUST_BE_ABSENT = ("sinks", "head_mask", "position_bias", "indices")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One whole sequence, every score written out: q [T, H, D], k [T, K, D], v [T, K, Dv] -> [T, H, Dv].

    Computed in float64, whatever comes in; rounded to q's type at the end. Query head h reads kv head h // (H / K).

    Args:
        q: queries.
        k: keys.
        v: values.
        causal: whether query i sees no key above i.
        scale: multiplies the scores.
        window: query i sees keys above i - window only.
        softcap: scores s become softcap tanh(s / softcap), before anything is hidden.
        sinks: [H] one more column of scores, which takes its part of the weights and has no value.
    """
    tokens, heads = q.shape[:2]
    kv_head = torch.arange(heads) // (heads // k.shape[1])
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()[:, kv_head]) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    hidden = torch.zeros(tokens, tokens, dtype=torch.bool)
    if causal:
        hidden = hidden | (key > query)
    if window is not None:
        hidden = hidden | (key <= query - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True).detach()
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double()[:, None, None] - largest)
    return torch.einsum("hqk,khe->qhe", weights / total, v.double()[:, kv_head]).type_as(q)


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Sum of the losses of one sequence, and how many there are: token t predicts label t + 1, -100 does not count.

    Args:
        logits: [T, V].
        labels: [T] aligned with the tokens, not shifted.
    """
    following = labels[1:]
    counted = following != -100
    log_probability = torch.log_softmax(logits[:-1].double(), dim=-1)
    chosen = log_probability.gather(1, following.clamp(min=0)[:, None])[:, 0]
    return -(chosen * counted).sum(), int(counted.sum())


def token_mean(logits_per_sequence: Sequence[Tensor], labels_per_sequence: Sequence[Tensor]) -> Tensor:
    """Mean loss over every counted token of all sequences, divided once; 0 where none counts.

    Args:
        logits_per_sequence: [T, V] of each.
        labels_per_sequence: [T] of each, aligned and not shifted, -100 where there is no loss.
    """
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for logits, labels in zip(logits_per_sequence, labels_per_sequence, strict=True):
        loss, counted = token_losses(logits, torch.as_tensor(labels))
        total, count = total + loss, count + counted
    return total / max(count, 1)


def run_model(
    model: nn.Module, micro_batches: Sequence[Sequence[Any]], labels: Sequence[Sequence[Any]] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """One optimizer step in one process: its loss, and the gradient of every parameter.

    Each sequence runs alone, at batch size 1, through ``attention``; the step's token losses are summed and divided
    once. Where the model's config has ``output_router_logits``, each micro-batch adds its ``balance_loss`` x
    ``router_aux_loss_coef`` x its share of the step's counted tokens. The model is left as it was: same attention
    implementation, no gradients. A parameter that the loss does not reach has a gradient of zeros.

    Args:
        model: of transformers, or a ``TinyLM``; in the type that the comparison is for.
        micro_batches: for each its sequences of token ids.
        labels: alike, aligned and not shifted; the token ids by default.
    """
    sequences = [torch.as_tensor(sequence) for batch in micro_batches for sequence in batch]
    targets = sequences
    if labels is not None:
        targets = [torch.as_tensor(sequence) for batch in labels for sequence in batch]
    model.zero_grad(set_to_none=True)
    with nullcontext() if isinstance(model, TinyLM) else oracle_attention(model):
        outputs = [_forward(model, sequence) for sequence in sequences]
        loss = token_mean([output.logits[0] for output in outputs], targets)
        if _wants_balance(model):
            loss = loss + _balance_of_step(model, outputs, targets, [len(batch) for batch in micro_batches])
        if loss.requires_grad:
            loss.backward()
    grads = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def logits_of(model: nn.Module, sequence: Tensor) -> Tensor:
    """[T, V] of one sequence alone; call it within ``oracle_attention``."""
    return _forward(model, sequence).logits[0]


def _forward(model: nn.Module, sequence: Tensor) -> Any:
    positions = torch.arange(len(sequence))[None]
    return model(input_ids=sequence[None], position_ids=positions, use_cache=False)


def balance_loss(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Switch Transformer's load-balancing loss (arXiv 2101.03961, 4-6) with top-k routing, as transformers has it.

    E x sum over experts of f x P, over all rows: f is the number of times that the expert is among a row's ``top_k``,
    P the sum of its probabilities, each divided by the number of rows.

    Args:
        router_logits: [rows, E] of each layer, and of each part of the batch.
        top_k: experts of a row.
    """
    rows = torch.cat([logits.double() for logits in router_logits])
    powers = torch.exp(rows - rows.amax(dim=-1, keepdim=True).detach())
    probability = powers / powers.sum(dim=-1, keepdim=True)
    experts = rows.shape[1]
    loss = torch.zeros((), dtype=torch.float64)
    chosen = rows.detach().argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    for expert in range(experts):
        share = float((chosen == expert).sum()) / len(rows)
        loss = loss + experts * share * probability[:, expert].sum() / len(rows)
    return loss


def _wants_balance(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "output_router_logits", False))


def _balance_of_step(model: Any, outputs: Sequence[Any], targets: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    config = model.config
    counted = [int((target[1:] != -100).sum()) for target in targets]
    total = torch.zeros((), dtype=torch.float64)
    first = 0
    for size in sizes:
        batch = slice(first, first + size)
        first += size
        logits = [layer for output in outputs[batch] for layer in output.router_logits]
        share = sum(counted[batch]) / max(sum(counted), 1)
        total = total + balance_loss(logits, config.num_experts_per_tok) * config.router_aux_loss_coef * share
    return total


@contextmanager
def oracle_attention(model: Any) -> Iterator[None]:
    """Route a transformers model, or one that PEFT wraps, through ``attention``; puts its own back afterwards."""
    model = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    AttentionInterface.register(NAME, _attention_of_transformers)
    AttentionMaskInterface.register(NAME, _no_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attention_of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    wishes = [name for name in _MUST_BE_ABSENT if asked.get(name) is not None]
    assert attention_mask is None, "the oracle takes no mask"
    assert not wishes, f"the oracle does not know {wishes}"
    assert dropout == 0.0, "the oracle does not drop"
    assert query.shape[0] == 1, "the oracle runs one sequence at a time"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    causal = module.is_causal if is_causal is None else is_causal
    out = attention(q, k, v, causal, scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return out[None], None


def _no_mask(**_: Any) -> None:
    return None


class TinyLM(nn.Module):
    """One attention layer with positions, in float64, the same for the same seed: a model without transformers.

    Args:
        attend: ``attend(q, k, v, context)`` of the system under test, called with ``basp_context``; without it the
            oracle's attention runs, which takes one sequence at a time.
    """

    def __init__(
        self, *, attend: Callable[..., Tensor] | None = None, heads: int = 4, kv_heads: int = 2, seed: int = 0
    ) -> None:
        super().__init__()
        self.attend, self.heads, self.kv_heads = attend, heads, kv_heads
        width, dim = 8, 4
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, width)
            self.place = nn.Embedding(64, width)
            self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * dim)
            self.out = nn.Linear(heads * dim, width)
            self.head = nn.Linear(width, VOCABULARY)
        self.double()

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, basp_context: Any = None
    ) -> SimpleNamespace:
        """Logits [1, T, V] of token ids [1, T]."""
        hidden = self.embed(input_ids[0]) + self.place(position_ids[0])
        packed = self.qkv(hidden).unflatten(1, (self.heads + 2 * self.kv_heads, -1))
        q, k, v = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.attend is None:
            mixed = attention(q, k, v, True, q.shape[2] ** -0.5)
        else:
            mixed = self.attend(q, k, v, basp_context)
        return SimpleNamespace(logits=self.head(torch.tanh(hidden + self.out(mixed.flatten(1))))[None])


def relative_error(got: Tensor, want: Tensor) -> float:
    """max |got - want| / max |want|, or max |got - want| where all of ``want`` is zero; NaN where either has one."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{got.dtype} instead of {want.dtype}"
    if got.numel() == 0:
        return 0.0
    largest = float(want.detach().abs().max())
    difference = float((got.detach() - want.detach()).abs().max())
    return difference / largest if largest != 0.0 else difference


def assert_close(got: Tensor, want: Tensor, what: str, *, tolerance: float | None = None) -> None:
    """Fail, naming ``what``, unless ``got`` is ``want`` to the tolerance of its type."""
    try:
        error = relative_error(got, want)
    except AssertionError as mismatch:
        raise AssertionError(f"{what}: {mismatch}") from None
    is_zero = not bool(want.detach().any())
    allowed = ZERO_TOLERANCE[want.dtype] if is_zero else (TOLERANCE[want.dtype] if tolerance is None else tolerance)
    if not error <= allowed:  # a NaN is not close either
        kind = "absolute" if is_zero else "relative"
        raise AssertionError(f"{what}: {kind} error {error:.3g}, allowed {allowed:.3g}")


def assert_same_grads(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "gradient") -> None:
    """``assert_close`` of every entry; both must name the same parameters."""
    assert got.keys() == want.keys(), f"{what}: {sorted(got.keys() ^ want.keys())} in one only"
    for name in want:
        assert_close(got[name], want[name], f"{what} of {name}")
