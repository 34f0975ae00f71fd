"""The folder of a run: claimed without harming what is there, written without leaving anything half-written."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from basp.errors import ConfigError
from basp.files import PARTIAL

_OURS = ("config.toml", "metrics.jsonl", "report.png", "model", "tokens")


@dataclass(frozen=True)
class RunDir:
    """Names of what a run writes. ``replaced`` is the older run that stood there, kept until this one has finished."""

    path: Path
    replaced: Path | None = None

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object for each logged step and evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The picture of the run."""
        return self.path / "report.png"

    @property
    def model(self) -> Path:
        """The final model and its tokenizer."""
        return self.path / "model"

    def tokens(self, node: int) -> Path:
        """A node's tokenized documents, there while the run lasts."""
        return self.path / "tokens" / f"node{node}"

    def finish(self) -> None:
        """Drop what only a run in progress needs, and the older run that this one replaced."""
        shutil.rmtree(self.path / "tokens", ignore_errors=True)
        if self.replaced is not None:
            shutil.rmtree(self.replaced)

    def abandon(self) -> bool:
        """After a failure: leave no trace of a run that never took a step, and put back what it would have replaced.

        Returns:
            False if a run that was to be replaced still stands aside, because this one did take steps.
        """
        shutil.rmtree(self.path / "tokens", ignore_errors=True)
        for half in self.path.glob(f".*{PARTIAL}"):  # of a rank that was killed while it wrote
            shutil.rmtree(half) if half.is_dir() else half.unlink()
        if self.metrics.exists() and self.metrics.stat().st_size:
            return self.replaced is None
        shutil.rmtree(self.path, ignore_errors=True)
        if self.replaced is not None:
            self.replaced.rename(self.path)
        return True


def claim_run_dir(path: str | Path, *, overwrite: bool) -> RunDir:
    """Create the folder of a new run.

    Raises:
        ConfigError: it exists and ``overwrite`` is off, or it holds something that is no run of basp.
    """
    folder = Path(path).expanduser().resolve()  # a link is followed: the run lies where it points
    replaced: Path | None = None
    try:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            replaced = _set_aside(folder, overwrite=overwrite)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the run folder {str(folder)!r}: {error.strerror}",
            allowed="a folder that can be created and written",
            remedy="choose another run_dir",
        ) from error
    return RunDir(folder, replaced)


def _set_aside(folder: Path, *, overwrite: bool) -> Path:
    if not overwrite:
        raise ConfigError(
            f"the run folder {str(folder)!r} exists already",
            allowed="a folder that does not exist, or an empty one",
            remedy="choose another --run-dir, or replace that run with --overwrite",
        )
    names = [item.name for item in folder.iterdir()] if folder.is_dir() else []
    strangers = [name for name in names if name not in _OURS and not name.endswith(PARTIAL)]
    if strangers or "config.toml" not in names:
        found = "is a file" if folder.is_file() else "holds no config.toml, which every run of basp has"
        found = f"holds {strangers[0]!r}, which no run of basp wrote" if strangers else found
        raise ConfigError(
            f"{str(folder)!r} {found}",
            allowed="to overwrite a run folder and nothing else",
            remedy="choose another --run-dir, or move what is there away",
        )
    number = 1
    while (aside := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
        number += 1
    return folder.rename(aside)
