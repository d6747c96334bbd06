"""The whole stack in memory: simulated engines, the app behind Hypercorn's connection class, and a client.

Nothing in it touches a socket, a thread or the real clock, so under `MockClock(autojump_threshold=0)` an hour's
deadline takes a millisecond, and every step of it is a step of trio's scheduler (see `schedules` and `sweep`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from trio.testing import wait_all_tasks_blocked

from trio_pdproxy.config import Settings
from trio_pdproxy.engines.connections import KEEPALIVE
from trio_pdproxy.engines.coordinates import Meta, SideChannelSilentError, read_meta
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.engines.wire import BrokenError
from trio_pdproxy.serve import ServerConfig
from trio_pdproxy.sim import Cluster, SimEngine, SimSettings, build_cluster
from trio_pdproxy.sim.side_channel import handshake_payload
from trio_pdproxy.testing.client import requested
from trio_pdproxy.testing.network import MemoryStream, Network
from trio_pdproxy.testing.rig import Rig, spec_of, until_ready
from trio_pdproxy.testing.tasks import Tree, task_tree
from trio_pdproxy.web.app import ProxyApp, create_app
from trio_pdproxy.web.server import ContainedServer

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
        raise SideChannelSilentError(f"no answer from the side channel {host}:{port}")


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
    engines: trio.Nursery
    """Where each connection to an engine is a task, at the engine's end. Outlives the proxy."""
    server: trio.Nursery
    """Where each client connection is a task."""
    core: trio.Nursery
    """Where the app's lifespan is a task."""
    connections: set[trio.CancelScope]
    """Around each client connection's task."""

    def cancel_connections(self) -> None:
        """Cancel what serves the clients, as a server does at the end of its grace."""
        for scope in self.connections:
            scope.cancel("the server ends")

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
        await self.until(lambda: all(name.endswith(but) for name in self.leftovers()), seconds)
        await wait_all_tasks_blocked()  # a connection's own end comes after the last thing it served

    async def ended(self, seconds: float = 1000.0) -> None:
        """Wait until no request is in hand, no connection to an engine busy and none of a client open, whatever decode
        engines still hold."""
        await self._until_none("blocks", seconds)
        await self.until(lambda: not self.server.child_tasks, seconds)

    async def until(self, holds: Callable[[], object], seconds: float = 1000.0) -> None:
        """Until `holds()` is true, looked at ever more seldom; an AssertionError after `seconds`."""
        deadline = trio.current_time() + seconds
        pause = 0.001
        while not holds():
            if trio.current_time() >= deadline:
                raise AssertionError(f"not within {seconds:g} s; left over: {self.leftovers()}")
            await trio.sleep(pause)
            pause = min(2 * pause, 8.0)

    async def visit(self, path: str = "/v1/completions", *, leave_after: float = inf, **body: Any) -> Visit:
        """One request on a connection of its own, which the client closes at its end or after `leave_after` seconds."""
        visit = Visit()
        began = trio.current_time()
        with trio.move_on_after(leave_after) as patience:
            with suppress(BrokenError):  # what had come until then is in the visit
                await self._visit(visit, path, {"model": "sim", "prompt": "hello", **body})
        if patience.cancelled_caught:
            visit.end = "left"
        visit.seconds = trio.current_time() - began
        return visit

    async def _visit(self, visit: Visit, path: str, body: dict[str, Any]) -> None:
        async with requested(self.url, path, body, dial=self.network.dial) as connection:
            head = await connection.receive_head()
            visit.status, visit.headers, visit.end = head.status, tuple(head.headers), "cut"
            while piece := await connection.receive_body():
                visit.raw += piece
            visit.end = "complete"


@asynccontextmanager
async def open_memory_rig(
    prefill: int = 1,
    decode: int = 1,
    *,
    sim: SimSettings | None = None,
    decode_sim: SimSettings | None = None,
    ready: bool = True,
    warm: bool = False,
    jitter: int = 0,
    **settings: Any,
) -> AsyncIterator[MemoryRig]:
    """Engines, proxy and client in memory, ready (unless told not to wait), until the block ends.

    The engines are looked at once and then not for an hour, unless poked or told otherwise by `health_interval`:
    virtual hours pass quickly, and each look is a step more. `warm`: the connections of that first look are still
    there, to be used again. `jitter`: see `MemoryStream`.
    """
    cluster = build_cluster(prefill=prefill, decode=decode, settings=sim, decode_settings=decode_sim)
    network = Network(jitter)
    configured = Settings(
        prefill=[spec_of(e) for e in cluster.prefill],
        decode=[spec_of(e) for e in cluster.decode],
        **{"health_interval": 3600.0, "warm_up": False, **settings},
    )
    app = create_app(configured, side_channel=SimSideChannel(cluster), dial=network.dial)
    async with trio.open_nursery() as engines:
        for engine in cluster.engines:
            network.listen(engine.host, engine.port, engine.serve_stream, engines, up=_alive(engine))
        url = f"http://{HOST}:{PORT}"
        connections: set[trio.CancelScope] = set()
        async with (
            _served(app, configured, network, connections) as (server, core),
            open_client(url, timeout=1e6, dial=network.dial) as client,
        ):
            if ready:
                await until_ready(app)
                if not warm:
                    await _cool(app)
                for engine in cluster.engines:
                    engine.requests.clear()  # the probe is nobody's request
            yield MemoryRig(cluster, app, url, client, network, engines, server, core, connections)
        engines.cancel_scope.cancel("the rig is closed")


async def _cool(app: ProxyApp) -> None:
    """As if the engines had never been talked to: no connection is kept alive."""
    await trio.sleep(KEEPALIVE)
    for engine in app.pool.engines:
        await engine.connections.expire()


def _alive(engine: SimEngine) -> Any:
    return lambda: engine.alive


@asynccontextmanager
async def _served(
    app: ProxyApp, settings: Settings, network: Network, connections: set[trio.CancelScope]
) -> AsyncIterator[tuple[trio.Nursery, trio.Nursery]]:
    """What Hypercorn's worker does with an app, without its listeners: lifespan startup, connections, the graceful
    end, lifespan shutdown."""
    config = ServerConfig(settings, settings.bind)
    wrapped = ASGIWrapper(app)
    context = WorkerContext(None)
    lifespan = Lifespan(wrapped, config, {})

    async def connected(stream: MemoryStream) -> None:
        with trio.CancelScope() as scope:
            connections.add(scope)
            try:
                # It is said to want a socket's stream, and asks it for its addresses.
                await ContainedServer(wrapped, config, context, {}, cast("Any", stream)).run()
            finally:
                connections.discard(scope)
                stream.close_now()

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
                await context.terminated.set()  # noqa: ASYNC102  as Hypercorn does it, and it waits for nothing
                server.cancel_scope.deadline = trio.current_time() + config.graceful_timeout
        await lifespan.wait_for_shutdown()
        core.cancel_scope.cancel("served")
