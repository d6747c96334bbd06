"""A structured-concurrency proxy for vLLM prefill/decode disaggregation in NIXL push mode.

`app` is the ASGI application that `hypercorn trio_pdproxy:app --worker-class trio` serves; it reads its configuration
when it is started, not when it is imported. `create_app(settings)` makes one from settings in code, and
`run_exchange` serves a single request without any server.
"""

from trio_pdproxy.config import ConfigError, EngineSpec, Settings, load_settings
from trio_pdproxy.core.report import Report
from trio_pdproxy.engines.pool import Pool
from trio_pdproxy.exchange import run_exchange
from trio_pdproxy.web.app import ProxyApp, create_app

app = create_app()

__all__ = [
    "ConfigError",
    "EngineSpec",
    "Pool",
    "ProxyApp",
    "Report",
    "Settings",
    "app",
    "create_app",
    "load_settings",
    "run_exchange",
]
