"""A cheap HTTP/1.1 client that counts events and checks every answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import httptools

from tests.bench.words import Ask

HOST = "127.0.0.1"
CONNECTING = 32
"""Connections being opened at the same time: more would overflow the backlog of some server (100 at Hypercorn)."""


@dataclass(slots=True)
class Count:
    """Events and answers that have come, over all connections of a load."""

    events: int = 0
    answers: int = 0
    wrong: int = 0
    why: str = ""
    """Of the first wrong one."""

    def found_wrong(self, why: str) -> None:
        self.wrong += 1
        self.why = self.why or why


@dataclass(slots=True)
class Times:
    """Of one answer, in seconds of `time.perf_counter`."""

    sent: float = 0.0
    first: float = 0.0
    end: float = 0.0

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def whole(self) -> float:
        return self.end - self.sent


class Connection(asyncio.Protocol):
    """One client connection, one request at a time."""

    def __init__(self, count: Count) -> None:
        self.count = count
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.ask: Ask | None = None
        self.times = Times()
        self.first = asyncio.Event()
        """Set with the first byte of a body, and when there will be none."""
        self._pieces: list[bytes] = []
        self._over: asyncio.Future[bool] | None = None
        self._reusable = True

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send(self, ask: Ask, payload: bytes) -> asyncio.Future[bool]:
        """Send one request. The future says whether the answer was right; it never raises."""
        self.ask = ask
        self.times = Times(sent=time.perf_counter())
        self.first.clear()
        self._pieces = []
        self._over = asyncio.get_running_loop().create_future()
        if self.transport is None:
            self._end("connection lost before the request")
        else:
            self.transport.write(payload)
        return self._over

    def abort(self) -> None:
        """Leave as clients leave: the connection is reset, or closed where nothing is unread."""
        self.ask = None
        self._over = None
        if self.transport is not None:
            self.transport.abort()

    def _end(self, why: str = "") -> None:
        over, ask = self._over, self.ask
        self._over = None
        self.first.set()
        if over is None or over.done() or ask is None:
            return
        if not why:
            body = b"".join(self._pieces)
            if not ask.is_right(body):
                why = f"a wrong body of {len(body)} bytes, {body[:60]!r} ... {body[-60:]!r}, for {ask}"
        if why:
            self.count.found_wrong(why)
        else:
            self.count.answers += 1
        over.set_result(not why)

    # -- asyncio calls these ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._end(f"the connection was closed inside an answer ({exc})")

    # -- httptools calls these -------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        self._reusable = self.parser.should_keep_alive()
        if status != 200:
            self._end(f"status {status}")

    def on_body(self, data: bytes) -> None:
        if not self._pieces:
            self.times.first = time.perf_counter()
            self.first.set()
        elif data.startswith(b"\n") and self._pieces[-1].endswith(b"\n"):
            self.count.events += 1  # its end fell between two pieces
        self._pieces.append(data)
        self.count.events += data.count(b"\n\n")

    def on_message_complete(self) -> None:
        self.times.end = time.perf_counter()
        self._end()
        if not self._reusable and self.transport is not None:
            self.transport.close()


class Client:
    """Connections to one proxy. Every answer goes into `count`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.count = Count()
        self._limit = asyncio.Semaphore(CONNECTING)
        self._opened: set[Connection] = set()

    async def connect(self) -> Connection:
        """A new connection. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        async with self._limit, asyncio.timeout(30):
            _, connection = await loop.create_connection(lambda: Connection(self.count), HOST, self.port)
        self._opened.add(connection)
        return connection

    def payload(self, ask: Ask) -> bytes:
        """The whole request as bytes."""
        body = ask.body()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}:{self.port}\r\nuser-agent: bench\r\n"
            f"accept: */*\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def close(self) -> None:
        for connection in self._opened:
            connection.abort()
        self._opened.clear()

    def forget(self, connection: Connection) -> None:
        self._opened.discard(connection)


@asynccontextmanager
async def open_client(port: int) -> AsyncIterator[Client]:
    """A client whose connections are closed at the end of the block."""
    client = Client(port)
    try:
        yield client
    finally:
        client.close()


async def get(port: int, path: str, *, within: float = 5.0) -> tuple[int, bytes]:
    """One GET on a connection of its own. Raises `OSError`, `TimeoutError`."""
    async with asyncio.timeout(within):
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 26)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {HOST}:{port}\r\nconnection: close\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
            body = await (reader.readexactly(int(length.partition(b":")[2])) if length else reader.read())
        except asyncio.IncompleteReadError as error:
            raise ConnectionError(f"GET {path}: the answer was cut") from error
        finally:
            writer.close()
    return int(head.split(b" ", 2)[1]), body


async def get_json(port: int, path: str, *, within: float = 5.0) -> Any:
    """The JSON a GET is answered with."""
    return json.loads((await get(port, path, within=within))[1])
