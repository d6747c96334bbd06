"""A simulated engine: an HTTP server before an engine core, with a side channel and a script of faults."""

from __future__ import annotations

import hmac
import os
import uuid

import msgspec
import trio

from trio_pdproxy.sim import http_transport, render
from trio_pdproxy.sim.core import EngineCore, Role, State
from trio_pdproxy.sim.fabric import Fabric, Transport
from trio_pdproxy.sim.faults import GENERATION_PATHS, FaultScript, SeenRequest
from trio_pdproxy.sim.generate import generate
from trio_pdproxy.sim.http import Connection, Exchange
from trio_pdproxy.sim.pages import TOKEN_PATHS, page, tokens
from trio_pdproxy.sim.settings import SimSettings
from trio_pdproxy.sim.side_channel import SideChannel

_EXIT_AFTER = 0.05
"""A dead engine answers what it still has for this long before its server exits."""


class SimEngine:
    """One engine. Run `serve` for a real listener, or give `serve_stream` any trio stream; both may be mixed.

    What it has seen is in `requests`; what it holds is in the properties. `faults` breaks its answers.
    """

    def __init__(
        self,
        role: Role,
        *,
        name: str | None = None,
        settings: SimSettings | None = None,
        fabric: Transport | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        side_port: int = 0,
        engine_id: str | None = None,
    ) -> None:
        self.role: Role = role
        self.name = name or role
        self.settings = settings or SimSettings()
        self.fabric: Transport = fabric if fabric is not None else Fabric()
        self.host = host
        self.port = port
        self.requests: list[SeenRequest] = []
        self.faults = FaultScript()
        self._stopped = False
        self._side = SideChannel(host, side_port)
        self._turns = 0
        self._connections: dict[Connection, None] = {}
        self._serving: trio.CancelScope | None = None
        self._up = trio.Event()
        self._down = trio.Event()
        self._revived = trio.Event()
        self._id = engine_id or str(uuid.uuid4())
        self.ranks = self._new_ranks()
        """The engine core of each data-parallel rank; most engines have one."""

    # ------------------------------------------------------------ what it is

    @property
    def core(self) -> EngineCore:
        """Rank 0."""
        return self.ranks[0]

    @property
    def engine_id(self) -> str:
        """Rank 0's, as its side channel tells it: with several ranks it ends in `_dp0`."""
        return self.core.engine_id

    @property
    def rank_ids(self) -> tuple[str, ...]:
        """The engine id of each rank."""
        return tuple(core.engine_id for core in self.ranks)

    @property
    def alive(self) -> bool:
        """False once it was killed or has died of a request, until it is revived."""
        return not self.core.dead.is_set()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def side_channel(self) -> str:
        """Rank 0's; those of further ranks are on the ports after it."""
        return f"{self.core.host}:{self.core.port}"

    @property
    def coordinates(self) -> dict[str, str | int]:
        """What a decode leg has to be told of this P (besides `remote_request_id`); of rank 0 if it has several."""
        return self.coordinates_of(0)

    def coordinates_of(self, rank: int) -> dict[str, str | int]:
        core = self.ranks[rank]
        return {
            "remote_engine_id": core.engine_id,
            "remote_host": core.host,
            "remote_port": core.port,
            "tp_size": core.settings.tp_size,
            "pp_size": core.settings.pp_size,
        }

    # ---------------------------------------------------------- what it holds

    @property
    def blocks_held(self) -> int:
        for core in self.ranks:
            core.expire()
        return sum(core.pool.in_use for core in self.ranks)

    @property
    def kv_usage(self) -> float:
        return self.blocks_held / sum(core.pool.total for core in self.ranks)

    @property
    def running(self) -> int:
        return self._count(State.RUNNING)

    @property
    def waiting(self) -> int:
        return self._count(State.QUEUED, State.ADMITTED, State.REMOTE)

    @property
    def orphans(self) -> int:
        """D: sequences without a client whose blocks wait for a push. No real engine tells this number."""
        return self._count(State.ORPHAN)

    @property
    def pushes(self) -> int:
        """P: transfers that it has written."""
        return sum(core.pushes for core in self.ranks)

    @property
    def pulls(self) -> int:
        """D: transfers that it has read."""
        return sum(core.pulls for core in self.ranks)

    @property
    def stale_pulls(self) -> int:
        """P: reads of blocks that it no longer held for the reader. What was read may be anybody's."""
        return sum(core.stale_pulls for core in self.ranks)

    @property
    def expired(self) -> int:
        for core in self.ranks:
            core.expire()
        return sum(core.expired for core in self.ranks)

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    def _count(self, *states: State) -> int:
        return sum(core.counts[state] for core in self.ranks for state in states)

    # --------------------------------------------------------------- serving

    async def serve(self, *, task_status: trio.TaskStatus[SimEngine] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen for HTTP on host:port and for GET_META on the side channel, until cancelled.

        Port 0 picks one, which is then kept over kills and restarts. Of several ranks, each has a side channel.
        """
        started = False
        while True:
            try:
                async with trio.open_nursery() as nursery:
                    self._serving = nursery.cancel_scope
                    self._down = trio.Event()
                    await nursery.start(self._side.serve, self.ranks)
                    listeners = await self._listen()
                    self.port = listeners[0].socket.getsockname()[1]
                    for core in self.ranks:
                        core.url = self.url
                    await nursery.start(trio.serve_listeners, self.serve_stream, listeners)
                    if not started:
                        task_status.started(self)
                        started = True
                    self._up.set()
                    await self.core.dead.wait()
                    await trio.sleep(_EXIT_AFTER)
                    self._stop()
                    nursery.cancel_scope.cancel("engine exited")
            finally:
                self._up = trio.Event()
                self._serving = None
                self._down.set()
            await self._revived.wait()

    async def _listen(self) -> list[trio.SocketListener]:
        try:
            return await trio.open_tcp_listeners(self.port, host=self.host)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(error.errno, f"cannot listen on {self.host}:{self.port}: {why}") from error

    async def serve_stream(self, stream: trio.abc.Stream) -> None:
        """Serve one HTTP connection and close it. A dead engine closes it at once."""
        connection = Connection(stream, self._handle, self.settings.keep_alive)
        if not self.alive:
            connection.reset()
        self._connections[connection] = None
        try:
            await connection.run()
        finally:
            del self._connections[connection]

    async def kill(self) -> None:
        """As SIGKILL: connections are reset, the ports are closed, everything is forgotten."""
        self._stop()
        if self._serving is not None:
            self._serving.cancel("engine killed")
            await self._down.wait()

    async def revive(self, *, same_id: bool = False) -> None:
        """Start again on the same ports, with a new engine id unless told otherwise."""
        if self.alive:
            return
        await self.kill()  # one that died of a request may still be about to exit
        self._id = self._id if same_id else str(uuid.uuid4())
        self.ranks = self._new_ranks()
        self._stopped = False
        self._revived.set()
        if self._down.is_set():
            await self._up.wait()

    async def restart(self, same_id: bool = False) -> None:
        await self.kill()
        await self.revive(same_id=same_id)

    def _new_ranks(self) -> tuple[EngineCore, ...]:
        count = self.settings.dp_size
        ranks = tuple(
            EngineCore(
                self.role,
                self.settings,
                self.fabric,
                host=self._side.host,
                port=self._side.port_of(rank),
                engine_id=f"{self._id}_dp{rank}" if count > 1 else self._id,
            )
            for rank in range(count)
        )
        for core in ranks:
            core.ranks = ranks
            core.url = self.url
            self.fabric.attach(core)
        return ranks

    def _choose(self, rank: int | None) -> EngineCore:
        """The rank that was asked for, else each in turn. All sequences of a request stay together."""
        if rank is None:
            rank = self._turns % len(self.ranks)
            self._turns += 1
        return self.ranks[rank]

    def _stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._revived = trio.Event()
        self.core.die()
        for core in self.ranks:
            self.fabric.detach(core)
        for connection in self._connections:
            connection.reset()

    # ------------------------------------------------------------- answering

    async def _handle(self, exchange: Exchange) -> None:
        if self.core.dead.is_set():
            exchange.close_after = True
        if exchange.path.startswith("/v1/") and not self._is_allowed(exchange):
            await exchange.respond(401, b'{"error":"Unauthorized"}')
        elif exchange.path in GENERATION_PATHS and exchange.method == "POST":
            await self._generate(exchange)
        elif exchange.path.startswith("/sim/"):
            status, answer = await http_transport.answer(self.ranks, exchange.path, exchange.body)
            await exchange.respond(status, answer)
        else:
            await self._page(exchange)

    def _is_allowed(self, exchange: Exchange) -> bool:
        key = self.settings.api_key
        given = exchange.headers.get("authorization", "")
        return key is None or hmac.compare_digest(given.encode(), f"Bearer {key}".encode())

    async def _page(self, exchange: Exchange) -> None:
        seen = self._seen(exchange)
        if exchange.path in TOKEN_PATHS:
            self.requests.append(seen)
        exchange.fault = self.faults.take(seen)
        if await self._answered_by_fault(exchange):
            return
        await exchange.strike("before_head")
        if exchange.path in TOKEN_PATHS and exchange.method == "POST":
            content_type = exchange.headers.get("content-type", "")
            await exchange.respond(*tokens(exchange.path, exchange.body, content_type, self.settings))
            return
        found = page(exchange.path, self.ranks)
        allowed = "POST" if exchange.path in (*GENERATION_PATHS, *TOKEN_PATHS) else "GET"
        if found is None and allowed == "GET":
            await exchange.respond(404, b'{"detail":"Not Found"}')
        elif exchange.method != allowed or found is None:
            await exchange.respond(405, b'{"detail":"Method Not Allowed"}', [("allow", allowed)])
        else:
            # A dead engine says so on /health, while its server is still there.
            status = 503 if exchange.path == "/health" and not self.alive else 200
            await exchange.respond(status, found[0], content_type=found[1])

    async def _generate(self, exchange: Exchange) -> None:
        seen = self._seen(exchange)
        self.requests.append(seen)
        if len(self.requests) > 2 * self.settings.remember:
            del self.requests[: -self.settings.remember]
        fault = exchange.fault = self.faults.take(seen)
        complete = False
        try:
            if not await self._answered_by_fault(exchange):
                await generate(exchange, self.settings, self._choose, seen, fault)
            complete = True
        finally:
            seen.ended = trio.current_time()
            seen.status = exchange.status
            seen.how = "fault" if exchange.struck else "complete" if complete else "aborted"

    def _seen(self, exchange: Exchange) -> SeenRequest:
        try:
            body = msgspec.json.decode(exchange.body) if exchange.body else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = None
        return SeenRequest(
            id=exchange.headers.get("x-request-id"),
            method=exchange.method,
            path=exchange.path,
            headers=exchange.headers,
            raw=exchange.body,
            body=body,
            started=trio.current_time(),
        )

    async def _answered_by_fault(self, exchange: Exchange) -> bool:
        fault = exchange.fault
        if fault is None or fault.what != "status":
            return False
        exchange.fault = None
        exchange.struck = True
        await exchange.pause(fault)
        body = render.INTERNAL_ERROR if fault.body is None else fault.body
        await exchange.respond(fault.status, body, fault.headers)
        return True
