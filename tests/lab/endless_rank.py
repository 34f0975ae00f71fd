"""A rank that sums over gloo until it is ended: python endless_rank.py FOLDER. FOLDER/RANK says that it has begun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numbers = torch.ones(1000)
    dist.all_reduce(numbers)
    Path(sys.argv[1], str(dist.get_rank())).write_text(str(os.getpid()))
    while True:
        dist.all_reduce(numbers)
