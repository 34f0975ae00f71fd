"""What basp is measured against. Each module has ``build(workload, device)``, and imports its package only there."""

from __future__ import annotations

from basp.bench.contender import Builder
from basp.bench.peers import deepspeed_alst, ring, static_dp_sp, ulysses_fsdp2

PEERS: dict[str, Builder] = {
    "fsdp2-ulysses": ulysses_fsdp2.build,
    "fsdp2-static": static_dp_sp.build,
    "deepspeed-alst": deepspeed_alst.build,
    "fsdp2-ring": ring.build,
}
"""By the name that each contender has."""
