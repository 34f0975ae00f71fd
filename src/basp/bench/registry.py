"""Contenders by name. Peers are loaded on first use: what they need may not be installed."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from basp.bench.contender import Builder, Unavailable
from basp.bench.options import BASELINE


class Known(NamedTuple):
    """Where a contender's builder is, as "module:function", and what it is in a few words."""

    builder: str
    summary: str


CONTENDERS: dict[str, Known] = {
    BASELINE: Known("basp.bench.ours:build_basp", "this library: groups follow the batch"),
    "ulysses": Known("basp.bench.ours:build_ulysses", "this library's executor with Ulysses' plan"),
    "fsdp2-ulysses": Known("basp.bench.peers.ulysses_fsdp2:build", "a usual Ulysses under FSDP2"),
    "static": Known("basp.bench.peers.static_dp_sp:build", "a mesh fixed beforehand, one group per sequence"),
    "deepspeed": Known("basp.bench.peers.deepspeed_alst:build", "DeepSpeed's ALST: Ulysses and ZeRO-3"),
    "ring": Known("basp.bench.peers.ring:build", "ring attention under FSDP2"),
}


def load_builder(path: str) -> Builder:
    """The function at "module:function".

    Raises:
        Unavailable: it, or what it needs, cannot be imported.
    """
    module, _, function = path.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise Unavailable(
            f"{module} cannot be imported: {' '.join(str(error).split()).rstrip('.')}",
            allowed="contenders whose packages are installed",
            remedy="install bench/requirements.txt, or leave this contender out",
        ) from error
