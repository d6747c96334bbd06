"""A client on a plain socket that shows exactly what came, and can leave in every way there is."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import trio

from trio_pdproxy.core import sse

End = Literal["complete", "cut", "nothing", "open"]
"""`complete`: by its own framing (or, where it has none, by the connection's proper end). `cut`: the connection ended
before. `nothing`: not one byte came. `open`: the answer goes on."""


@dataclass(frozen=True, slots=True)
class Got:
    """One answer as it came, heads of 1xx left out."""

    status: int = 0
    version: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    end: End = "open"
    framing: Literal["length", "chunked", "close", "none"] = "none"
    rest: bytes = b""
    """What came after a complete answer."""

    @property
    def error(self) -> dict[str, Any]:
        """The members of the error it is."""
        members: dict[str, Any] = msgspec.json.decode(self.body)["error"]
        return members

    @property
    def events(self) -> list[bytes]:
        return sse.events(self.body)

    @property
    def text(self) -> str:
        """The generated text, of a stream or a whole answer of completions."""
        documents = [self.body] if not self.is_stream else [e for e in self.events if e != b"[DONE]"]
        choices = [c for document in documents for c in msgspec.json.decode(document).get("choices", ())]
        return "".join(choice["text"] for choice in choices)

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


def read_answer(raw: bytes, *, closed: bool) -> Got:
    """As much of an answer as `raw` holds; `closed`: nothing will follow."""
    head, found, rest = raw.partition(b"\r\n\r\n")
    if not found:
        return Got(end=("cut" if raw else "nothing") if closed else "open", rest=raw)
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status = first.split(" ")[:2]
    if status.startswith("1"):
        return read_answer(rest, closed=closed)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    common: dict[str, Any] = {"status": int(status), "version": version, "headers": headers}
    unfinished: End = "cut" if closed else "open"
    if headers.get("transfer-encoding") == "chunked":
        body, whole, after = _dechunk(rest)
        return Got(**common, body=body, end="complete" if whole else unfinished, framing="chunked", rest=after)
    if "content-length" in headers:
        length = int(headers["content-length"])
        ended = len(rest) >= length
        return Got(
            **common,
            body=rest[:length],
            end="complete" if ended else unfinished,
            framing="length",
            rest=rest[length:],
        )
    return Got(**common, body=rest, end="complete" if closed else "open", framing="close")


def _dechunk(data: bytes) -> tuple[bytes, bool, bytes]:
    body = b""
    while True:
        size, found, rest = data.partition(b"\r\n")
        if not found:
            return body, False, b""
        length = int(size, 16)
        if length == 0:
            return body, rest.startswith(b"\r\n"), rest[2:]
        body += rest[:length]
        if len(rest) < length + 2:
            return body, False, b""
        data = rest[length + 2 :]


def request(body: Any, *, path: str = "/v1/completions", version: str = "1.1", headers: str = "") -> bytes:
    """The bytes of a POST; `headers` are whole lines."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    head = f"POST {path} HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Client:
    """One connection. What has come and was not taken by `answer` is in `raw`."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.raw = b""
        self.ended = False

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def answer(self) -> Got:
        """Read one answer to its end, whatever kind of end."""
        while (got := read_answer(self.raw, closed=self.ended)).end == "open":
            await self.more()
        self.raw = got.rest
        return got

    async def until(self, text: bytes) -> None:
        """Until `text` has come."""
        while text not in self.raw:
            assert not self.ended, self.raw
            await self.more()

    async def more(self) -> None:
        try:
            data = await self.stream.receive_some(65536)
        except trio.BrokenResourceError:
            data = b""
        self.raw += data
        self.ended = self.ended or not data

    async def until_ended(self, seconds: float = 30) -> None:
        """Until the connection's end has come."""
        with trio.fail_after(seconds):
            while not self.ended:
                await self.more()

    async def leave(self, how: Literal["close", "half_close", "reset"]) -> None:
        """Close both directions, the sending one alone, or with a TCP reset."""
        if how == "half_close":
            await self.stream.send_eof()
            return
        if how == "reset":
            self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await trio.aclose_forcefully(self.stream)


@asynccontextmanager
async def connected(url: str, *, receive_buffer: int | None = None) -> AsyncIterator[Client]:
    """A connection to `url`; it is gone at the end of the block."""
    host, port = url.removeprefix("http://").split(":")
    plain = trio.socket.socket()
    if receive_buffer is not None:  # before connecting: it shapes the window
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await plain.connect((host, int(port)))
    stream = trio.SocketStream(plain)
    try:
        yield Client(stream)
    finally:
        await trio.aclose_forcefully(stream)
