"""``basp.check``: one process against N ranks on the same data, and where they first differ."""

from basp.checks.command import check
from basp.checks.report import Difference, DifferenceError, Report, Row

__all__ = ["Difference", "DifferenceError", "Report", "Row", "check"]
