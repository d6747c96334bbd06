"""Is an engine ready? GET /health answers 200 once the model is loaded and warmed up."""

from __future__ import annotations

PROBE_SECONDS = 5.0


async def probe_health(url: str) -> bool:
    """Whether GET `url`/health answers 200 now. Never raises for anything the engine does or does not do."""
    from trio_pdproxy.engines.transport import open_client

    try:
        async with open_client(url, timeout=PROBE_SECONDS) as client:
            return bool((await client.get("/health")).status_code == 200)
    except Exception:  # refused, reset, half an answer: not ready; the caller's deadline and exit race bound it
        return False
