"""Print the releases installed beside this Python as constraints: one exact version a line, for constraints/tested.txt.

Local versions are left out (a CPU and a CUDA build of torch are one release), and so is what only a CUDA build of torch
brings: torch asks for those itself, in exact versions.
"""

from __future__ import annotations

import re
from importlib.metadata import distributions

HEADER = """\
# The releases that the tests passed with, all of them: `make demo`, `make test` and CI install these and no others.
# Written by `make constraints`; CONTRIBUTING.md says when. A user's install has pyproject.toml's lower bounds.
"""
LEFT_OUT = re.compile(r"basp|pip|setuptools|wheel|triton|(nvidia|cuda)-.*")


def constraints() -> list[str]:
    """``name==version`` of each distribution, by name."""
    found = {re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version for each in distributions()}
    return [f"{name}=={found[name].partition('+')[0]}" for name in sorted(found) if not LEFT_OUT.fullmatch(name)]


if __name__ == "__main__":
    print(HEADER + "\n".join(constraints()))
