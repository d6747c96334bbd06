"""The proxy in front of the real pair, what is asked of it, and what has to be left of it: nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import trio

from trio_pdproxy.config import Settings
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.serve import serving
from trio_pdproxy.testing import Streamed, until
from trio_pdproxy.web.app import ProxyApp, create_app

from . import hand
from .hand import MODEL
from .metrics import EngineMetrics, wait_for

if TYPE_CHECKING:
    from .conftest import Engine as VllmEngine
    from .conftest import VllmPair

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENS = 12


@asynccontextmanager
async def proxy(pair: VllmPair, **settings: Any) -> AsyncIterator[tuple[ProxyApp, httpx.AsyncClient]]:
    """A ready proxy in front of the pair (unless `settings` names other addresses), and a client of it."""
    p, d = pair.prefill, pair.decode
    engines: dict[str, Any] = {
        "prefill": [f"{p.url};side_channel={p.side_channel};lease={pair.lease}"],
        "decode": [f"{d.url};side_channel={d.side_channel}"],
    }
    configured = Settings(**(engines | {"bind": "127.0.0.1:0", "warm_up": False} | settings))
    app = create_app(configured)
    async with serving(app, configured) as url, open_client(url, timeout=120) as client:
        await until(lambda: not app.missing(), 60)
        yield app, client


def body_of(path: str, prompt: str | list[str], **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, **more}
    body |= {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return body


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert isinstance(text, str)
    return text


async def ask(client: httpx.AsyncClient, path: str, prompt: str, *, stream: bool) -> str:
    """The text the proxy answers; an AssertionError for anything but a complete 200."""
    response = await client.post(path, json=body_of(path, prompt, stream=stream))
    assert response.status_code == 200, response.text
    assert "kv_transfer_params" not in response.text
    if not stream:
        return text_of(response.json())
    assert response.content.endswith(b"data: [DONE]\n\n")
    return Streamed(response.status_code, dict(response.headers), response.content, complete=True).text


async def ask_single(client: httpx.AsyncClient, path: str, prompt: str) -> str:
    """The text one engine alone gives."""
    response = await client.post(path, json=body_of(path, prompt))
    return text_of(response.json())


async def over(app: ProxyApp, seconds: float = 30) -> None:
    """Wait until nothing of any request is left in the proxy. It is a moment after the client has its answer."""
    await until(lambda: not app.active, seconds)


async def quiet(pair: VllmPair) -> tuple[EngineMetrics, EngineMetrics]:
    """Both engines back to nothing held: decode within seconds, prefill within its lease (the proxy's probe)."""
    d = await wait_for(pair.decode.url, lambda now: now.idle, seconds=5)
    p = await wait_for(pair.prefill.url, lambda now: now.idle, seconds=pair.lease + 10)
    return p, d


async def heal(pair: VllmPair) -> None:
    """What a test that failed has left behind is no fault of the next one. Prefill may still wait for a lease."""
    try:
        await wait_for(pair.decode.url, lambda now: now.idle, seconds=5)
        await wait_for(pair.prefill.url, lambda now: now.running == now.waiting == 0, seconds=5)
    except (AssertionError, httpx.HTTPError):
        await restart(pair, pair.prefill, pair.decode)
        p = await hand.learn(pair.prefill.side_channel)
        await hand.pair(pair.prefill.url, pair.decode.url, p, "warm up again", again_after=pair.lease + 2)
        await quiet(pair)


async def restart(pair: VllmPair, *engines: VllmEngine) -> None:
    """All at the same time; back when each is ready."""
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(trio.to_thread.run_sync, pair.restart, engine)
