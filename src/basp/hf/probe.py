"""``prepare``: route a model's attention through basp, once probes have shown that it can be honoured exactly.

Support is found by behaviour, not by name: forwards of one and two tokens count the attention calls of each layer,
bring every layer's wishes to light, and show whether tokens meet anywhere but in attention.
"""

from __future__ import annotations

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
            executor or the kernel cannot honour (dropout, a mask, chunks); names the layer.
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
    _check_dropout(base)
    _check_chunks(base)
    _check_rope(base)
    before = base.config._attn_implementation or "eager"
    try:
        base.set_attn_implementation(NAME)
        _check_layers(base, _run_probe(model, sp.kernel))
        _check_mixing(model, sp.kernel)
        _check_slices(model, sp.kernel)
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


def _forward(model: nn.Module, probe: Probe, positions: tuple[int, ...] = (0, 1)) -> Tensor:
    device = next(model.parameters()).device
    ids = torch.zeros(1, len(positions), dtype=torch.int64, device=device)
    at = torch.tensor([positions], device=device)
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
        with _mode(model, training=True):  # a layer asks for dropout only then
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
            f"{type(model).__name__} fails a forward of two tokens with an attention function of basp's: {error!r}",
            allowed="a causal LM that takes input_ids and position_ids, and any attention function",
            remedy="train this model without basp",
        ) from error
    return probe


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


def _check_mixing(model: nn.Module, kernel: ChosenKernel) -> None:
    """The probe's attention returns zeros: a token whose logits still depend on another's embedding mixes elsewhere.

    A derivative that is not exactly 0 shows it, whatever the sizes of the numbers.
    """
    if next(model.parameters()).device.type == "meta":
        return
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _given: Any, out: Tensor) -> Tensor:
        embedded.append(torch.randn_like(out).requires_grad_())  # a padding token's own embedding may be 0
        return embedded[-1].clone()  # a model may scale it in place

    hook = _unwrap(model).get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad(), _mode(model, training=False):
            logits = _forward(model, Probe(kernel))
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


@torch.no_grad()
def _check_slices(model: nn.Module, kernel: ChosenKernel) -> None:
    """A token brings the same queries, keys and values to attention whichever other tokens are on its rank.

    Two tokens far apart run together, then each alone. Position 0 would not do: a rotation by it is the identity.
    """
    if next(model.parameters()).device.type == "meta":
        return
    positions = (
        1,
        max(2, (getattr(_unwrap(model).config.get_text_config(), "max_position_embeddings", None) or 3) - 1),
    )
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


def _alike(a: Tensor, b: Tensor) -> bool:
    # Wide enough for products of one row and of two, which are rounded differently; faults are of the tensor's size.
    tolerance = 8 * torch.finfo(a.dtype).eps ** 0.75
    return float((a - b).double().abs().max()) <= tolerance * float(a.double().abs().max())


def _check_rope(model: PreTrainedModel) -> None:
    """Rope whose angles depend on the length of what is on the rank, once that passes max_position_embeddings."""
    parameters = getattr(_unwrap(model).config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    if any(kind.get("rope_type") == "dynamic" for kind in kinds):
        raise ModelError(
            f"{type(model).__name__} has rope of type dynamic, whose angles follow the longest position on the rank",
            allowed="rope whose angles follow from a token's position alone (default, linear, llama3, yarn)",
            remedy="set config.rope_parameters to one of these, or train it without basp",
        )
