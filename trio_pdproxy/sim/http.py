"""An HTTP/1.1 server connection on any trio stream, which can be made to break at any byte.

h11 frames requests, heads and whole bodies. The events of a stream are framed here: one chunk and one write
an event, as uvicorn does it, without h11's cost for each of them.

A client that closes, or shuts down its writing side, cancels the handler at once, as with the real server
(uvicorn). The handler learns of it as `trio.Cancelled` and must do its accounting in `finally`.
"""

from __future__ import annotations

import contextlib
import email.utils
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable

import h11
import trio

from trio_pdproxy.sim.faults import Fault, Where
from trio_pdproxy.sim.render import DONE, INTERNAL, INTERNAL_ERROR, error_frame

GARBAGE = b"\x16\x03\x01zz not http at all\r\n\x00\xff\xfe\r\n"
EXTRA = b'{"more": "than was declared"}'

_READ = 65536
_LINGER_NOTHING = struct.pack("ii", 1, 0)

Headers = Iterable[tuple[str, str]]


class Struck(Exception):
    """A fault has ended the answer; the connection knows what to do with the stream."""


class Exchange:
    """One request and its answer: one call of `respond`, or `start`, `event`s and `finish`."""

    def __init__(self, connection: Connection, request: h11.Request, body: bytes) -> None:
        self._connection = connection
        self.method = request.method.decode("ascii")
        self.path = request.target.decode("ascii", "replace").partition("?")[0]
        self.headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers}
        self.body = body
        self.fault: Fault | None = None
        self.status: int | None = None
        self.struck = False
        self.failure: list[bytes] | None = [error_frame(INTERNAL), DONE]
        """What an `sse_error` ends a stream with; None cuts it."""
        self.close_after = False
        """Set by the handler: this answer is the connection's last."""
        self._chunked = request.http_version >= b"1.1"
        self._events = 0

    async def respond(
        self, status: int, body: bytes, headers: Headers = (), content_type: str = "application/json"
    ) -> None:
        """Send a whole answer."""
        head = [("content-length", str(len(body))), ("content-type", content_type), *headers]
        await self._send_head(status, head)
        connection = self._connection
        half = len(body) // 2 if self._is_due("mid_body") else 0
        if half:
            await connection.send(h11.Data(body[:half]))
        await self.strike("mid_body")
        await connection.send(h11.Data(body[half:]))
        await self.strike("after_body")
        await self._end()

    async def start(self, status: int = 200, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Send the head of a stream."""
        head = [("content-type", content_type)]
        if self._chunked:
            head.append(("transfer-encoding", "chunked"))
        await self._send_head(status, head)

    async def event(self, data: bytes) -> None:
        """Send one event of a stream, as one chunk in one write."""
        if self.fault is not None and self._events == self.fault.after:
            await self.strike("mid_body")
        self._events += 1
        await self._connection.send_raw(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def end_with(self, events: list[bytes] | None) -> None:
        """Send the last events of a stream and end it; None: cut it, without the chunk that ends a body."""
        if events is None:
            self._connection.doomed = True
            return
        for event in events:
            await self.event(event)
        await self.finish()

    async def finish(self) -> None:
        """End a stream properly. A `mid_body` fault that waited for more events acts here at the latest."""
        await self.strike("mid_body")
        await self.strike("after_body")
        await self._end()

    async def strike(self, where: Where) -> None:
        """Let the fault act if this is its place. Raises Struck unless the answer goes on."""
        fault = self.fault
        if fault is None or not self._is_due(where):
            return
        self.fault = None
        self.struck = True
        await self.pause(fault)
        connection = self._connection
        if fault.what == "hang":
            await trio.sleep_forever()
        elif fault.what == "sse_error":
            await self._answer_error()
            raise Struck
        elif fault.what in ("reset", "fin", "garbage"):
            connection.doomed = True
            connection.linger = fault.what != "reset"
            if fault.what == "garbage":
                await connection.send_raw(fault.body or GARBAGE)
            raise Struck

    async def pause(self, fault: Fault) -> None:
        """What a fault waits for before it acts."""
        if fault.delay > 0:
            await trio.sleep(fault.delay)
        if fault.until is not None:
            await fault.until.wait()

    def _is_due(self, where: Where) -> bool:
        fault = self.fault
        if fault is None or fault.where != where:
            return False
        return fault.what not in ("status", "extra", "no_params", "other_params")

    async def _answer_error(self) -> None:
        if self.status is None and self._is_stream_request():
            await self.start()
        if self.status is None:
            await self.respond(500, INTERNAL_ERROR)
            return
        await self.end_with(self.failure)

    def _is_stream_request(self) -> bool:
        compact = self.body.replace(b" ", b"")
        return b'"stream":true' in compact

    async def _send_head(self, status: int, headers: list[tuple[str, str]]) -> None:
        connection = self._connection
        self.status = status
        now = email.utils.formatdate(usegmt=True)
        everything = [("date", now), ("server", "uvicorn"), *headers, ("vary", "Origin")]
        if self.close_after:
            everything.append(("connection", "close"))
        raw = connection.h11.send(h11.Response(status_code=status, headers=everything))
        assert raw is not None
        if self._is_due("in_head"):
            await connection.send_raw(raw[: len(raw) // 2])
            raw = raw[len(raw) // 2 :]
            await self.strike("in_head")
        await connection.send_raw(raw)
        await self.strike("after_head")

    async def _end(self) -> None:
        connection = self._connection
        await connection.send(h11.EndOfMessage())
        if self.fault is not None and self.fault.what == "extra":
            await self.pause(self.fault)
            await connection.send_raw(self.fault.body or EXTRA)
            self.fault, self.struck = None, True


class Connection:
    """Serves the requests of one stream, one after another, until either side ends it; `run` closes it."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        handler: Callable[[Exchange], Awaitable[None]],
        keep_alive: float = 5.0,
    ) -> None:
        self.stream = stream
        self.h11 = h11.Connection(h11.SERVER)
        self.doomed = False
        self.linger = True
        """False: the stream is closed with a reset where it can be."""
        self._handler = handler
        self._keep_alive = keep_alive
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        try:
            with self._scope:
                while await self._serve_one():
                    self.h11.start_next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client is gone: there is nobody to tell
        finally:
            self._close_with_reset()
            await trio.aclose_forcefully(self.stream)

    def reset(self) -> None:
        """Cut the connection now, whatever it is doing."""
        self.linger = False
        self._scope.cancel("connection reset")

    async def send(self, event: h11.Data | h11.EndOfMessage) -> None:
        raw = self.h11.send(event)
        if raw:
            await self.send_raw(bytes(raw))

    async def send_raw(self, raw: bytes) -> None:
        await self.stream.send_all(raw)

    async def _serve_one(self) -> bool:
        """Read one request, answer it; False when the connection is over."""
        exchange = await self._read_request()
        if exchange is None:
            return False
        gone = False

        async def watch(cancel: trio.CancelScope) -> None:
            nonlocal gone
            while True:
                try:
                    data = await self.stream.receive_some(_READ)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    data = b""
                if not data:
                    gone = True
                    cancel.cancel("client disconnected")
                    return
                self.h11.receive_data(bytes(data))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, nursery.cancel_scope)
            try:
                await self._handler(exchange)
            except Struck:
                pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                gone = True
            nursery.cancel_scope.cancel("answered")
        return not (gone or self.doomed) and self.h11.our_state is h11.DONE

    async def _read_request(self) -> Exchange | None:
        """The next request with its whole body, or None when there is none (or none that is HTTP)."""
        try:
            with trio.move_on_after(self._keep_alive) as idle:
                event = await self._next_event()
            if idle.cancelled_caught or not isinstance(event, h11.Request):
                return None
            body = bytearray()
            while isinstance(part := await self._next_event(), h11.Data):
                body += part.data
            if not isinstance(part, h11.EndOfMessage):
                return None
            return Exchange(self, event, bytes(body))
        except h11.RemoteProtocolError:
            await self._refuse()
            return None

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            event = self.h11.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self.h11.they_are_waiting_for_100_continue:
                raw = self.h11.send(h11.InformationalResponse(status_code=100, headers=[]))
                await self.send_raw(raw or b"")
            self.h11.receive_data(bytes(await self.stream.receive_some(_READ)))

    async def _refuse(self) -> None:
        if self.h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = b"Invalid HTTP request received."
            headers = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body)))]
            raw = self.h11.send(h11.Response(status_code=400, headers=[*headers, ("connection", "close")]))
            await self.send_raw((raw or b"") + body)

    def _close_with_reset(self) -> None:
        if not self.linger and isinstance(self.stream, trio.SocketStream):
            with contextlib.suppress(OSError):  # closed already: the reset was somebody else's
                self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOTHING)
