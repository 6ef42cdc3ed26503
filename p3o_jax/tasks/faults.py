"""Rows of data that cannot be used, by file and line."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

UnusableRows = Literal["refuse", "leave_out"]
"""What becomes of a run whose data have such rows."""

_logger = logging.getLogger(__name__)
_SHOWN = 5
_LONGEST = 300


@dataclass
class Faults:
    """How many rows of a dataset cannot be used, and the first of them with the reason."""

    dataset: str
    """Its name."""
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, where: str, reason: str) -> None:
        """Counts a row; `where` is its file and line."""
        self.count += 1
        if len(self.first) < _SHOWN:
            line = " ".join(reason.split())
            self.first.append(f"{where}: {line[:_LONGEST]}")

    def settle(self, policy: UnusableRows, num_left: int) -> None:
        """Refuses such rows, or says that they are left out.

        Raises:
            ValueError: there are some and they are refused, or no others are left; with the first of them.
        """
        if not self.count:
            return
        more = f"; and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        listed = "; ".join(self.first) + more
        rows = "1 row" if self.count == 1 else f"{self.count} rows"
        if policy == "refuse":
            raise ValueError(
                f"{self.dataset}: {rows} cannot be used: {listed}. Mend the file, or go on without such rows by "
                "unusable_rows=leave_out"
            )
        if not num_left:
            raise ValueError(f"{self.dataset}: no row can be used: {listed}")
        _logger.warning("%s: left out %s that cannot be used, %d stay: %s", self.dataset, rows, num_left, listed)
