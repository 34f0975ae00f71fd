"""``python -m basp`` is the command ``basp``."""

from __future__ import annotations

import sys

from basp.cli import main

if __name__ == "__main__":
    sys.exit(main())
