"""For all tests."""

from __future__ import annotations

import logging
import os

import pytest
from hypothesis import HealthCheck, settings

# Machines that run real engines beside the tests are slow at times: no rule is broken by that.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.fixture(autouse=True)
def public_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`PUBLIC_SENDS=1 pytest tests/proxy tests/faults` tries all of it as with a Hypercorn that nobody knows yet."""
    if os.environ.get("PUBLIC_SENDS"):
        monkeypatch.setattr("trio_pdproxy.web.direct.SUPPORTED", False)


@pytest.fixture(autouse=True)
def log_as_it_is_at_first() -> None:
    """Commands that a test runs in this process set up our log records, and would for whatever test comes next."""
    logger = logging.getLogger("trio_pdproxy")
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    logger.handlers.clear()
