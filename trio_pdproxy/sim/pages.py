"""The endpoints that answer without the engine core: models, health, version, metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from trio_pdproxy.sim.core import EngineCore, State
from trio_pdproxy.sim.parse import Refusal, parse_count, parse_ids
from trio_pdproxy.sim.render import encode
from trio_pdproxy.sim.settings import SimSettings
from trio_pdproxy.sim.shapes import messages_error

JSON = "application/json"


def page(path: str, ranks: Sequence[EngineCore]) -> tuple[bytes, str] | None:
    """Body and content type, or None if there is no such page. Ranks are summed up."""
    core = ranks[0]
    if path in ("/health", "/ping"):
        return b"", JSON
    if path == "/version":
        return encode({"version": core.settings.version}), JSON
    if path == "/load":
        return b'{"server_load":0}', JSON
    if path == "/v1/models":
        return _models(core), JSON
    if path == "/metrics":
        return _metrics(ranks).encode(), "text/plain; version=0.0.4; charset=utf-8"
    return None


TOKEN_PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")


def tokens(path: str, raw: bytes, content_type: str, settings: SimSettings) -> tuple[int, bytes]:
    """Status and body of a request about tokens."""
    try:
        if path == "/detokenize":
            ids = parse_ids(raw, content_type, settings=settings)
            text = bytes(token % 256 for token in ids).decode("utf-8", "replace")
            return 200, encode({"prompt": text})
        prompt = parse_count(raw, content_type, settings=settings)
    except Refusal as refusal:
        own_shape = path.startswith("/v1/messages") and refusal.kind != "Bad Request"
        return refusal.status, messages_error(refusal.message, refusal.kind) if own_shape else refusal.body
    if path == "/tokenize":
        body = {"count": prompt.tokens, "max_model_len": settings.max_model_len, "tokens": list(prompt.raw or b"")}
        return 200, encode(body | {"token_strs": None})
    counted = {"input_tokens": prompt.tokens, "context_management": {"original_input_tokens": prompt.tokens}}
    return 200, encode(counted)


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


def _metrics(ranks: Sequence[EngineCore]) -> str:
    for core in ranks:
        core.expire()
    counts = sum((core.counts for core in ranks), Counter[State]())
    waiting = counts[State.QUEUED] + counts[State.ADMITTED] + counts[State.REMOTE]
    usage = sum(core.pool.in_use for core in ranks) / sum(core.pool.total for core in ranks)
    labels = f'engine="0",model_name="{ranks[0].settings.model}"'
    samples: list[tuple[str, str, str, float]] = [
        ("gauge", "num_requests_running", "", counts[State.RUNNING]),
        ("gauge", "num_requests_waiting", "", waiting),
        ("gauge", "kv_cache_usage_perc", "", usage),
        # Of the engine that moves the KV: P when it is pushed, D when it is pulled.
        ("counter", "nixl_xfer_time_seconds_count", "", sum(core.pushes + core.pulls for core in ranks)),
        ("counter", "nixl_num_failed_transfers_total", "", sum(core.failed_transfers for core in ranks)),
        ("counter", "nixl_num_kv_expired_reqs_total", "", sum(core.expired for core in ranks)),
        ("counter", "nixl_num_notifications_after_expiry_total", "", sum(core.stale_pulls for core in ranks)),
    ]
    for source in ("local_compute", "external_kv_transfer"):
        tokens = sum(core.prompt_tokens[source] for core in ranks)
        samples.append(("counter", "prompt_tokens_by_source_total", f',source="{source}"', tokens))
    lines: list[str] = []
    for kind, name, more, value in samples:
        typed = f"# TYPE vllm:{name} {kind}"
        if typed not in lines:
            lines.append(typed)
        lines.append(f"vllm:{name}{{{labels}{more}}} {float(value)}")
    return "\n".join(lines) + "\n"
