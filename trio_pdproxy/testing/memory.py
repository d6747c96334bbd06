"""The whole stack in memory: simulated engines, the app behind Hypercorn's connection class, and a client.

Nothing in it touches a socket, a thread or the real clock, so under `MockClock(autojump_threshold=0)` an hour's
deadline takes a millisecond, and every step of it is a step of trio's scheduler (see `schedules` and `sweep`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext

from trio_pdproxy.config import Settings
from trio_pdproxy.engines.coordinates import Meta, SideChannelError, read_meta
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.engines.wire import BrokenError
from trio_pdproxy.serve import ContainedServer, ServerConfig
from trio_pdproxy.sim import Cluster, SimEngine, SimSettings, build_cluster
from trio_pdproxy.sim.side_channel import handshake_payload
from trio_pdproxy.testing.client import requested
from trio_pdproxy.testing.network import MemoryStream, Network
from trio_pdproxy.testing.rig import Rig, spec_of, until_ready
from trio_pdproxy.testing.tasks import Tree, task_tree
from trio_pdproxy.testing.waiting import until
from trio_pdproxy.web.app import ProxyApp, create_app

HOST, PORT = "proxy", 80


class SimSideChannel:
    """Answers for the simulated engines of a cluster, as their own side channels would."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def ask(self, host: str, port: int) -> Meta:
        await trio.lowlevel.checkpoint()
        for engine in self._cluster.engines:
            core = engine.core
            if (core.host, core.port) == (host, port) and engine.alive and not core.side_channel_broken.is_set():
                return read_meta(handshake_payload(core), f"{host}:{port}")
        raise SideChannelError(f"no answer from the side channel {host}:{port}")


@dataclass(slots=True)
class Visit:
    """One request on a connection of its own, as the client saw it."""

    status: int | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    raw: bytes = b""
    end: Literal["complete", "cut", "none", "left"] = "none"
    """cut: the body broke off; none: the connection closed without an answer; left: the client did."""
    seconds: float = 0.0
    """Virtual ones, from the request to the end."""


@dataclass(slots=True)
class MemoryRig(Rig):
    """A `Rig` whose network and task trees are at hand."""

    network: Network
    server: trio.Nursery
    """Where each client connection is a task."""
    core: trio.Nursery
    """Where the app's lifespan is a task."""

    def tasks(self) -> Tree:
        """What runs in the proxy: client connections and what they started, and the app's core."""
        return task_tree(self.server, self.core)

    def leftovers(self) -> dict[str, int]:
        """As of any rig, and the connections to engines that are neither idle nor closed."""
        found = Rig.leftovers(self)
        for engine in self.app.pool.engines:
            if busy := engine.connections.open - engine.connections.idle:
                found[f"{engine.name} busy connections"] = busy
        return found

    async def quiet(self, seconds: float = 1000.0) -> None:
        """As of any rig; virtual seconds cost nothing, so settling and rescue fit in."""
        await self._until_none("-", seconds)

    async def _until_none(self, but: str, seconds: float) -> None:
        deadline = trio.current_time() + seconds
        pause = 0.001
        while left := {name: count for name, count in self.leftovers().items() if not name.endswith(but)}:
            if trio.current_time() >= deadline:
                raise AssertionError(f"left over: {left}")
            await trio.sleep(pause)
            pause = min(2 * pause, 8.0)

    async def ended(self, seconds: float = 1000.0) -> None:
        """Wait until no request is in hand and no connection to an engine busy, whatever decode engines still hold."""
        await self._until_none("blocks", seconds)

    async def until(self, holds: Callable[[], object], seconds: float = 1000.0) -> None:
        await until(holds, seconds, step=0.01)

    async def visit(self, path: str = "/v1/completions", *, leave_after: float = inf, **body: Any) -> Visit:
        """One request on a connection of its own, which the client closes at its end or after `leave_after` seconds."""
        visit = Visit()
        began = trio.current_time()
        body = {"model": "sim", "prompt": "hello", **body}
        async with requested(self.url, path, body, dial=self.network.dial) as connection:
            with trio.move_on_after(leave_after) as patience:
                try:
                    head = await connection.receive_head()
                    visit.status, visit.headers, visit.end = head.status, tuple(head.headers), "cut"
                    while piece := await connection.receive_body():
                        visit.raw += piece
                    visit.end = "complete"
                except BrokenError:
                    pass
            if patience.cancelled_caught:
                visit.end = "left"
        visit.seconds = trio.current_time() - began
        return visit


@asynccontextmanager
async def open_memory_rig(
    prefill: int = 1,
    decode: int = 1,
    *,
    sim: SimSettings | None = None,
    decode_sim: SimSettings | None = None,
    ready: bool = True,
    **settings: Any,
) -> AsyncIterator[MemoryRig]:
    """Engines, proxy and client in memory, ready (unless told not to wait), until the block ends.

    The engines are looked at once and then not for an hour, unless poked or told otherwise by `health_interval`:
    virtual hours pass quickly, and each look is a step more.
    """
    cluster = build_cluster(prefill=prefill, decode=decode, settings=sim, decode_settings=decode_sim)
    network = Network()
    configured = Settings(
        prefill=[spec_of(e) for e in cluster.prefill],
        decode=[spec_of(e) for e in cluster.decode],
        **{"health_interval": 3600.0, **settings},
    )
    app = create_app(configured, side_channel=SimSideChannel(cluster), dial=network.dial)
    async with trio.open_nursery() as engines:
        for engine in cluster.engines:
            network.listen(engine.host, engine.port, engine.serve_stream, engines, up=_alive(engine))
        url = f"http://{HOST}:{PORT}"
        async with (
            _served(app, configured, network) as (server, core),
            open_client(url, timeout=1e6, dial=network.dial) as client,
        ):
            if ready:
                await until_ready(app)
            yield MemoryRig(cluster, app, url, client, network, server, core)
        engines.cancel_scope.cancel("the rig is closed")


def _alive(engine: SimEngine) -> Any:
    return lambda: engine.alive


@asynccontextmanager
async def _served(
    app: ProxyApp, settings: Settings, network: Network
) -> AsyncIterator[tuple[trio.Nursery, trio.Nursery]]:
    """What Hypercorn's worker does with an app, without its listeners: lifespan startup, connections, the graceful
    end, lifespan shutdown."""
    config = ServerConfig(settings)
    wrapped = ASGIWrapper(app)
    context = WorkerContext(None)
    lifespan = Lifespan(wrapped, config, {})

    async def connected(stream: MemoryStream) -> None:
        await ContainedServer(wrapped, config, context, {}, stream).run()

    async with trio.open_nursery() as core:
        await core.start(lifespan.handle_lifespan)
        await lifespan.wait_for_startup()
        async with trio.open_nursery() as server:
            network.listen(HOST, PORT, connected, server, stall=settings.write_timeout)
            try:
                yield server, core
            finally:
                network.close(HOST, PORT)
                app.quiescing = True
                await context.terminated.set()
                server.cancel_scope.deadline = trio.current_time() + config.graceful_timeout
        await lifespan.wait_for_shutdown()
        core.cancel_scope.cancel("served")
