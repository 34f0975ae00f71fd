"""What a check found: a line for each thing that was compared, and the place of the first difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from basp.errors import BaspError

if TYPE_CHECKING:
    from rich.table import Table


class DifferenceError(BaspError, AssertionError):
    """N ranks computed something else than one process; raised by ``Report.raise_if_wrong``."""


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        what: "loss", "gradient: attention q", ...
        error: largest max |a - b| / max |b| of its tensors.
        tolerance: what that may be.
        worst: which tensor it was, where there are several.
    """

    what: str
    error: float
    tolerance: float
    worst: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Difference:
    """Where N ranks first leave the path of one process.

    Attributes:
        phase: "forward", "loss", "backward" or "gradient" (of a parameter).
        place: the module or parameter, by its name.
        detail: what is different there.
        sequence: the first sequence that differs; None where all tokens mix.
        token: the first of its tokens that does.
    """

    phase: str
    place: str
    detail: str
    sequence: int | None = None
    token: int | None = None

    def __str__(self) -> str:
        return f"{self.phase}: {self.place}: {self.detail}"


@dataclass(frozen=True)
class Report:
    """The outcome of ``basp.check``.

    Attributes:
        title: model, ranks, strategy, kernel, dtype.
        notes: what a reader has to know of how it was run.
        rows: every comparison.
        first_difference: None where ``ok``.
    """

    title: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]
    first_difference: Difference | None = None

    @property
    def ok(self) -> bool:
        """Whether every line is within its tolerance."""
        return all(row.ok for row in self.rows)

    def raise_if_wrong(self) -> None:
        """Raise ``DifferenceError`` (an AssertionError) unless every line is within its tolerance."""
        if not self.ok:
            wrong = ", ".join(f"{row.what} {row.error:.1e}" for row in self.rows if not row.ok)
            raise DifferenceError(
                f"{self.title}: {wrong}; first difference: {self.first_difference}",
                allowed="every relative error within its tolerance: " + _tolerances(self.rows),
                remedy="look at the first difference; if the model is stock and the kernel basp's, report it",
            )

    def table(self) -> Table:
        """For a rich console."""
        from rich.box import SIMPLE
        from rich.table import Table

        table = Table(title=self.title, box=SIMPLE)
        table.add_column("compared", no_wrap=True)
        table.add_column("error", justify="right")
        table.add_column("tolerance", justify="right")
        table.add_column("worst", overflow="fold")
        table.add_column("verdict")
        for row in self.rows:
            worst, verdict = row.worst.removeprefix("model."), "ok" if row.ok else "FAIL"
            table.add_row(row.what, f"{row.error:.1e}", f"{row.tolerance:.1e}", worst, verdict)
        table.caption = "\n".join(("error: largest max |a - b| / max |b|, of the tensor named", *self.notes))
        table.caption_justify = "left"
        return table


def _tolerances(rows: tuple[Row, ...]) -> str:
    limits = sorted({row.tolerance for row in rows})
    return " to ".join(f"{limit:.1e}" for limit in dict.fromkeys((limits[0], limits[-1])))
