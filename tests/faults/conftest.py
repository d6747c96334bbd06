"""What the fault tests saw, as tables at the end of the run."""

from __future__ import annotations

import pytest

from tests.faults.table import SEEN, Tables


@pytest.fixture
def tables() -> Tables:
    """Where a test writes down what it saw."""
    return SEEN


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for title, lines in SEEN.render():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
