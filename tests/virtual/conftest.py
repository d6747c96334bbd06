"""How much was tried: printed at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(slots=True)
class Tally:
    rows: int = 0
    schedules: int = 0
    cancellations: int = 0
    leftovers: int = 0


TALLY = Tally()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY.rows or TALLY.cancellations:
        terminalreporter.write_line(
            f"virtual time: {TALLY.rows} rows on {TALLY.schedules} schedules; "
            f"{TALLY.cancellations} cancellations injected, {TALLY.leftovers} leftovers"
        )
