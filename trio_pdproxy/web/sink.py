"""An exchange's sink on ASGI's `send`, and past it where the server allows."""

from __future__ import annotations

from hypercorn.typing import ASGISendCallable

from trio_pdproxy.core.errors import Dialect, ProxyError
from trio_pdproxy.engines.wire import Headers
from trio_pdproxy.web.direct import Direct, chunk


class AsgiSink:
    """One response. What it did not `finish` is seen as truncated: the server closes without a terminal chunk.

    `finishing` is set just before the last send. Hypercorn reports the client as gone from within that send, and
    whoever cancels on that report would cancel the send itself: the connection would then be neither kept nor closed.

    With `direct` (see there) the head goes out together with the first piece of the body, and where the body has no
    length of its own its chunks are framed here.
    """

    __slots__ = ("_chunked", "_direct", "_rest", "_send", "finishing", "started")

    def __init__(self, send: ASGISendCallable, direct: Direct | None = None) -> None:
        self._send = send
        self._direct = direct
        self._chunked = False
        self._rest: bytes | memoryview = b""
        self.started = False
        self.finishing = False

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        if self._direct is not None:
            # To a client of HTTP/1.1 h11 sends a body in chunks wherever its head names no length.
            self._chunked = not any(name == b"content-length" for name, _ in headers)
            self._direct.hold()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    @property
    def takes_at_once(self) -> bool:
        return self._direct is not None and self._direct.plain and self._chunked

    def write_now(self, data: bytes) -> bool:
        if self._direct is None or not self._chunked:
            self._rest = data
            return False
        return self.pass_on(self._direct.release(chunk(data)))

    def pass_on(self, framed: bytes) -> bool:
        assert self._direct is not None
        sent = self._direct.send_now(framed)
        if sent == len(framed):
            return True
        self._rest = memoryview(framed)[sent:]
        return False

    async def flush(self) -> None:
        rest, self._rest = self._rest, b""
        if self._direct is not None and self._chunked:
            await self._direct.send(rest)
            return
        await self._send({"type": "http.response.body", "body": bytes(rest), "more_body": True})
        await self._release()

    async def write(self, data: bytes) -> None:
        if self._rest:
            await self.flush()
        if not self.write_now(data):
            await self.flush()

    async def finish(self) -> None:
        await self._release()
        self.finishing = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def cut(self) -> None:
        self.finishing = True
        if self._direct is not None:
            await self._direct.cut()

    async def _release(self) -> None:
        """Send what is still held back: the head of a response, and the piece of its body that h11 has framed."""
        if self._direct is not None and self._direct.holding:
            held = self._direct.release()
            if (sent := self._direct.send_now(held)) < len(held):
                await self._direct.send(memoryview(held)[sent:])


async def answer(
    send: ASGISendCallable,
    error: ProxyError,
    request_id: str,
    dialect: Dialect = Dialect.OPENAI,
    *,
    close: bool = False,
) -> None:
    """A whole response of ours, where no exchange has begun. `close`: it is the connection's last."""
    body = error.body(dialect)
    sink = AsgiSink(send)
    await sink.start(
        error.status,
        [
            *error.headers(),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
            *([(b"connection", b"close")] if close else []),
        ],
    )
    await sink.write(body)
    await sink.finish()
