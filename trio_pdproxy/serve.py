"""The app in a Hypercorn of our own, in this process: sockets, containment, signals, quiesce.

What the plain `hypercorn` command cannot do: end without cutting running requests, and end with an exit code that
says how. Its trio workers die at once on SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import hypercorn.trio.run
import trio
from hypercorn.config import Config, Sockets
from hypercorn.trio import serve as hypercorn_serve
from hypercorn.trio.tcp_server import TCPServer

from trio_pdproxy.config import Settings
from trio_pdproxy.core.errors import leaves
from trio_pdproxy.web.app import ProxyApp

log = logging.getLogger("trio_pdproxy.serve")

KEEP_ALIVE = 75.0
"""Seconds an idle client connection is kept: longer than the usual load balancer's minute."""


class ServerError(Exception):
    """The server could not start, or its core failed while running. The text says why."""


class ServerConfig(Config):
    """Hypercorn's configuration for this app."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.bind = [str(settings.bind)]
        self.graceful_timeout = settings.shutdown_grace
        self.keep_alive_timeout = KEEP_ALIVE
        self.keep_alive_max_requests = 1_000_000_000
        self.read_timeout = None  # it would cut every stream; uploads have a deadline of their own
        self.alpn_protocols = ["http/1.1"]  # a failed HTTP/2 stream gets no end at all and its client hangs
        self.backlog = 2048
        self.errorlog = None
        self.accesslog = None
        self.include_server_header = False
        self.write_timeout = settings.write_timeout

    def create_sockets(self) -> Sockets:
        sockets = super().create_sockets()
        for listening in (*sockets.secure_sockets, *sockets.insecure_sockets):
            # Hypercorn shields its sends from every cancellation; only the kernel can end one to a client that has
            # stopped reading. Accepted sockets inherit this.
            with suppress(OSError, AttributeError):
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.write_timeout * 1000))
        return sockets


class ContainedServer(TCPServer):
    """One client connection, whose failure stays its own.

    Hypercorn lets an exception of one connection end the whole server; a websocket upgrade with trailing bytes is
    enough (https://github.com/pgjones/hypercorn/issues/225).
    """

    async def run(self) -> None:
        try:
            await super().run()
        except* Exception as group:
            log.warning("a client connection failed: %s", group.exceptions[0], exc_info=group)


async def serve(
    app: ProxyApp,
    settings: Settings,
    *,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    stop: trio.Event | None = None,
) -> None:
    """Serve until `stop` is set, then quiesce: readiness says 503, new requests are refused, running ones have
    `shutdown_grace` seconds. Started with the URLs it listens on. Raises `ServerError`."""
    stop = trio.Event() if stop is None else stop

    async def until_stopped() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_after, app.core_died, nursery.cancel_scope)
            await stop.wait()
            nursery.cancel_scope.cancel("asked to stop")
        app.quiescing = True

    # Hypercorn looks the class up when a connection is served.
    hypercorn.trio.run.TCPServer = ContainedServer  # type: ignore[attr-defined]
    try:
        await hypercorn_serve(
            app,
            ServerConfig(settings),
            shutdown_trigger=until_stopped,
            task_status=task_status,
        )
    except OSError as error:
        raise ServerError(f"cannot listen on {settings.bind}: {error.strerror or error}") from error
    if app.failure is not None:
        raise ServerError(app.failure)


@asynccontextmanager
async def serving(app: ProxyApp, settings: Settings) -> AsyncIterator[str]:
    """The app served for as long as a block lasts; yields its URL. Raises `ServerError` as itself, not in a group."""
    stop = trio.Event()
    try:
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(partial(serve, app, settings, stop=stop))
            try:
                yield str(url)
            finally:
                stop.set()
    except BaseExceptionGroup as group:
        failed, others = group.split(ServerError)
        if failed is None or others is not None:
            raise
        raise leaves(failed)[0] from None


async def run(app: ProxyApp, settings: Settings, announce: Callable[[str], None]) -> int:
    """Serve until signals say stop: the first quiesces, the second ends at once. Returns the exit code: 0, or 128
    and the second signal's number. `announce` is told the URL once it listens. Raises `ServerError`."""
    stop = trio.Event()
    killed_by = 0
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def signals() -> None:
                nonlocal killed_by
                killed_by = await stop_on_signals(stop, scope)

            nursery.start_soon(signals)
            (url,) = await nursery.start(partial(serve, app, settings, stop=stop))
            announce(str(url))
    return 128 + killed_by if killed_by else 0


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel("the core task died")


async def stop_on_signals(stop: trio.Event, scope: trio.CancelScope) -> int:
    """First SIGINT or SIGTERM: `stop` is set. Second: `scope` is cancelled, and its number is returned."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            if stop.is_set():
                scope.cancel("second signal")
                return int(number)
            log.info("stopping: running requests may finish; a second signal ends them")
            stop.set()
    raise AssertionError("unreachable")
