"""Simulated engines that come and go at addresses of their own, and clients that never stop asking."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import trio

from tests.discovery.emulator import Emulator, Json
from trio_pdproxy.config import Role, Settings
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.serve import serving
from trio_pdproxy.sim import SimEngine, SimSettings, expected_text
from trio_pdproxy.sim.fabric import Fabric
from trio_pdproxy.testing import until
from trio_pdproxy.web.app import ProxyApp, create_app

HTTP_PORT, SIDE_PORT = 8100, 5601
_hosts = count(1)


class Engines:
    """Each has its own loopback address, as pods have."""

    def __init__(self, nursery: trio.Nursery, settings: SimSettings | None = None) -> None:
        self._nursery = nursery
        self._fabric = Fabric()
        self._settings = settings or SimSettings(prefill_base=0.01, itl=0.002)
        self._scopes: dict[str, trio.CancelScope] = {}
        self.all: dict[str, SimEngine] = {}

    async def start(self, name: str, role: Role, *, port: int = HTTP_PORT, side_port: int = SIDE_PORT) -> SimEngine:
        number = next(_hosts)
        engine = SimEngine(
            role,
            name=name,
            settings=self._settings,
            fabric=self._fabric,
            host=f"127.0.{1 + number // 250}.{1 + number % 250}",
            port=port,
            side_port=side_port,
        )
        await self._nursery.start(self._serve, engine)
        self.all[name] = engine
        return engine

    async def _serve(  # noqa: ASYNC114, ASYNC128  the status is handed on
        self, engine: SimEngine, task_status: trio.TaskStatus[SimEngine] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.CancelScope() as scope:
            self._scopes[engine.name] = scope
            await engine.serve(task_status=task_status)

    def stop(self, name: str) -> None:
        """It is gone, whatever it had in hand."""
        self._scopes.pop(name).cancel("stopped")
        del self.all[name]

    async def finished(self, name: str) -> None:
        """As a pod that sleeps before it stops: until it gets nothing new and has nothing in hand; 10 s at most."""
        engine = self.all[name]
        with trio.move_on_after(10):
            while True:
                seen = self._posts(engine)
                await trio.sleep(0.4)
                if self._posts(engine) == seen and not engine.running + engine.waiting:
                    return
        raise AssertionError(f"{name} still gets requests")

    def _posts(self, engine: SimEngine) -> int:
        return sum(request.method == "POST" for request in engine.requests)


class Pods:
    """Those engines as pods of the emulated cluster."""

    def __init__(self, api: Emulator, engines: Engines) -> None:
        self.api = api
        self.engines = engines
        self._pods: dict[str, Json] = {}

    async def start(
        self, name: str, role: Role, *, ready: bool = True, labels: dict[str, str] | None = None
    ) -> SimEngine:
        engine = await self.engines.start(name, role)
        self._pods[name] = pod(name, role, engine.host, labels)
        await self.set(name, ready=ready)
        return engine

    async def set(self, name: str, *, ready: bool | None = None, deleting: bool = False) -> None:
        changed = self._pods[name]
        if ready is not None:
            changed["status"]["conditions"] = [{"type": "Ready", "status": "True" if ready else "False"}]
        if deleting:
            changed["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        await self.api.put(changed)

    async def retire(self, name: str) -> None:
        """As Kubernetes deletes a pod: marked, then (after its preStop) stopped, then gone."""
        await self.set(name, deleting=True)
        await self.engines.finished(name)
        self.engines.stop(name)
        await self.api.delete(name)


def pod(name: str, role: Role, address: str, labels: dict[str, str] | None = None) -> Json:
    ports = [{"name": "http", "containerPort": HTTP_PORT}, {"name": "nixl", "containerPort": SIDE_PORT}]
    return {
        "metadata": {"name": name, "namespace": "llm", "labels": {"llm-d.ai/role": role} | (labels or {})},
        "spec": {"containers": [{"name": "vllm", "ports": ports}]},
        "status": {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]},
    }


@asynccontextmanager
async def proxied(**settings: Any) -> AsyncIterator[tuple[ProxyApp, httpx.AsyncClient]]:
    """A proxy with these settings, and a client of it."""
    given: dict[str, Any] = {"bind": "127.0.0.1:0", "discovery_interval": 0.2, "health_interval": 2} | settings
    configured = Settings(**given)
    app = create_app(configured)
    async with serving(app, configured) as url, open_client(url, timeout=30) as client:
        yield app, client


async def until_usable(app: ProxyApp, *names: str, seconds: float = 15.0) -> None:
    """Until the pool has exactly these engines, all usable, each pair warm."""

    def settled() -> bool:
        engines = app.pool.engines
        return (
            {engine.name for engine in engines} == set(names)
            and all(engine.usable for engine in engines)
            and not app.pool.roster.cold
        )

    try:
        await until(settled, seconds)
    except AssertionError:
        shown = [(engine.name, engine.usable, engine.why) for engine in app.pool.engines]
        raise AssertionError(f"wanted {names}, there are {shown}") from None


@dataclass
class Load:
    """What became of the requests."""

    served: int = 0
    failures: list[str] = field(default_factory=list)


@asynccontextmanager
async def load(*clients: httpx.AsyncClient, each: int = 4) -> AsyncIterator[Load]:
    """`each` clients at every proxy that ask again and again until the block ends, and then for their last answers."""
    seen = Load()
    running = True
    numbers = count()

    async def ask(client: httpx.AsyncClient) -> None:
        while running:
            prompt = f"prompt {next(numbers)}"
            try:
                answer = await client.post(
                    "/v1/completions", json={"model": "sim", "prompt": prompt, "max_tokens": 5}, timeout=20
                )
            except httpx.HTTPError as error:
                seen.failures.append(repr(error))
                continue
            if answer.status_code != 200 or answer.json()["choices"][0]["text"] != expected_text(prompt, 5):
                seen.failures.append(f"{answer.status_code} {answer.text[:300]}")
            seen.served += 1

    async with trio.open_nursery() as nursery:
        for client in clients:
            for _ in range(each):
                nursery.start_soon(ask, client)
        try:
            yield seen
        finally:
            running = False


async def while_loaded(seen: Load, more: int = 20) -> None:
    """Until so many further requests were served."""
    target = seen.served + more
    await until(lambda: seen.served >= target, 20)
