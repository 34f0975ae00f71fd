"""``prepare``: route a model's attention through basp, once probes have shown that it can be honoured exactly.

Support is found by behaviour, not by name: forwards of one and two tokens count the attention calls of each layer,
bring every layer's wishes to light, and show whether tokens meet anywhere but in attention.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

from basp.attention.kernels import ChosenKernel
from basp.errors import ModelError
from basp.hf.declared import check_cross_attention, check_declared
from basp.hf.function import NAME, NoStepError, Probe, register, set_attention
from basp.hf.meeting import check_first_position, check_mixing, check_slices, find_mixing, forward, in_mode, unwrap
from basp.parallel import SequenceParallel

_Model = TypeVar("_Model", bound=nn.Module)


def prepare(model: _Model, sp: SequenceParallel) -> _Model:
    """Route a causal language model's attention through basp, after checking that it can be honoured exactly.

    Call it before ``fully_shard`` and before ``torch.compile``. Runs one forward over two tokens.

    Args:
        model: any transformers causal LM whose attention goes through the attention interface, or one that PEFT wraps;
            or a module of your own with a transformers config, whose forward takes input_ids and position_ids, hands
            other keyword arguments on to the attention function that ``config._attn_implementation`` names, and gives
            an object with ``logits``.
        sp: that will cut its batches.

    Returns:
        The same model.

    Raises:
        ModelError: a layer does not call the attention function once per forward, or asks for something that the
            executor or the kernel cannot honour (dropout, a mask, chunks, cross attention, a choice of keys, three
            positions for each token); names the layer.
    """
    base = unwrap(model)
    if not isinstance(getattr(base, "config", None), PreTrainedConfig):
        raise ModelError(
            f"a {type(base).__name__} without a transformers config",
            allowed="a transformers causal LM, or a module of your own that calls transformers' attention interface as "
            "its config says (config._attn_implementation)",
            remedy="load it with AutoModelForCausalLM, or call basp.attention.attend from your own attention layer",
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ModelError(
            f"a {type(model).__name__} that fully_shard has wrapped already",
            allowed="a model that is not sharded yet",
            remedy="call basp.prepare first, then fully_shard",
        )
    register()
    check_declared(base)
    before = base.config._attn_implementation or "eager"
    try:
        set_attention(base, NAME)
        probe = _run_probe(model, sp.kernel)
        names = {id(module): name for name, module in base.named_modules()}
        check_cross_attention(base, [names[module] for module in probe.calls])
        _check_layers(model, probe)
        _check_axes(model, probe)
        check_mixing(model, sp.kernel)
        check_slices(model, sp.kernel)
        check_first_position(model, sp.kernel)
    except BaseException:
        set_attention(base, before)  # a refused model stays as it was
        raise
    return model


@torch.no_grad()
def _run_probe(model: nn.Module, kernel: ChosenKernel) -> Probe:
    probe = Probe(kernel, backward=any(parameter.requires_grad for parameter in model.parameters()))
    try:
        with in_mode(model, training=True), _positions_noted(model, probe):  # a layer asks for dropout only in training
            before = _random_states(model)
            forward(model, probe)
            if not all(map(torch.equal, before, _random_states(model))):
                raise _drawn(model)
    except NoStepError as error:
        raise ModelError(
            f"{type(model).__name__} does not pass keyword arguments of its forward on to attention"
            f"{_where(model, error)}",
            allowed="a model whose attention function receives them, as transformers' newer models do",
            remedy="train this model without basp",
        ) from error
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} fails a forward of two tokens with an attention function of basp's"
            f"{_where(model, error)}: {error!r}",
            allowed="a causal LM that takes input_ids and position_ids, and any attention function",
            remedy="train this model without basp",
        ) from error
    return probe


def _where(model: nn.Module, error: Exception) -> str:
    """In which module of the model an error arose: the innermost in the traceback."""
    names = {id(module): f", in {name} ({type(module).__name__})" for name, module in model.named_modules() if name}
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((names[id(owner)] for owner in reversed([*owners]) if id(owner) in names), "")


@contextmanager
def _positions_noted(model: nn.Module, probe: Probe) -> Iterator[None]:
    """Have the probe told of a module that is given several positions for each of its two tokens."""

    def note(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            for given in (*args, *kwargs.values()):
                many = isinstance(given, Tensor) and not given.is_floating_point() and given.ndim == 3
                if many and given.shape[0] > 1 and given.shape[1:] == (1, 2):
                    probe.axes.setdefault(name, given.shape[0])

        return hook

    hooks = [module.register_forward_pre_hook(note(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_axes(model: nn.Module, probe: Probe) -> None:
    """Multimodal rope: time, height and width of what a token shows."""
    for name, axes in probe.axes.items():
        raise ModelError(
            f"{name} of {type(model).__name__} takes {axes} positions for each token (multimodal rope, mrope_section)",
            allowed="one position for each token: its place in its sequence",
            remedy="to train on text, load the language model alone into its text family's class (Qwen3ForCausalLM for "
            "Qwen3-VL); to train on images, train this model without basp",
        )


def _random_states(model: nn.Module) -> list[Tensor]:
    devices = {parameter.device for parameter in model.parameters()}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda")]


def _drawn(model: nn.Module) -> ModelError:
    """Residual, embedding or adapter dropout, or a router's jitter: what else draws random numbers in training."""
    drops = [f"{name} drops {m.p}" for name, m in model.named_modules() if isinstance(m, _DropoutNd) and m.p > 0]
    jitters = [
        f"{name} has {key} {value}"
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "jitter" in key and isinstance(value, float) and value > 0
    ]
    which = [*drops, *jitters] or [f"{type(model).__name__} draws random numbers in a forward"]
    return ModelError(
        which[0],
        allowed="0: ranks would draw other random numbers than one process",
        remedy="set every dropout and jitter in the model's config (and its adapters') to 0",
    )


def _check_layers(model: nn.Module, probe: Probe) -> None:
    layers = unwrap(model).config.get_text_config().num_hidden_layers
    names = {id(module): name for name, module in model.named_modules()}
    seen = sorted(names[module] for module in probe.calls)
    twice = [f"{calls} times in {names[module]}" for module, calls in probe.calls.items() if calls > 1]
    if len(seen) != layers or twice:
        places = twice or [f"in {name}" for name in seen] or ["in none"]
        raise ModelError(
            f"{type(model).__name__} calls the attention function {sum(probe.calls.values())} times for its {layers} "
            f"layers ({', '.join(places[:4])}{' ...' if len(places) > 4 else ''}){_where_without(model, probe)}",
            allowed="a model in which every layer's attention goes once through transformers' attention interface",
            remedy="such a layer (linear attention, a state space, or an attention of its own) mixes tokens where basp "
            "cannot see it: train this model without basp",
        )


def _where_without(model: nn.Module, probe: Probe) -> str:
    """The first module in which tokens meet without the attention function, or the first layer that did not call it."""
    try:
        where = find_mixing(model, probe.kernel)
    except Exception:  # it only adds to a refusal, and this model may not even run in evaluation mode
        where = None
    if where:
        return f"; tokens meet without it{where}"
    called = {name for name, module in model.named_modules() if id(module) in probe.calls}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and any(each.startswith(f"{name}.") for each in called):
            for place, layer in enumerate(module):
                if not any(each.startswith(f"{name}.{place}.") for each in called):
                    return f"; not in {name}.{place} ({type(layer).__name__})"
    return ""
