"""Configuration: one immutable `Settings`, from flags over the environment over one YAML file.

`Settings(prefill=[...], decode=[...])` builds one in code (a wrong value raises pydantic's
`ValidationError`); `load_settings` builds one for a command (anything wrong raises `ConfigError`).
Both report every problem at once, never only the first.
"""

from __future__ import annotations

from trio_pdproxy.config.engine import ROLES, EngineSpec, Role, split_specs
from trio_pdproxy.config.load import OTHER_VARIABLES, ConfigError, load_settings
from trio_pdproxy.config.rules import RESCUE_MARGIN
from trio_pdproxy.config.settings import Settings
from trio_pdproxy.config.tls import engine_context
from trio_pdproxy.config.values import Address, split_keys

__all__ = [
    "OTHER_VARIABLES",
    "RESCUE_MARGIN",
    "ROLES",
    "Address",
    "ConfigError",
    "EngineSpec",
    "Role",
    "Settings",
    "engine_context",
    "load_settings",
    "split_keys",
    "split_specs",
]
