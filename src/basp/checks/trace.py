"""What one run computed, token by token: the output of every part of the model, gradients, one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from basp.fit import input_embeddings

LOGITS = "logits"
"""Place of the model's own output, the last of a forward."""
LEARNING_RATE = 0.1
"""Of the one SGD step."""


@dataclass
class Record:
    """One forward and its backward.

    Attributes:
        outputs: [T, ...] of each part, in the order in which they ended.
        gradients: [T, ...] of the loss by those that need one.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """One run of a model over a batch, with whole sequences.

    Attributes:
        losses: [R] of each process.
        records: of each sequence.
        gradients: of each parameter.
        stepped: each parameter after one step of SGD.
    """

    losses: Tensor
    records: list[Record]
    gradients: dict[str, Tensor]
    stepped: dict[str, Tensor]


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Record]]:
    """Within it, every forward of the model adds a record to the list, which its backward completes."""
    records: list[Record] = []
    hooks = [model.register_forward_pre_hook(lambda *_: records.append(Record()))]
    hooks += [module.register_forward_hook(_keep(records, name)) for name, module in _parts(model).items()]
    hooks.append(model.register_forward_hook(_keep(records, LOGITS)))
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """What is told apart: the embedding, rotary angles, each layer and its children, the last norm, the head."""
    names = {module: name for name, module in model.named_modules()}
    base = model.base_model if isinstance(model, PreTrainedModel) else model
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    parts = [input_embeddings(model), *base.children(), head]
    config: Any = model.config
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.get_text_config().num_hidden_layers:
            parts += [part for layer in module for part in (*layer.children(), layer)]
    return {names[part]: part for part in parts if part in names and not isinstance(part, nn.ModuleList)}


def _keep(records: list[Record], name: str) -> Any:
    def hook(_module: nn.Module, given: Any, output: Any) -> None:
        output = getattr(output, "logits", None) if name == LOGITS else output
        output = output[0] if isinstance(output, tuple) and output else output
        record = records[-1]
        if not isinstance(output, Tensor) or output.ndim < 3 or len(output) != 1 or name in record.outputs:
            return
        record.outputs[name] = output.detach()[0].clone()
        if output.requires_grad:
            output.register_hook(lambda gradient: record.gradients.__setitem__(name, gradient.detach()[0].clone()))

    return hook


def sgd_step(model: nn.Module, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter after one step with these gradients; the model itself takes it."""
    parameters = dict(model.named_parameters())
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.clone()
    torch.optim.SGD(parameters.values(), lr=LEARNING_RATE).step()
    return {name: parameters[name].detach() for name in gradients}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Every trainable parameter's gradient; zeros where the loss does not reach."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad.detach() for name, value in trained.items()
    }
