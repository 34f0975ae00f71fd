"""transformers models: an attention function named "basp", its mask function, and checks before the first step.

A model says what it wants of attention through the arguments of that function (window, soft cap, sinks, dropout, a
mask). What the executor cannot honour is refused there, by the name of the layer, and a probe forward in ``prepare``
brings every layer's wishes to light before training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from basp.attention import Context, attend
from basp.errors import ModelError
from basp.parallel import SequenceParallel

NAME = "basp"
"""Of the attention implementation. It must not contain "flash": transformers would take it for its own."""


class _NoStepError(ModelError):
    """The attention function was called without a context."""


class Probe:
    """Stands where a context will be, and counts the attention calls of each module."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()


def prepare(model: PreTrainedModel, sp: SequenceParallel) -> PreTrainedModel:
    """Route a causal language model's attention through basp, after checking that it can be honoured exactly.

    Call it before ``fully_shard`` and before ``torch.compile``. Runs one forward over two tokens.

    Args:
        model: any transformers causal LM whose attention goes through the attention interface.
        sp: that will cut its batches.

    Returns:
        The same model.

    Raises:
        ModelError: a layer does not call the attention function once per forward, or asks for something that the
            executor cannot honour (window, soft cap, sinks, dropout, a mask); names the layer.
    """
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"a {type(model).__name__}",
            allowed="a transformers PreTrainedModel with a causal LM head",
            remedy="load it with AutoModelForCausalLM, or call basp.attention.attend from your own attention layer",
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ModelError(
            f"a {type(model).__name__} that fully_shard has wrapped already",
            allowed="a model that is not sharded yet",
            remedy="call basp.prepare first, then fully_shard",
        )
    _register()
    _check_dropout(model)
    _check_chunks(model)
    before = model.config._attn_implementation or "eager"
    try:
        model.set_attn_implementation(NAME)
        _check_layers(model, _run_probe(model))
        _check_mixing(model)
    except BaseException:
        model.set_attn_implementation(before)  # a refused model stays as it was
        raise
    return model


@torch.compiler.disable
def basp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    basp_context: Context | Probe | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer. Dynamo does not trace it: one graph break.

    Args:
        module: the attention layer.
        query: [1, H, T, D] of this rank's packed tokens.
        key: [1, K, T, D].
        value: [1, K, T, Dv].
        attention_mask: must be None: sequences and causality are the context's.
        scaling: multiplies q k^T.
        dropout: must be 0.
        basp_context: of the micro-step.
        asked: whatever else the model passes; refused where it changes attention.

    Returns:
        ([1, T, H, Dv], None)

    Raises:
        ModelError: no context, or something that cannot be honoured.
    """
    _check_wishes(module, attention_mask, dropout, asked)
    if isinstance(basp_context, Probe):
        basp_context.calls[id(module)] += 1
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    if basp_context is None:
        raise _NoStepError(
            f"a forward of {_describe(module)} without a basp step",
            allowed="model(**step.inputs) or sp.loss(model, step)",
            remedy="shard the batch with sp.shard; to use the model without basp, "
            'call model.set_attn_implementation("sdpa")',
        )
    if query.shape[0] != 1:
        raise ModelError(
            f"hidden states of batch size {query.shape[0]} in {_describe(module)}",
            allowed="1: all of a rank's tokens packed in one row",
            remedy="pass step.inputs unchanged",
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attend(q, k, v, basp_context, scale=scaling)
    # Not a view for autograd: compiled code after it would be compiled anew for every kind of base that a plan gives.
    return torch.ops.aten._unsafe_view(out, [1, *out.shape]), None


def basp_mask(*, attention_mask: Tensor | None = None, **_: Any) -> None:
    """The mask function that goes with it: there is no mask, because sequences are cut apart by the context.

    Raises:
        ModelError: the caller passed a mask of its own.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ModelError(
            f"an attention_mask of shape {tuple(attention_mask.shape)} with masked tokens",
            allowed="no attention_mask: sequences without padding",
            remedy="pass each sequence without its padding to sp.shard",
        )


def _register() -> None:
    AttentionInterface.register(NAME, basp_attention)
    AttentionMaskInterface.register(NAME, basp_mask)


_CHANGES_ATTENTION = {
    "sliding_window": "a sliding window",
    "softcap": "a soft cap on attention scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "head_mask": "a head mask",
    "position_bias": "a position bias",
    "indices": "index-sparse attention",
}
"""Arguments with which transformers' models ask for more than causal attention."""


def _check_wishes(module: nn.Module, mask: Tensor | None, dropout: float, asked: dict[str, Any]) -> None:
    wishes = [f"{what} ({name})" for name, what in _CHANGES_ATTENTION.items() if asked.get(name) is not None]
    if mask is not None:
        wishes.append(f"an attention mask of shape {tuple(mask.shape)}")
    if dropout > 0:
        wishes.append(f"attention dropout {dropout}")
    is_causal = asked.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        wishes.append("non-causal attention")
    if wishes:
        raise ModelError(
            f"{_describe(module)} asks for {' and '.join(wishes)}",
            allowed="causal attention over whole sequences",
            remedy="change the model's config so that it does not ask for this, or train it without basp",
        )


def _describe(module: nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return f"{type(module).__name__}{'' if layer is None else f' of layer {layer}'}"


def _check_dropout(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        dropout = getattr(module, "attention_dropout", 0.0)
        if isinstance(dropout, float) and dropout > 0:
            raise ModelError(
                f"{name} has attention_dropout {dropout}",
                allowed="0: ranks would draw different random numbers for one sequence",
                remedy="set config.attention_dropout = 0.0 before loading the model",
            )


def _check_chunks(model: PreTrainedModel) -> None:
    """Chunked attention reaches only the mask function: a layer never says so itself."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    if "chunked_attention" in kinds:
        raise ModelError(
            f"layer {kinds.index('chunked_attention')} of {type(model).__name__} attends within chunks of "
            f"{config.attention_chunk_size} tokens (attention_chunk_size)",
            allowed="causal attention over whole sequences",
            remedy='set every config.layer_types to "full_attention" if that is meant, or train it without basp',
        )


def _forward(model: PreTrainedModel, probe: Probe) -> Tensor:
    device = next(model.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    positions = torch.arange(2, device=device)[None]
    return model(input_ids=ids, position_ids=positions, use_cache=False, basp_context=probe).logits


@contextmanager
def _mode(model: PreTrainedModel, *, training: bool) -> Iterator[None]:
    """Every module in that mode; each its own mode, and the random state, as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    devices = [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]
    with torch.random.fork_rng(devices=devices):
        model.train(training)
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


@torch.no_grad()
def _run_probe(model: PreTrainedModel) -> Probe:
    probe = Probe()
    try:
        with _mode(model, training=True):  # a layer asks for dropout only then
            _forward(model, probe)
    except _NoStepError as error:
        raise ModelError(
            f"{type(model).__name__} does not pass keyword arguments of its forward on to attention",
            allowed="a model whose attention function receives them, as transformers' newer models do",
            remedy="train this model without basp",
        ) from error
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} fails a forward of two tokens with an attention function of basp's: {error!r}",
            allowed="a causal LM that takes input_ids and position_ids, and any attention function",
            remedy="train this model without basp",
        ) from error
    return probe


def _check_mixing(model: PreTrainedModel) -> None:
    """The probe's attention returns zeros: a token whose logits still depend on another's embedding mixes elsewhere.

    A derivative that is not exactly 0 shows it, whatever the sizes of the numbers.
    """
    if next(model.parameters()).device.type == "meta":
        return
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _given: Any, out: Tensor) -> Tensor:
        embedded.append(torch.randn_like(out).requires_grad_())  # a padding token's own embedding may be 0
        return embedded[-1].clone()  # a model may scale it in place

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad(), _mode(model, training=False):
            logits = _forward(model, Probe())
            for token in (0, 1):
                (grad,) = torch.autograd.grad(logits[0, token].square().sum(), embedded[0], retain_graph=True)
                if bool(grad[0, 1 - token].any()):
                    raise ModelError(
                        f"{type(model).__name__} mixes tokens outside of its attention",
                        allowed="a model whose tokens meet in attention only",
                        remedy="a state space, a convolution or linear attention beside attention needs the whole "
                        "sequence on one rank: train this model without basp",
                    )
    finally:
        hook.remove()


def _check_layers(model: PreTrainedModel, probe: Probe) -> None:
    layers = model.config.get_text_config().num_hidden_layers
    attention = {id(module): name for name, module in model.named_modules()}
    seen = sorted(attention[module] for module in probe.calls)
    twice = [attention[module] for module, calls in probe.calls.items() if calls > 1]
    if len(seen) != layers or twice:
        named = f"in {', '.join(seen[:4])}{' ...' if len(seen) > 4 else ''}" if seen else "in none"
        raise ModelError(
            f"{type(model).__name__} calls the attention function {sum(probe.calls.values())} times for its {layers} "
            f"layers ({named})",
            allowed="a model in which every layer's attention goes once through transformers' attention interface",
            remedy="such a layer (linear attention, a state space, or an attention of its own) mixes tokens where basp "
            "cannot see it: train this model without basp",
        )
