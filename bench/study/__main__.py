"""The study: batch-aware groups beside Ulysses on an emulated cluster, as a page of tables. Needs root, on Linux.

    python bench/study bench/results/2026-12-01          # measure what has no rows yet, then write the page
    python bench/study bench/results/2026-12-01 --page   # only the page, from the rows that are there

Each case is one ``basp lab run ... -- basp bench ...``; its rows are kept as ``rows/CASE.jsonl``, so that a study that
was interrupted goes on where it was. Peers need bench/requirements.txt, and DeepSpeed ninja on the PATH. Leave the
machine alone meanwhile: it takes about an hour and a half on two cores.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cases import ORDER, Case
from page import make_page

from basp.files import written_whole
from basp.ranks import sigterm_as_exit


def measure(cases: Sequence[Case], folder: Path) -> None:
    """Run every case that has no rows yet."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [case for case in cases if not (folder / f"{case.name}.jsonl").exists()]
    began = time.monotonic()
    for number, case in enumerate(missing):
        print(f"[{number + 1}/{len(missing)}, {time.monotonic() - began:.0f} s] {case.name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="basp-study-") as place:
            run = [*case.command((sys.executable, "-m", "basp")), "--out", "out"]
            # From there, so that rows, which hold their command, name no folder of this machine.
            done = subprocess.run(run, cwd=place, stdout=subprocess.DEVNULL)
            if done.returncode:
                sys.exit(f"{case.name} failed with exit code {done.returncode}; what was measured before is kept")
            with written_whole(folder / f"{case.name}.jsonl") as partial:
                shutil.copyfile(Path(place, "out", "rows.jsonl"), partial)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the page; rows that are there are kept")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument(
        "--cases", nargs="*", default=[], help="measure only cases whose names begin so, and write no page"
    )
    options = parser.parse_args()
    if not options.page:
        chosen = [case for case in ORDER if not options.cases or case.name.startswith(tuple(options.cases))]
        with sigterm_as_exit():  # which ends the case that runs, and its lab
            measure(chosen, options.folder / "rows")
    if not options.cases:
        with written_whole(options.folder / "README.md") as partial:
            partial.write_text(make_page(options.folder), encoding="utf-8")


if __name__ == "__main__":
    main()
