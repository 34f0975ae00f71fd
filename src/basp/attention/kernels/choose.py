"""The kernels by name, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from basp.attention.kernels.declare import Abilities, Kernel
from basp.attention.kernels.eager import ABILITIES as EAGER
from basp.attention.kernels.eager import eager
from basp.attention.kernels.flash import FLASH_2, FLASH_3, FLASH_4, flash2, flash3, flash4, missing
from basp.attention.kernels.flex import ABILITIES as FLEX
from basp.attention.kernels.flex import flex
from basp.attention.kernels.sdpa import ABILITIES as SDPA
from basp.attention.kernels.sdpa import sdpa
from basp.attention.spec import AttentionSpec
from basp.errors import ModelError, check_named


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class KernelEntry:
    """A kernel, what it can do, and where "auto" takes it.

    Attributes:
        run: the kernel.
        abilities: what it can do.
        missing: why it cannot run on this machine at all, in words; None if it can.
        automatic: types of device where "auto" takes it; None takes it wherever it runs.
    """

    run: Kernel
    abilities: Abilities
    missing: Callable[[], str | None] = _nothing
    automatic: tuple[str, ...] | None = None


KERNELS: dict[str, KernelEntry] = {
    "flash3": KernelEntry(flash3, FLASH_3, lambda: missing("flash3")),
    "flash4": KernelEntry(flash4, FLASH_4, lambda: missing("flash4")),
    "flash2": KernelEntry(flash2, FLASH_2, lambda: missing("flash2")),
    "sdpa": KernelEntry(sdpa, SDPA),
    "flex": KernelEntry(flex, FLEX, automatic=("cuda",)),
    "eager": KernelEntry(eager, EAGER),
}
"""By name, the preferred first."""


class ChosenKernel:
    """Picks, for each call, the first of its kernels that can do what the call wants.

    Args:
        names: of ``KERNELS``, the preferred first.
        automatic: whether a kernel must also be one that "auto" takes on the device.

    Attributes:
        chosen: what each kernel has been picked for so far, in words.
    """

    def __init__(self, names: tuple[str, ...], *, automatic: bool = False) -> None:
        self.names, self.automatic = names, automatic
        self.chosen: dict[str, list[str]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Run it.

        Raises:
            ModelError: none of them can.
        """
        backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        name = self.pick(q, v, spec, backward=backward)
        wish = " with ".join(spec.wishes().values()) or "causal attention"
        if wish not in self.chosen.setdefault(name, []):
            self.chosen[name].append(wish)
        return KERNELS[name].run(q, k, v, spec)

    def pick(self, q: Tensor, v: Tensor, spec: AttentionSpec, *, backward: bool) -> str:
        """The name of the kernel for these queries [B, H, Tq, D] and values [B, K, Tk, Dv].

        Raises:
            ModelError: none of them can; says which could.
        """
        for name in self.names:
            takes = KERNELS[name].automatic if self.automatic else None
            if (takes is None or q.device.type in takes) and not _lacks(name, q, v, spec, backward):
                return name
        able = [name for name in KERNELS if not _missing(name) and not _lacks(name, q, v, spec, backward)]
        raise ModelError(
            f"{' and '.join(_lacks(self.names[0], q, v, spec, backward))} with kernel {self.names[0]!r}",
            allowed=f"kernel {' or '.join(map(repr, able))}",
            remedy='choose that, or "auto", for SequenceParallel(kernel=...)',
        )

    def __str__(self) -> str:
        return "; ".join(f"{name} for {', '.join(wishes)}" for name, wishes in self.chosen.items())


def _lacks(name: str, q: Tensor, v: Tensor, spec: AttentionSpec, backward: bool) -> list[str]:
    return KERNELS[name].abilities.lacks(q, v, spec, backward=backward)


def _missing(name: str) -> str | None:
    return KERNELS[name].missing()


def find_kernel(name: str) -> ChosenKernel:
    """The kernel of that name; "auto" picks for each call the first of ``KERNELS`` that can do it.

    Raises:
        ModelError: there is none, or it cannot run on this machine; names the nearest.
    """
    check_named("kernel", name, ["auto", *KERNELS], ModelError)
    here = [known for known in KERNELS if not _missing(known)]
    if name == "auto":
        return ChosenKernel(tuple(here), automatic=True)
    if name not in here:
        raise ModelError(
            f"kernel {name!r} on a machine where {_missing(name)}",
            allowed=f"kernel {' or '.join(map(repr, ['auto', *here]))}",
            remedy='install what it needs, or choose "auto", which takes the best that there is',
        )
    return ChosenKernel((name,))
