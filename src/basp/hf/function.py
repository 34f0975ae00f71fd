"""The attention function and the mask function named "basp" that transformers calls.

A model says what it wants of attention through the arguments of the attention function. What cannot be honoured is
refused there, by the name of the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from basp.attention import AttentionSpec, Context, attend, row_type
from basp.attention.kernels import ChosenKernel
from basp.errors import ModelError

NAME = "basp"
"""Of the attention implementation. It must not contain "flash": transformers would take it for its own."""


class NoStepError(ModelError):
    """The attention function was called without a context."""


class Probe:
    """Stands where a context will be, and counts the attention calls of each module.

    Args:
        kernel: has to be able to do what the layers ask for.
        backward: whether it has to be able to do the backward of it too.

    Attributes:
        calls: of each module, by its id.
        seen: queries, keys and values of each call.
        axes: modules that are given more than one position for each token, and how many.
    """

    def __init__(self, kernel: ChosenKernel, *, backward: bool = False) -> None:
        self.kernel, self.backward = kernel, backward
        self.calls: Counter[int] = Counter()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self.axes: dict[str, int] = {}

    def note(self, module: nn.Module, spec: AttentionSpec, *qkv: Tensor) -> None:
        """Count a call and keep its queries, keys and values; refuse what the kernel cannot do, by the layer's name."""
        self.calls[id(module)] += 1
        self.seen.append((qkv[0], qkv[1], qkv[2]))
        kind = row_type(*qkv)
        try:
            self.kernel.pick(qkv[0].to(kind), qkv[2].to(kind), spec, backward=self.backward)
        except ModelError as error:
            raise ModelError(
                f"{describe(module)} asks for {error.arrived}", allowed=error.allowed, remedy=error.remedy
            ) from None


@torch.compiler.disable
def basp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | int | None,
    *,
    basp_context: Context | Probe | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer. Dynamo does not trace it: one graph break.

    Args:
        module: the attention layer.
        query: [1, H, T, D] of this rank's packed tokens.
        key: [1, K, T, D].
        value: [1, K, T, Dv].
        attention_mask: ``basp_mask``'s: None, or the window that the layer must ask for itself as well. Sequences and
            causality are the context's.
        basp_context: of the micro-step.
        asked: what else the model passes: scaling, sliding_window, softcap, s_aux (sinks) are honoured; what changes
            attention in another way is refused.

    Returns:
        ([1, T, H, Dv], None)

    Raises:
        ModelError: no context, or something that cannot be honoured.
    """
    spec = read_spec(module, query, attention_mask, asked)
    if isinstance(basp_context, Probe):
        basp_context.note(module, spec, query, key, value)
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return query.new_zeros(shape, dtype=row_type(query, key, value)), None
    if basp_context is None:
        raise NoStepError(
            f"a forward of {describe(module)} without a basp step",
            allowed="model(**step.inputs) or sp.loss(model, step)",
            remedy=f"shard the batch with sp.shard; {_WITHOUT_BASP}",
        )
    _check_keys(module, query, key)
    if query.shape[0] != 1:
        raise ModelError(
            f"hidden states of batch size {query.shape[0]} in {describe(module)}",
            allowed="1: all of a rank's tokens packed in one row",
            remedy="pass step.inputs unchanged",
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attend(q, k, v, basp_context, spec=spec)
    # Not a view for autograd: compiled code after it would be compiled anew for every kind of base that a plan gives.
    return torch.ops.aten._unsafe_view(out, [1, *out.shape]), None


def _check_keys(module: nn.Module, query: Tensor, key: Tensor) -> None:
    """Every rank has as many keys as queries of its own, so where a cache adds keys, every rank refuses them."""
    if key.shape[2] != query.shape[2]:
        raise ModelError(
            f"{key.shape[2]} keys for {query.shape[2]} queries in {describe(module)}",
            allowed="a key for each query: no cache of earlier tokens, no keys from elsewhere",
            remedy=f"train with step.inputs as they are; {_WITHOUT_BASP}",
        )


def basp_mask(
    *,
    config: Any,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> int | None:
    """The mask function that goes with it: there is no mask, because sequences are cut apart by the context.

    A window (or chunk) that the mask would have had is passed on as a number: some layers have it in their mask only.

    Raises:
        ModelError: the caller passed a mask of its own, or the model's is not the one that its layers would get.
    """
    whose = type(config).__name__.removesuffix("Config")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ModelError(
            f"an attention_mask of shape {tuple(attention_mask.shape)} with masked tokens, for the layers of {whose}",
            allowed="no attention_mask: sequences without padding",
            remedy=f"pass each sequence without its padding to sp.shard; {_WITHOUT_BASP}",
        )
    declared = _is_bidirectional(config)
    rules = {getattr(rule, "__qualname__", "").split(".")[0] for rule in _rules(mask_function)}
    if "blockwise_overlay" in rules or (use_vmap and not declared):
        raise ModelError(
            f"a mask rule of its own for the layers of {whose}, as for the tokens of an image",
            allowed="a causal mask, with or without a sliding window",
            remedy="pass text only, without token types",
        )
    # Gemma3 opens its causal mask by a rule of its own.
    if declared and not use_vmap and not any("bidirectional" in rule for rule in rules):
        raise ModelError(
            f"a causal mask for the layers of {whose}, and a config that says that they are bidirectional",
            allowed="a mask and a config (is_causal, use_bidirectional_attention) that say the same",
            remedy="if the mask is what is meant, build the model with use_bidirectional_attention = False",
        )
    return local_size


def _rules(mask_function: Any) -> list[Any]:
    """The plain rules that transformers has composed into one: it keeps them in closures."""
    held = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    parts = [part for one in held for part in (one if isinstance(one, tuple) else (one,)) if callable(part)]
    return [rule for part in parts for rule in _rules(part)] or [mask_function]


def set_attention(model: nn.Module, name: str) -> None:
    """Have a model's layers call the attention function of that name from now on."""
    if isinstance(model, PreTrainedModel):
        model.set_attn_implementation(name)
    else:
        cast(Any, model.config)._attn_implementation = name


def register() -> None:
    """Make both known to transformers under ``NAME``; again is no harm."""
    AttentionInterface.register(NAME, basp_attention)
    AttentionMaskInterface.register(NAME, basp_mask)


_WITHOUT_BASP = 'to generate, or to use the model without basp, call model.set_attn_implementation("sdpa")'

_NOT_HONOURED = {
    "head_mask": "a head mask",
    "position_bias": "a position bias",
}
"""Arguments with which transformers' models ask for attention that no plan gives."""

_KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position", "num_items_in_batch"}
"""Arguments that are honoured, or that change nothing in attention; a tensor of any other name might."""


def read_spec(module: nn.Module, query: Tensor, mask: Tensor | int | None, asked: dict[str, Any]) -> AttentionSpec:
    """What a layer asks for through the arguments of its attention function.

    Raises:
        ModelError: something that cannot be honoured; names the layer.
    """
    wishes = [f"{what} ({name})" for name, what in _NOT_HONOURED.items() if asked.get(name) is not None]
    wishes += [
        f"a tensor that basp does not know ({name})"
        for name, value in asked.items()
        if isinstance(value, Tensor) and name not in _KNOWN_TENSORS | _NOT_HONOURED.keys()
    ]
    window = asked.get("sliding_window")
    if isinstance(mask, Tensor):
        wishes.append(f"an attention mask of shape {tuple(mask.shape)}")
    elif mask is not None and mask != window:
        wishes.append(f"attention within {mask} tokens by its mask, and a sliding window of {window} by its arguments")
    if asked.get("dropout"):
        wishes.append(f"attention dropout {asked['dropout']}")
    causal = asked.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    # Many layers say so of themselves and leave causality to their mask: the model's config has to say it too.
    if not causal and (window is not None or not _is_bidirectional(getattr(module, "config", None))):
        wishes.append("non-causal attention" + (" with a window" if window is not None else ""))
    if wishes:
        raise ModelError(
            f"{describe(module)} asks for {' and '.join(wishes)}",
            allowed="causal attention over whole sequences, with a sliding window, a soft cap or sinks; "
            "non-causal attention where the model's config says so (is_causal = False)",
            remedy="pass no mask and nothing else beside step.inputs; where the model asks by itself, change its "
            "config so that it does not, or train it without basp",
        )
    scale = asked.get("scaling")
    return AttentionSpec(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        causal=bool(causal),
        window=window,
        softcap=asked.get("softcap"),
        sinks=asked.get("s_aux"),
    )


def _is_bidirectional(config: Any) -> bool:
    return getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None) is True


def describe(module: nn.Module) -> str:
    """A layer's class and number, for messages."""
    layer = getattr(module, "layer_idx", None)
    return f"{type(module).__name__}{'' if layer is None else f' of layer {layer}'}"
