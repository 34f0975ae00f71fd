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
from transformers import PreTrainedModel

from basp.attention.kernels import ChosenKernel
from basp.errors import ModelError
from basp.fit import position_limit
from basp.hf.declared import check_cross_attention, check_declared
from basp.hf.function import NAME, NoStepError, Probe, register
from basp.parallel import SequenceParallel

_Model = TypeVar("_Model", bound=nn.Module)


def prepare(model: _Model, sp: SequenceParallel) -> _Model:
    """Route a causal language model's attention through basp, after checking that it can be honoured exactly.

    Call it before ``fully_shard`` and before ``torch.compile``. Runs one forward over two tokens.

    Args:
        model: any transformers causal LM whose attention goes through the attention interface, or one that PEFT wraps.
        sp: that will cut its batches.

    Returns:
        The same model.

    Raises:
        ModelError: a layer does not call the attention function once per forward, or asks for something that the
            executor or the kernel cannot honour (dropout, a mask, chunks, cross attention, a choice of keys, three
            positions for each token); names the layer.
    """
    base = _unwrap(model)
    if not isinstance(base, PreTrainedModel):
        raise ModelError(
            f"a {type(base).__name__}",
            allowed="a transformers PreTrainedModel with a causal LM head",
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
        base.set_attn_implementation(NAME)
        probe = _run_probe(model, sp.kernel)
        names = {id(module): name for name, module in base.named_modules()}
        check_cross_attention(base, [names[module] for module in probe.calls])
        _check_layers(model, probe)
        _check_axes(model, probe)
        _check_mixing(model, sp.kernel)
        _check_slices(model, sp.kernel)
        _check_first_position(model, sp.kernel)
    except BaseException:
        base.set_attn_implementation(before)  # a refused model stays as it was
        raise
    return model


def _unwrap(model: Any) -> Any:
    """The transformers model in a PEFT one; else the model itself."""
    configs = getattr(model, "peft_config", None)
    if isinstance(model, PreTrainedModel) or configs is None:
        return model
    if any(config.is_prompt_learning for config in configs.values()):
        raise ModelError(
            f"a {type(model).__name__} that puts tokens of its own before a sequence (prompt or prefix tuning)",
            allowed="adapters inside the layers, such as LoRA",
            remedy="use another PEFT method, or train this model without basp",
        )
    return model.get_base_model()


def _forward(model: nn.Module, probe: Probe, positions: tuple[int, ...] | None = (0, 1)) -> Tensor:
    """Logits of as many tokens of id 0; positions of None leave two tokens to the model's own counting."""
    device = next(model.parameters()).device
    ids = torch.zeros(1, len(positions or (0, 1)), dtype=torch.int64, device=device)
    at = None if positions is None else torch.tensor([positions], device=device)
    return model(input_ids=ids, position_ids=at, use_cache=False, basp_context=probe).logits


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
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
def _run_probe(model: nn.Module, kernel: ChosenKernel) -> Probe:
    probe = Probe(kernel, backward=any(parameter.requires_grad for parameter in model.parameters()))
    try:
        with _mode(model, training=True), _positions_noted(model, probe):  # a layer asks for dropout only in training
            before = _random_states(model)
            _forward(model, probe)
            if not all(map(torch.equal, before, _random_states(model))):
                raise _drawn(model)
    except NoStepError as error:
        raise ModelError(
            f"{type(model).__name__} does not pass keyword arguments of its forward on to attention",
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
    layers = _unwrap(model).config.get_text_config().num_hidden_layers
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
        where = _find_mixing(model, probe.kernel)
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


def _check_mixing(model: nn.Module, kernel: ChosenKernel) -> None:
    """The probe's attention returns zeros: tokens that still meet do so elsewhere."""
    where = _find_mixing(model, kernel)
    if where is not None:
        raise ModelError(
            f"{type(model).__name__} mixes tokens outside of its attention{where}",
            allowed="a model whose tokens meet in attention only",
            remedy="a state space, a convolution or linear attention beside attention needs the whole "
            "sequence on one rank: train this model without basp",
        )


def _find_mixing(model: nn.Module, kernel: ChosenKernel) -> str | None:
    """The first module in which tokens meet outside of attention, for a message; None if they do not.

    The probe's attention returns zeros: a token whose logits still depend on another's embedding mixes elsewhere. A
    derivative that is not exactly 0 shows it, whatever the sizes of the numbers.
    """
    if next(model.parameters()).device.type == "meta":
        return None
    embedded: list[Tensor] = []
    passed: list[tuple[str, Tensor, Tensor]] = []

    def embed(_module: nn.Module, _given: Any, out: Tensor) -> Tensor:
        embedded.append(torch.randn_like(out).requires_grad_())  # a padding token's own embedding may be 0
        return embedded[-1].clone()  # a model may scale it in place

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given, made = _hidden_states((*args, *kwargs.values())), _hidden_states(out)
            if given is not None and made is not None:
                passed.append((f", in {name} ({type(module).__name__})", given, made))

        return hook

    hooks = [_unwrap(model).get_input_embeddings().register_forward_hook(embed)]
    hooks += [
        module.register_forward_hook(watch(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        with torch.enable_grad(), _mode(model, training=False):
            logits = _forward(model, Probe(kernel))
            if not _mixes(embedded[0], logits):
                return None
            return next((name for name, given, made in passed if _mixes(given, made)), "")
    finally:
        for hook in hooks:
            hook.remove()


def _hidden_states(values: Any) -> Tensor | None:
    """The first of what a module takes or gives that has a row for each of two tokens, and a gradient."""
    for value in values if isinstance(values, tuple) else (values,):
        if isinstance(value, Tensor) and value.requires_grad and value.ndim == 3 and value.shape[:2] == (1, 2):
            return value
    return None


def _mixes(given: Tensor, made: Tensor) -> bool:
    """[1, 2, *] -> [1, 2, *]: whether a token's row depends on the other's."""
    for token in (0, 1):
        row = made[0, token].square().sum()
        (grad,) = torch.autograd.grad(row, given, retain_graph=True, allow_unused=True)
        if grad is not None and bool(grad[0, 1 - token].any()):
            return True
    return False


@torch.no_grad()
def _check_slices(model: nn.Module, kernel: ChosenKernel) -> None:
    """A token brings the same queries, keys and values to attention whichever other tokens are on its rank.

    Two tokens far apart run together, then each alone. Position 0 would not do: a rotation by it is the identity.
    """
    if next(model.parameters()).device.type == "meta":
        return
    positions = (1, max(2, (position_limit(_unwrap(model).config) or 3) - 1))
    drawn: list[Tensor] = []
    shown = slice(0, 2)

    def draw(_module: nn.Module, _given: Any, out: Tensor) -> Tensor:
        if not drawn:
            drawn.append(torch.randn_like(out) * out.std().clamp(min=0.02))
        return drawn[0][:, shown].clone()

    def seen_by(*at: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        probe = Probe(kernel)
        _forward(model, probe, at)
        return probe.seen

    hook = _unwrap(model).get_input_embeddings().register_forward_hook(draw)
    try:
        with _mode(model, training=False):
            together = seen_by(*positions)
            for token, position in enumerate(positions):
                shown = slice(token, token + 1)
                for layer, (whole, alone) in enumerate(zip(together, seen_by(position), strict=True)):
                    if not all(_alike(a[:, :, shown], b) for a, b in zip(whole, alone, strict=True)):
                        raise ModelError(
                            f"{type(model).__name__} gives a token other queries, keys or values in layer {layer} when "
                            "another token is beside it",
                            allowed="a model in which they follow from the token and its position_ids alone",
                            remedy="positions that it counts itself, a convolution before attention, or rope of type "
                            "longrope need the whole sequence on one rank: train this model without basp",
                        )
    finally:
        hook.remove()


@torch.no_grad()
def _check_first_position(model: nn.Module, kernel: ChosenKernel) -> None:
    """A sequence's first token is at position 0, as in a forward without position_ids; rope alone would not care."""
    if next(model.parameters()).device.type == "meta":
        return
    given, counted = Probe(kernel), Probe(kernel)
    with _mode(model, training=False):
        logits = [_forward(model, given), _forward(model, counted, None)]
    values = [[seen[2] for seen in probe.seen] for probe in (given, counted)]
    if not all(map(_alike, *values)) or not _alike(*logits):
        raise ModelError(
            f"{type(model).__name__} counts the positions of two tokens otherwise than 0 and 1",
            allowed="a model whose first token is at position 0",
            remedy="train this model without basp",
        )


def _alike(a: Tensor, b: Tensor) -> bool:
    # Wide enough for products of one row and of two, which are rounded differently; faults are of the tensor's size.
    tolerance = 8 * torch.finfo(a.dtype).eps ** 0.75
    return float((a - b).double().abs().max()) <= tolerance * float(a.double().abs().max())
