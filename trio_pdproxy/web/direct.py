"""Writing a response's body to its connection without the ways through Hypercorn and h11, where that is safe.

ASGI's `send` costs several times what the bytes of an event cost: an event object at each of four layers, h11's state
machine, a lock and a cancel scope. The relay writes thousands of small events a second, so its sink frames chunks
itself and hands them to the connection; the head and the end of each response still go through h11, which therefore
knows at every moment what state the connection is in. A head is held back until there are bytes to send with it.

The server offers this to the app in the scope's `extensions`. It is offered where it was tried: on HTTP/1.1, with a
version of Hypercorn whose connections are known to work as `ContainedServer` expects. Everywhere else the sink uses
ASGI's `send` alone, and the client sees the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from importlib.metadata import version

import trio

from trio_pdproxy.engines.wire import read_socket

EXTENSION = "trio_pdproxy.direct"

SUPPORTED = version("hypercorn").startswith("0.18.")
"""Whether this Hypercorn is one whose connections were tried with it."""


class Direct:
    """One client connection, for whoever frames what it sends on it. `send` is the server's own, past which nothing
    else is sent meanwhile: it takes bytes and raises nothing where the client has gone."""

    __slots__ = ("_cut", "_held", "_lock", "_send", "_socket", "_stream", "lost", "on_lost")

    def __init__(
        self,
        stream: trio.abc.Stream,
        lock: trio.Lock,
        send: Callable[[bytes | memoryview], Awaitable[None]],
        cut: Callable[[], Awaitable[None]],
    ) -> None:
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._lock = lock
        self._send = send
        self._cut = cut
        self._held: list[bytes] | None = None
        self.lost = False
        """The client's end is there: it has left, or does not take what is sent."""
        self.on_lost: Callable[[], None] | None = None
        """Called once when that happens; whoever sets it takes it away again."""

    @property
    def plain(self) -> bool:
        """It is a plain socket: `send_now` may send."""
        return self._socket is not None

    def lose(self) -> None:
        """For the server: see `lost`."""
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()

    # -- sending ---------------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        """From now on what the server sends is kept, until it is released."""
        self._held = []

    def keeps(self, data: bytes) -> bool:
        """For the server: keep `data` if what it sends is held back just now."""
        if self._held is None:
            return False
        self._held.append(data)
        return True

    def release(self, data: bytes = b"") -> bytes:
        """What was held back, with `data` behind it: to be sent by the caller. Nothing is held back any more."""
        held, self._held = self._held, None
        return b"".join((*held, data)) if held else data

    def send_now(self, data: bytes | memoryview) -> int:
        """Send what the kernel takes at once, without a checkpoint; the number of bytes. 0 where it takes none, where
        somebody else is sending, where the stream is no plain socket (TLS), and where the client has gone: `send` will
        find that out."""
        if self._socket is None or self._lock.locked():
            return 0
        try:
            return os.write(self._socket.fileno(), data)
        except OSError:
            return 0

    async def send(self, data: bytes | memoryview) -> None:
        await self._send(data)

    async def cut(self) -> None:
        """End the connection now, with whatever answer is in hand unfinished."""
        await self._cut()

    # -- receiving, for the server ---------------------------------------------------------------

    async def receive_some(self, size: int) -> bytes:
        """As the stream's own, in fewer steps where it is a plain socket. Always a checkpoint."""
        if self._socket is None:
            return bytes(await self._stream.receive_some(size))
        return await read_socket(self._socket, size)


def chunk(data: bytes) -> bytes:
    """`data` (at least one byte) as a chunk of HTTP/1.1's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)
