"""The usual request to the relay, without the layers that any request may need.

Hypercorn hands a request through h11's state machine, a stream of its own, a channel and half a dozen events, and its
answer the same way back: half of what a short request costs here. What the relay is sent all day needs none of it: a
POST to one of its paths, HTTP/1.1, a body of a declared length. Such a request is recognised by its whole head, read
strictly; whatever is the least bit different (and that is all that two parsers could understand differently) is h11's,
as are all other paths. The app is the same ASGI app with the same `receive` and `send`, and the client sees the same
bytes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import trio

from trio_pdproxy.core.plan import APIS
from trio_pdproxy.engines.wire import Headers
from trio_pdproxy.web.direct import chunk

log = logging.getLogger("trio_pdproxy.serve")

HEAD_LIMIT = 16 * 1024

BODY = "trio_pdproxy.body"
"""Among the scope's `extensions`: the whole body, where it came with the head. `receive` gives it all the same."""

_FIELD = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n"
_REQUEST = re.compile(rb"POST (/[a-z0-9_/]+) HTTP/1\.1\r\n((?:" + _FIELD + rb")*)\r\n")
_is_field = re.compile(_FIELD).fullmatch

_FRAMING = frozenset({b"host", b"content-length", b"connection"})
# Any of these asks for more than an answer.
_UNUSUAL = frozenset({b"transfer-encoding", b"upgrade", b"expect", b"te", b"trailer", b"http2-settings"})
_BODILESS = frozenset({204, 304})

App = Callable[..., Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Head:
    """A request's head: header names in lower case, values without the space around them, as h11 gives them."""

    path: bytes
    headers: Headers
    length: int
    """Of its body."""
    end: int
    """Of the head, in bytes: the body begins there."""


def read_head(data: bytes) -> Head | None:
    """The head of the usual request at the beginning of `data`; None where it is not (all there, or not usual)."""
    found = _REQUEST.match(data, 0, HEAD_LIMIT)
    if found is None or found[1].decode("ascii") not in APIS:
        return None
    headers: Headers = []
    framing: dict[bytes, bytes] = {}
    for line in found[2].split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if name in _UNUSUAL or name in framing:
            return None
        if name in _FRAMING:
            framing[name] = value
        headers.append((name, value))
    length = framing.get(b"content-length", b"")
    if b"host" not in framing or not length.isdigit() or len(length) > 9:
        return None
    if framing.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    return Head(found[1], headers, int(length), found.end())


class PlainRequest:
    """One request and its answer.

    common -- the headers of every answer, given the protocol's name
    send -- sends bytes to the client, in order
    over -- called when the answer is complete, with whether the connection may serve another request: before the app
        returns, which may have debts to settle
    """

    def __init__(
        self,
        head: Head,
        common: Callable[[str], Headers],
        send: Callable[[bytes], Awaitable[None]],
        over: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._common = common
        self._send = send
        self._over = over
        # What comes from the client.
        self._pieces: list[bytes] = []
        self._missing = head.length
        self._told = False
        """The app has been told the whole body."""
        self._lost = False
        self._news: trio.Event | None = None
        """Somebody waits for what comes from the client."""
        # What goes to it.
        self.started = False
        self.complete = False
        self._keep = True
        self._left: int | None = None
        """Bytes of the answer's body still to come; None: it has no declared length."""
        self._bodiless = False

    # -- from the client -------------------------------------------------------------------------

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body; what is behind it is returned."""
        if not self._missing:
            return data
        piece, behind = data[: self._missing], data[self._missing :]
        self._missing -= len(piece)
        if not self.started:  # else nobody will ask for it
            self._pieces.append(piece)
            self._tell()
        return behind

    @property
    def answered_early(self) -> bool:
        """An answer has begun before the body was all there: no more of it needs to be read."""
        return self.started and self._missing > 0

    def lose(self) -> None:
        """The client has left."""
        self._lost = True
        self._tell()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    async def receive(self) -> dict[str, Any]:
        """ASGI's."""
        while True:
            if self._pieces or not (self._missing or self._told):
                body, self._pieces = b"".join(self._pieces), []
                self._told = not self._missing
                return {"type": "http.request", "body": body, "more_body": not self._told}
            if self._lost or self.complete:
                return {"type": "http.disconnect"}
            if self._news is None:
                self._news = trio.Event()
            await self._news.wait()

    # -- to the client ---------------------------------------------------------------------------

    async def send(self, event: Any) -> None:
        """ASGI's. Raises `ValueError` for an answer that is none."""
        if event["type"] == "http.response.start" and not self.started:
            head = self._head(event["status"], event.get("headers", ()))
            self.started = True
            await self._send(head)
        elif event["type"] == "http.response.body" and self.started and not self.complete:
            body, more = bytes(event.get("body", b"")), event.get("more_body", False)
            if data := self._framed(body, last=not more):
                await self._send(data)
            if not more:
                await self._end()
        elif not self.complete:
            raise ValueError(f"{event['type']} at this point of an answer")

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        lines = [b"HTTP/1.1 %d \r\n" % status]
        for name, value in (*headers, *self._common("h11")):
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection":
                self._keep = self._keep and b"close" not in value.lower()
            elif name == b"transfer-encoding":
                continue  # it is framed here
            lines.append(line := b"%b: %b\r\n" % (name, value))
            if not _is_field(line):
                raise ValueError("one of an answer's headers is none")
        self._bodiless = status in _BODILESS
        if self._left is None and not self._bodiless:
            lines.append(b"Transfer-Encoding: chunked\r\n")
        return b"".join((*lines, b"\r\n"))

    def _framed(self, body: bytes, *, last: bool) -> bytes:
        if self._bodiless:
            return b""
        if self._left is None:
            return (chunk(body) if body else b"") + (b"0\r\n\r\n" if last else b"")
        if len(body) > self._left:
            raise ValueError("an answer's body is longer than its head says")
        self._left -= len(body)
        return body

    async def _end(self) -> None:
        self.complete = True
        self._tell()
        # A body that is too short is seen as such; one that was not read to its end would be taken for a request.
        await self._over(self._keep and not self._left and not self._missing)

    # -- the app ---------------------------------------------------------------------------------

    async def run(self, app: App, scope: dict[str, Any]) -> None:
        """Let the app answer. A failure of its own becomes a 500, if nothing else has been said."""
        try:
            await app(scope, self.receive, self.send, trio.to_thread.run_sync, trio.from_thread.run)
        except* Exception as group:
            log.error("the app failed on a request", exc_info=group)
            if not self.started:
                await self._refuse(500)
        if self._lost and self._missing and not self.started:
            await self._refuse(400)  # half a request: whoever has closed one direction only can still read that
        if not self.complete:
            self.complete = True
            await self._over(False)

    async def _refuse(self, status: int) -> None:
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body"})
