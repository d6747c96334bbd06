"""One client connection: Hypercorn's, contained, bounded, and with a shorter way for the relay's bytes.

What is different from Hypercorn's own, and why:
- a failure of a connection stays its own. Hypercorn lets it end the whole server; a websocket upgrade with trailing
  bytes is enough (https://github.com/pgjones/hypercorn/issues/225);
- a send has a deadline: Hypercorn shields it (rightly: half of one would break the framing) from every cancellation, so
  that a client that has stopped reading would hold the connection for good;
- nobody is idle after the client's end: Hypercorn's idle timer would keep the connection's tasks and its descriptor for
  the whole keep-alive time;
- idleness is watched by one task, which looks at it now and then; Hypercorn starts two tasks for each request;
- the app is offered the connection itself (see direct.py), and the usual request comes to it straight (see plain.py).
"""

from __future__ import annotations

import logging
from typing import Any

import h11
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer

from trio_pdproxy.web import direct
from trio_pdproxy.web.direct import Direct
from trio_pdproxy.web.plain import BODY, Head, PlainRequest, read_head

log = logging.getLogger("trio_pdproxy.serve")


class ContainedServer(TCPServer):
    """See the module. `config` has a `write_timeout` and `relay` beside what Hypercorn's has (`ServerConfig`)."""

    config: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.direct = Direct(self.stream, self.send_lock, self._send, self._cut)
        self._app = self.app
        self.app: Any = self._call_app
        self._apart = trio.CancelScope()
        """Where the reading task waits for what the closing of the stream does not end."""
        self._closed = False
        """Nothing is to be read any more."""
        self._read_over = trio.Event()
        """Nothing is read any more."""
        self._watching = trio.CancelScope()
        self._next_reader: trio.Event | None = None
        """A task that waits to read on."""
        self._unread = b""
        """What it has to begin with."""
        self._h11_was_used = False
        self._plain: PlainRequest | None = None
        """The usual request in hand, if there is one."""
        self._plain_over: trio.Event | None = None
        """Somebody waits for its answer's end."""
        self.idle_task: Any = _Idle(self.config.keep_alive_timeout, self.context.terminated)

    async def run(self) -> None:
        try:
            await super().run()
        except* Exception as group:
            log.warning("a client connection failed: %s", group.exceptions[0], exc_info=group)

    async def _call_app(self, scope: Any, *rest: Any) -> None:
        """The app, offered a shorter way to this connection where that was tried."""
        if direct.SUPPORTED and scope["type"] == "http" and scope["http_version"] == "1.1":
            scope["extensions"][direct.EXTENSION] = self.direct
        await self._app(scope, *rest)

    # -- receiving -------------------------------------------------------------------------------

    async def _read_data(self) -> None:
        """Until the client's end, the connection's, or an idle time that is too long."""
        self._let_read_on(b"")
        with self._watching:
            if await self.idle_task.lasts_too_long():
                if self._speaks_http_1:
                    await self.protocol_send(Closed())
                else:  # it may not have sent all that it has to
                    self._stop_reading("idle for too long, or the server stops")
        await self._read_over.wait()
        await self._gone()

    async def _read_on(self) -> None:
        """Read on until a usual request has begun; serve it, while another task reads on; then wait to be that other
        one. (Were it the other that serves the request, it would begin when this one has come to its next wait.)"""
        while True:
            data, self._unread = self._unread, b""
            head, data = await self._read_up_to_a_head(data)
            if head is None:
                self._read_over.set()
                self._watching.cancel("the connection is over")
                if self._next_reader is not None:
                    self._next_reader.set()
                return
            await self.context.mark_request()
            request, scope, data = self._begin_plain(head, data[head.end :])
            self._let_read_on(data)
            await request.run(self._call_app, scope)
            del request, scope, head  # they hold the request's body, and this task may wait for long
            if self._next_reader is not None:
                return  # the next request was over before this one's debts
            if not self._read_over.is_set():
                self._next_reader = trio.Event()
                await self._next_reader.wait()
            if self._read_over.is_set():
                return

    def _let_read_on(self, data: bytes) -> None:
        """Let another task read on, with what has been read already."""
        self._unread = data
        if self._next_reader is None:
            self._task_group.spawn(self._read_on)
        else:
            self._next_reader.set()
            self._next_reader = None

    async def _read_up_to_a_head(self, data: bytes) -> tuple[Head | None, bytes]:
        """Hand what has come and comes to whom it belongs, up to a usual request's head; None: nothing more comes, or
        nothing more is to be read. Who closes the stream ends a read of it."""
        while not self._closed:  # it may have been given up in the instant in which this came: nothing is begun
            if not data:
                try:
                    data = await self._receive()
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
                if not data:
                    if self._plain is None and not self._closed:
                        await self._hand_on(b"")
                    break
            elif self._plain is not None:
                data = self._plain.feed(data)
                if data or self._plain.answered_early:  # a request that comes before the last one's answer waits
                    self._plain_over = trio.Event()
                    await self._plain_over.wait()
            elif (head := self._usual_head(data)) is not None:
                return head, data
            else:
                self._h11_was_used = True
                await self._hand_on(data)
                data = b""
        return None, b""

    async def _hand_on(self, data: bytes) -> None:
        """To Hypercorn's layers, which may wait for what never comes once the connection is closed."""
        with trio.CancelScope() as self._apart:
            await self.protocol.handle(RawData(data))

    async def _receive(self) -> bytes:
        if self._speaks_http_1:
            return await self.direct.receive_some(MAX_RECV)
        with trio.CancelScope() as self._apart:
            return await self.direct.receive_some(MAX_RECV)
        return b""

    def _stop_reading(self, why: str) -> None:
        """For who has closed the stream (of HTTP/2 also for who has not): nobody is to wait for anything else now."""
        self._closed = True
        self._apart.cancel(why)
        self._let_plain_end()

    def _let_plain_end(self) -> None:
        if self._plain_over is not None:
            self._plain_over.set()
            self._plain_over = None

    @property
    def _speaks_http_1(self) -> bool:
        return isinstance(self.protocol.protocol, H11Protocol)

    @property
    def _between_requests(self) -> bool:
        """No request is in hand whose answer is not complete."""
        protocol = self.protocol.protocol
        return self._plain is None and isinstance(protocol, H11Protocol) and protocol.stream is None

    # -- the usual request -----------------------------------------------------------------------

    def _usual_head(self, data: bytes) -> Head | None:
        """A request that h11 need not see: nothing of another one may be left there."""
        if not (direct.SUPPORTED and self.config.relay and self._between_requests):
            return None
        if self._h11_was_used:
            connection = self.protocol.protocol.connection
            if not isinstance(connection, h11.Connection) or connection.trailing_data[0]:
                return None
            if not connection.our_state is connection.their_state is h11.IDLE:
                return None
        return read_head(data)

    def _begin_plain(self, head: Head, data: bytes) -> tuple[PlainRequest, dict[str, Any], bytes]:
        """Begin it, with what came behind its head; with its scope, and what is behind its body."""
        self.idle_task.end()
        about = self.protocol
        self._plain = request = PlainRequest(head, self.config.response_headers, self._send_or_keep, self._plain_ended)
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": "POST",
            "scheme": "https" if about.ssl else "http",
            "path": head.path.decode("ascii"),
            "raw_path": head.path,
            "query_string": b"",
            "root_path": self.config.root_path,
            "headers": head.headers,
            "client": about.client,
            "server": about.server,
            "state": about.state.copy(),
            "extensions": {},
        }
        if len(data) >= head.length:
            scope["extensions"][BODY] = data[: head.length]
        return request, scope, request.feed(data)

    async def _plain_ended(self, keep: bool) -> None:
        """Its answer is out, whatever the app has still to do."""
        if keep and not self.context.terminated.is_set():
            self._plain = None
            self._let_plain_end()
            if not self._read_over.is_set():
                self.idle_task.begin()
        else:
            await self.protocol_send(Closed())
            self._plain = None  # it holds us

    async def _gone(self) -> None:
        """Nothing more will come from the client, or nothing more can be sent to it."""
        idle = self._between_requests
        self.direct.lose()
        if self._plain is not None:
            self._plain.lose()
        await self.protocol.handle(Closed())
        if idle:
            await self._close()  # what was answered may have debts to settle, which its client need not wait for

    # -- sending ---------------------------------------------------------------------------------

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            if event.data:  # the end of a body whose length was declared is nothing
                await self._send_or_keep(event.data)
        elif isinstance(event, Updated):
            if not event.idle:
                self.idle_task.end()
            elif self.context.terminated.is_set():
                await self.protocol_send(Closed())
            elif not self._read_over.is_set():
                self.idle_task.begin()
        else:
            self._closed = True  # from now on, though it may take a while
            try:
                # Quart-Trio may cancel who sends the end of an answer; half a close would leave the connection open.
                with trio.CancelScope(deadline=trio.current_time() + self.config.write_timeout, shield=True):
                    await super().protocol_send(event)
            finally:
                await self._give_up("the connection is closed")  # noqa: ASYNC102  shielded inside, and waits for nobody

    async def _send_or_keep(self, data: bytes) -> None:
        if not self.direct.keeps(data):
            await self._send(data)

    async def _send(self, data: bytes | memoryview) -> None:
        """All of it, within the write timeout, or the connection ends."""
        if (sent := self.direct.send_now(data)) == len(data):
            return
        try:
            with trio.fail_after(self.config.write_timeout, shield=True):
                async with self.send_lock:
                    await self.stream.send_all(memoryview(data)[sent:])
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            # The rest is the reading task's: this one may be the app's, which is cancelled when the client is lost.
            await self._give_up("the client is gone")

    async def _give_up(self, why: str) -> None:
        """Close the stream, should it not have come to that, and let nobody wait for more of it."""
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self.stream)
        self._stop_reading(why)

    async def _cut(self) -> None:
        """Nothing more comes on this connection, and its client is to see that now."""
        await self.protocol_send(Closed())


class _Idle:
    """In place of Hypercorn's idle task. Beginning and ending cost next to nothing: every request does both."""

    def __init__(self, patience: float, stops: Any) -> None:
        self._patience = patience
        self._stops = stops
        self._since: float | None = None
        """On trio's clock; None where it is not idle."""

    def begin(self) -> None:
        self._since = trio.current_time()

    def end(self) -> None:
        self._since = None

    async def lasts_too_long(self) -> bool:
        """Wait until it does, or until the server stops: that does not wait for who only keeps a connection. False: it
        stops, and has a request in hand."""
        while not self._stops.is_set():
            now = trio.current_time()
            until = (now if self._since is None else self._since) + self._patience
            if until <= now:
                break
            with trio.move_on_at(until):
                await self._stops.wait()
        return self._since is not None

    async def restart(self, *_: object) -> None:
        """Hypercorn's name for it, at the connection's start."""
        self.begin()
