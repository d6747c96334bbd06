"""An exchange's sink on ASGI's `send`."""

from __future__ import annotations

from hypercorn.typing import ASGISendCallable

from trio_pdproxy.core.errors import Dialect, ProxyError
from trio_pdproxy.engines.wire import Headers


class AsgiSink:
    """One response. What it did not `finish` is seen as truncated: the server closes without a terminal chunk.

    `finishing` is set just before the last send. Hypercorn reports the client as gone from within that send, and
    whoever cancels on that report would cancel the send itself: the connection would then be neither kept nor closed.
    """

    __slots__ = ("_send", "finishing", "started")

    def __init__(self, send: ASGISendCallable) -> None:
        self._send = send
        self.started = False
        self.finishing = False

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        self.finishing = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


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
