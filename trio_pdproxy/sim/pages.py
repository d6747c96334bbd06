"""The endpoints that answer without the engine core: models, health, version, metrics."""

from __future__ import annotations

import time

from trio_pdproxy.sim.core import EngineCore, State
from trio_pdproxy.sim.render import encode

JSON = "application/json"


def page(path: str, core: EngineCore) -> tuple[bytes, str] | None:
    """Body and content type, or None if there is no such page."""
    if path in ("/health", "/ping"):
        return b"", JSON
    if path == "/version":
        return encode({"version": core.settings.version}), JSON
    if path == "/load":
        return b'{"server_load":0}', JSON
    if path == "/v1/models":
        return _models(core), JSON
    if path == "/metrics":
        return _metrics(core).encode(), "text/plain; version=0.0.4; charset=utf-8"
    return None


def _models(core: EngineCore) -> bytes:
    settings = core.settings
    card = {
        "id": settings.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": settings.model,
        "parent": None,
        "max_model_len": settings.max_model_len,
        "permission": [],
    }
    return encode({"object": "list", "data": [card]})


def _metrics(core: EngineCore) -> str:
    core.expire()
    counts = core.counts
    waiting = counts[State.QUEUED] + counts[State.ADMITTED] + counts[State.REMOTE]
    labels = f'engine="0",model_name="{core.settings.model}"'
    samples: list[tuple[str, str, str, float]] = [
        ("gauge", "num_requests_running", "", counts[State.RUNNING]),
        ("gauge", "num_requests_waiting", "", waiting),
        ("gauge", "kv_cache_usage_perc", "", core.pool.in_use / core.pool.total),
        ("counter", "nixl_xfer_time_seconds_count", "", core.pushes),
        ("counter", "nixl_num_failed_transfers_total", "", core.failed_transfers),
        ("counter", "nixl_num_kv_expired_reqs_total", "", core.expired),
    ]
    for source in ("local_compute", "external_kv_transfer"):
        tokens = core.prompt_tokens[source]
        samples.append(("counter", "prompt_tokens_by_source_total", f',source="{source}"', tokens))
    lines: list[str] = []
    for kind, name, more, value in samples:
        typed = f"# TYPE vllm:{name} {kind}"
        if typed not in lines:
            lines.append(typed)
        lines.append(f"vllm:{name}{{{labels}{more}}} {float(value)}")
    return "\n".join(lines) + "\n"
