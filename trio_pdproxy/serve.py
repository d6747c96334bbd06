"""The app in a Hypercorn of our own, in this process: sockets, containment, signals, quiesce.

What the plain `hypercorn` command cannot do: end without cutting running requests, and end with an exit code that
says how. Its trio workers die at once on SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import hypercorn.trio.run
import trio
from hypercorn.config import Config, Sockets
from hypercorn.trio import serve as hypercorn_serve

from trio_pdproxy.config import Address, Settings
from trio_pdproxy.core.errors import only
from trio_pdproxy.web.admin import create_admin_app
from trio_pdproxy.web.app import ProxyApp
from trio_pdproxy.web.server import ContainedServer

log = logging.getLogger("trio_pdproxy.serve")

KEEP_ALIVE = 75.0
"""Seconds an idle client connection is kept: longer than the usual load balancer's minute."""


LAST_WORDS = 1.0
"""Seconds for the orderly end of everything after the second signal."""


class ServerError(Exception):
    """The server could not start, or its core failed while running. The text says why."""


class ServerConfig(Config):
    """Hypercorn's configuration for this app. `relay`: the app has the relay's paths, whose usual requests it is given
    straight."""

    def __init__(self, settings: Settings, bind: Address, *, relay: bool = True) -> None:
        super().__init__()
        self.bind = [str(bind)]
        self.graceful_timeout = settings.shutdown_grace
        self.keep_alive_timeout = KEEP_ALIVE
        self.keep_alive_max_requests = 1_000_000_000
        self.read_timeout = None  # it would cut every stream; uploads have a deadline of their own
        self.alpn_protocols = ["http/1.1"]  # a failed HTTP/2 stream gets no end at all and its client hangs
        self.backlog = 2048
        if settings.tls_cert_file is not None:
            self.certfile = str(settings.tls_cert_file)
            self.keyfile = str(settings.tls_key_file or settings.tls_cert_file)
            self.keyfile_password = ""  # else OpenSSL asks for one at the terminal
            if settings.tls_client_ca_file is not None:
                self.ca_certs = str(settings.tls_client_ca_file)
                self.verify_mode = ssl.VerifyMode.CERT_REQUIRED
        self.errorlog = None
        self.accesslog = None
        self.include_server_header = False
        self.write_timeout = settings.write_timeout
        self.relay = relay
        self._common: tuple[int, str, list[tuple[bytes, bytes]]] = (0, "", [])

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        """Those of every answer. The date among them is made once a second, not for each."""
        second = int(time.time())
        if self._common[:2] != (second, protocol):
            self._common = (second, protocol, super().response_headers(protocol))
        return self._common[2]

    def create_sockets(self) -> Sockets:
        sockets = super().create_sockets()
        for listening in (*sockets.secure_sockets, *sockets.insecure_sockets):
            # Hypercorn shields its sends from every cancellation; only the kernel can end one to a client that has
            # stopped reading. Accepted sockets inherit this.
            with suppress(OSError, AttributeError):
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.write_timeout * 1000))
        return sockets


async def serve(  # noqa: ASYNC128  Hypercorn is handed the status
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
    hypercorn.trio.run.TCPServer = ContainedServer  # type: ignore[attr-defined, assignment]
    try:
        async with trio.open_nursery() as nursery:
            if settings.admin_bind is not None:
                nursery.start_soon(_serve_admin, app, settings)
            await hypercorn_serve(
                app,
                ServerConfig(settings, settings.bind),
                shutdown_trigger=until_stopped,
                task_status=task_status,
            )
            nursery.cancel_scope.cancel("served")
    except BaseExceptionGroup as group:
        if (error := only(group, OSError)) is None:
            raise
        places = " or ".join(str(place) for place in (settings.bind, settings.admin_bind) if place is not None)
        raise ServerError(f"cannot listen on {places}: {error.strerror or error}") from error
    if app.failure is not None:
        raise ServerError(app.failure)


async def _serve_admin(app: ProxyApp, settings: Settings) -> None:
    """The admin paths on their own listener, from the app's start until cancelled."""
    await app.started.wait()
    assert settings.admin_bind is not None
    await hypercorn_serve(create_admin_app(app, settings), ServerConfig(settings, settings.admin_bind, relay=False))


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
        if (error := only(group, ServerError)) is None:
            raise
        raise error from None


async def run(app: ProxyApp, settings: Settings, announce: Callable[[str], None]) -> int:
    """Serve until signals say stop: the first quiesces, the second ends at once. Returns the exit code: 0, or 128
    and the second signal's number. `announce` is told the URL once it listens. Raises `ServerError`."""
    stop = trio.Event()
    killed_by = 0

    async def until_signals(scope: trio.CancelScope) -> None:
        nonlocal killed_by
        killed_by = await _second_signal(stop)
        log.warning("stopped by a second signal: what is still running ends now")
        app.pool.abandon()
        scope.cancel("second signal")
        # Hypercorn shields its sends; one to a client that has stopped reading would keep us here.
        threading.Thread(target=_exit_soon, args=(128 + killed_by,), daemon=True).start()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_signals, nursery.cancel_scope)
            async with trio.open_nursery() as serving_nursery:
                (url,) = await serving_nursery.start(partial(serve, app, settings, stop=stop))
                announce(str(url))
            nursery.cancel_scope.cancel("served")
    except BaseExceptionGroup as group:
        if (error := only(group, ServerError)) is None:
            raise
        raise error from None
    return 128 + killed_by if killed_by else 0


async def _second_signal(stop: trio.Event) -> int:
    """Set `stop` at the first SIGINT or SIGTERM; returns the number of the second."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            if stop.is_set():
                return int(number)
            log.info("stopping: running requests may finish; a second signal ends them")
            stop.set()
    raise AssertionError("a signal receiver does not end")


def _exit_soon(code: int) -> None:
    time.sleep(LAST_WORDS)
    os._exit(code)


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel("the core task died")
