"""For all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines that run real engines beside the tests are slow at times: no rule is broken by that.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
