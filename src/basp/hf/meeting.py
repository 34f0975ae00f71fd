"""Whether a model's tokens meet in its attention and nowhere else: shown by forwards of one and two tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from basp.attention.kernels import ChosenKernel
from basp.errors import ModelError
from basp.fit import input_embeddings, position_limit
from basp.hf.function import Probe


def unwrap(model: Any) -> Any:
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


def _embeddings(model: nn.Module) -> nn.Module:
    found = input_embeddings(unwrap(model))
    if found is None:
        raise ModelError(
            f"a {type(model).__name__} without a table of embeddings for its vocabulary",
            allowed="a model that has get_input_embeddings, or an nn.Embedding of config.vocab_size rows",
            remedy="add get_input_embeddings to the class",
        )
    return found


def forward(model: nn.Module, probe: Probe, positions: tuple[int, ...] | None = (0, 1)) -> Tensor:
    """Logits of as many tokens of id 0; positions of None leave two tokens to the model's own counting."""
    device = next(model.parameters()).device
    ids = torch.zeros(1, len(positions or (0, 1)), dtype=torch.int64, device=device)
    at = None if positions is None else torch.tensor([positions], device=device)
    return model(input_ids=ids, position_ids=at, use_cache=False, basp_context=probe).logits


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
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


def check_mixing(model: nn.Module, kernel: ChosenKernel) -> None:
    """The probe's attention returns zeros: tokens that still meet do so elsewhere."""
    where = find_mixing(model, kernel)
    if where is not None:
        raise ModelError(
            f"{type(model).__name__} mixes tokens outside of its attention{where}",
            allowed="a model whose tokens meet in attention only",
            remedy="a state space, a convolution or linear attention beside attention needs the whole "
            "sequence on one rank: train this model without basp",
        )


def find_mixing(model: nn.Module, kernel: ChosenKernel) -> str | None:
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

    hooks = [_embeddings(model).register_forward_hook(embed)]
    hooks += [
        module.register_forward_hook(watch(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        with torch.enable_grad(), in_mode(model, training=False):
            logits = forward(model, Probe(kernel))
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
def check_slices(model: nn.Module, kernel: ChosenKernel) -> None:
    """A token brings the same queries, keys and values to attention whichever other tokens are on its rank.

    Two tokens far apart run together, then each alone. Position 0 would not do: a rotation by it is the identity.
    """
    if next(model.parameters()).device.type == "meta":
        return
    positions = (1, max(2, (position_limit(unwrap(model).config) or 3) - 1))
    drawn: list[Tensor] = []
    shown = slice(0, 2)

    def draw(_module: nn.Module, _given: Any, out: Tensor) -> Tensor:
        if not drawn:
            drawn.append(torch.randn_like(out) * out.std().clamp(min=0.02))
        return drawn[0][:, shown].clone()

    def seen_by(*at: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        probe = Probe(kernel)
        forward(model, probe, at)
        return probe.seen

    hook = _embeddings(model).register_forward_hook(draw)
    try:
        with in_mode(model, training=False):
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
def check_first_position(model: nn.Module, kernel: ChosenKernel) -> None:
    """A sequence's first token is at position 0, as in a forward without position_ids; rope alone would not care."""
    own = not isinstance(unwrap(model), PreTrainedModel)  # it need not know how to count
    if own or next(model.parameters()).device.type == "meta":
        return
    given, counted = Probe(kernel), Probe(kernel)
    with in_mode(model, training=False):
        logits = [forward(model, given), forward(model, counted, None)]
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
