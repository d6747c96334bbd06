"""The whole stack over real sockets: simulated engines, the app, its server, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from trio_pdproxy.config import EngineSpec, Settings
from trio_pdproxy.core import sse
from trio_pdproxy.core.report import Report
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.serve import serving
from trio_pdproxy.sim import Cluster, SimEngine, SimSettings, open_cluster
from trio_pdproxy.testing.waiting import until
from trio_pdproxy.web.app import ProxyApp, create_app


@dataclass(frozen=True, slots=True)
class Streamed:
    """A streamed answer as a client saw it."""

    status: int
    headers: dict[str, str]
    raw: bytes
    complete: bool
    """The body ended properly (False: the connection broke off)."""

    @property
    def events(self) -> list[bytes]:
        return sse.events(self.raw)

    @property
    def text(self) -> str:
        """The generated text, of completions or chat."""
        pieces: list[str] = []
        for event in self.events:
            if event == b"[DONE]":
                continue
            choices = msgspec.json.decode(event).get("choices", ())
            pieces.extend(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices)
        return "".join(pieces)


@dataclass(slots=True)
class Rig:
    """What a test needs of a running stack."""

    cluster: Cluster
    app: ProxyApp
    url: str
    client: httpx.AsyncClient

    @property
    def p(self) -> SimEngine:
        return self.cluster.prefill[0]

    @property
    def d(self) -> SimEngine:
        return self.cluster.decode[0]

    @property
    def report(self) -> Report:
        """The exchange that ended last. It ends a moment after its client has its answer: ask once it is `quiet`."""
        return self.app.recent[-1]

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": "sim", "prompt": "hello", **body})

    async def stream(self, path: str = "/v1/completions", **body: Any) -> Streamed:
        """A streamed request, read to its end, whatever kind of end."""
        raw = b""
        complete = True
        body = {"model": "sim", "stream": True, **body}
        if path == "/v1/completions":
            body.setdefault("prompt", "hello")
        async with self.client.stream("POST", path, json=body) as response:
            try:
                async for data in response.aiter_raw():
                    raw += data
            except httpx.ReadError:
                complete = False
        return Streamed(response.status_code, dict(response.headers), raw, complete)

    async def quiet(self, seconds: float = 5.0) -> None:
        """Wait until nothing is left of any request: no place taken, no block held. Fails after `seconds`."""
        try:
            await until(lambda: not self.leftovers(), seconds)
        except AssertionError:
            raise AssertionError(f"left over after {seconds:g} s: {self.leftovers()}") from None

    def leftovers(self) -> dict[str, int]:
        """What is still held where, by name; empty when all is quiet. Prefill blocks of probes do not count."""
        found: dict[str, int] = {}
        for engine in self.app.pool.engines:
            found[f"{engine.name} places"] = engine.inflight
            found[f"{engine.name} debts"] = engine.debts
        for sim in self.cluster.decode:
            found[f"{sim.name} blocks"] = sim.blocks_held
            found[f"{sim.name} running"] = sim.running
            found[f"{sim.name} waiting"] = sim.waiting
        found["requests in hand"] = self.app.active
        found["queue"] = self.app.pool.waiting
        return {name: count for name, count in found.items() if count}


def spec_of(engine: SimEngine, **more: Any) -> EngineSpec:
    """How the proxy is told of a simulated engine."""
    return EngineSpec(**({"url": engine.url, "side_channel": engine.side_channel, "name": engine.name} | more))


@asynccontextmanager
async def open_rig(
    prefill: int = 1, decode: int = 1, *, sim: SimSettings | None = None, ready: bool = True, **settings: Any
) -> AsyncIterator[Rig]:
    """Engines, proxy and client on free ports of 127.0.0.1, ready (unless told not to wait), until the block ends."""
    async with (
        open_cluster(prefill=prefill, decode=decode, settings=sim or SimSettings()) as cluster,
        open_rig_on(cluster, ready=ready, **settings) as rig,
    ):
        yield rig


@asynccontextmanager
async def open_rig_on(
    cluster: Cluster,
    *,
    prefill: int | None = None,
    decode: int | None = None,
    prefill_spec: dict[str, Any] | None = None,
    decode_spec: dict[str, Any] | None = None,
    ready: bool = True,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Proxy and client in front of a cluster (of its first `prefill` and `decode` engines), the prefill engines
    and the decode engines described with `prefill_spec` and `decode_spec` on top of what is true."""
    configured = Settings(
        prefill=[spec_of(e, **(prefill_spec or {})) for e in cluster.prefill[:prefill]],
        decode=[spec_of(e, **(decode_spec or {})) for e in cluster.decode[:decode]],
        bind="127.0.0.1:0",
        **({"warm_up": False} | settings),
    )
    app = create_app(configured)
    async with serving(app, configured) as url, open_client(url, timeout=30) as client:
        if ready:
            await until_ready(app)
        yield Rig(cluster, app, url, client)


async def until_ready(app: ProxyApp, seconds: float = 10.0) -> None:
    """Wait until every engine is usable (the app itself is ready with the first pair). Fails after `seconds`."""
    try:
        await until(lambda: all(engine.usable for engine in app.pool.engines) and not app.missing(), seconds)
    except AssertionError:
        raise AssertionError(f"not ready after {seconds:g} s: {app.missing()}") from None
