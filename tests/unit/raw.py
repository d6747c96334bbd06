"""Engines that send exactly the bytes they are told to, for tests of the connections to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import trio


class Pieces(trio.abc.Stream):
    """A stream whose reads give these pieces, one a read, then the end: "eof", "reset" or "silence"."""

    def __init__(self, pieces: Iterable[bytes], then: str = "eof") -> None:
        self.pieces = [piece for piece in pieces if piece]
        self.then = then
        self.sent = b""
        self.closed = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.pieces:
            return self.pieces.pop(0)
        if self.then == "reset":
            raise trio.BrokenResourceError from ConnectionResetError(104, "Connection reset by peer")
        if self.then == "silence":
            await trio.sleep_forever()
        return b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += bytes(data)

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()


class RawServer:
    """What a server on a loopback socket has seen: `ends` are the connections that ended, `requests` what came."""

    def __init__(self, handler: Callable[[RawServer, trio.SocketStream], Awaitable[None]]) -> None:
        self._handler = handler
        self.port = 0
        self.accepted = 0
        self.open = 0
        self.requests: list[bytes] = []
        self.changed = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        self.accepted += 1
        self.open += 1
        self._tell()
        try:
            async with stream:
                await self._handler(self, stream)
        except trio.BrokenResourceError:
            pass
        finally:
            self.open -= 1
            self._tell()

    async def read_request(self, stream: trio.SocketStream) -> bytes:
        """One request's head and body; b"" where the client has closed."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = await stream.receive_some(65536)
            if not more:
                return b""
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0].split(b":")[1]) if lengths else 0
        while len(body) < length:
            body += await stream.receive_some(65536)
        self.requests.append(head + b"\r\n\r\n" + body)
        self._tell()
        return self.requests[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until `condition()` holds; looked at whenever something happens here."""
        with trio.fail_after(5):
            while not condition():
                await self.changed.wait()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


async def eventually(condition: Callable[[], bool]) -> None:
    """Until `condition()` holds, of something that tells nobody when it changes."""
    with trio.fail_after(5):
        while True:
            await trio.sleep(0.001)
            if condition():
                return


@asynccontextmanager
async def raw_server(handler: Callable[[RawServer, trio.SocketStream], Awaitable[None]]) -> AsyncIterator[RawServer]:
    server = RawServer(handler)
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, server.serve, listeners)
        server.port = listeners[0].socket.getsockname()[1]
        yield server
        nursery.cancel_scope.cancel()


def answering(*answers: bytes, then: str = "wait") -> Callable[[RawServer, trio.SocketStream], Awaitable[None]]:
    """A handler that gives each connection's n-th request the n-th answer, then waits for its end, or closes."""

    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        for answer in answers:
            if not await server.read_request(stream):
                return
            await stream.send_all(answer)
        while then == "wait" and await stream.receive_some(65536):
            pass

    return handler
