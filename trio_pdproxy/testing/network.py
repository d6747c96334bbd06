"""A network in memory: streams between tasks, and who listens where. No sockets, no threads, so virtual time works."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import trio

CAPACITY = 256 * 1024
"""Bytes one direction takes before its sender waits: about what a kernel's loopback buffers do."""

Handler = Callable[["MemoryStream"], Awaitable[object]]


class _Pipe:
    """One direction."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = False
        """The sender has said its last."""
        self.broken = False
        """Nobody will read, or the connection was reset."""
        self._moved = trio.lowlevel.ParkingLot()

    def changed(self) -> None:
        self._moved.unpark_all()

    async def wait(self) -> None:
        await self._moved.park()


@dataclass(frozen=True, slots=True)
class _Address:
    """What a server asks a connection's socket for."""

    family = socket.AF_INET
    ours: tuple[str, int]
    theirs: tuple[str, int]

    def getsockname(self) -> tuple[str, int]:
        return self.ours

    def getpeername(self) -> tuple[str, int]:
        return self.theirs


class MemoryStream(trio.abc.HalfCloseableStream):
    """One end of a connection, with a kernel's manners: it buffers `CAPACITY` bytes, delivers what was sent before a
    close, breaks the sender whose reader has closed, and loses no byte to a cancelled receive.

    `stall` seconds without room end the connection, as TCP_USER_TIMEOUT does. `jitter` is how many more scheduler steps
    a send or a receive may take, drawn from trio's own random numbers, which a seed makes the same every time.
    `close_now` and `reset` are plain functions: an instrument may call them.
    """

    def __init__(
        self, incoming: _Pipe, outgoing: _Pipe, address: _Address, *, stall: float = inf, jitter: int = 0
    ) -> None:
        self.socket = address
        self._jitter = jitter
        self._incoming = incoming
        self._outgoing = outgoing
        self._stall = stall
        self._closed = False
        self._busy: set[str] = set()

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if what in self._busy:
            raise trio.BusyResourceError(f"another task is {what} this stream")
        self._busy.add(what)
        try:
            yield
        finally:
            self._busy.discard(what)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._alone("sending"):
            await self._pause()
            rest = memoryview(data)
            while True:
                self._check(self._outgoing)
                if self._outgoing.ended:
                    raise trio.ClosedResourceError("sent after the end")
                room = CAPACITY - len(self._outgoing.data)
                self._outgoing.data += rest[:room]
                rest = rest[room:]
                self._outgoing.changed()
                if not rest:
                    return
                with trio.move_on_after(self._stall) as stalled:
                    await self._outgoing.wait()
                if stalled.cancelled_caught:
                    self.reset()

    async def wait_send_all_might_not_block(self) -> None:
        with self._alone("sending"):
            await trio.lowlevel.checkpoint()
            while len(self._outgoing.data) >= CAPACITY and not self._outgoing.broken:
                await self._outgoing.wait()
            self._check(self._outgoing)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        with self._alone("receiving"):
            await self._pause()
            pipe = self._incoming
            while not pipe.data:
                self._check(pipe)
                if pipe.ended:
                    return b""
                await pipe.wait()
            if self._closed:
                raise trio.ClosedResourceError("closed")
            piece = bytes(pipe.data[:max_bytes])
            del pipe.data[:max_bytes]
            pipe.changed()
            return piece

    async def send_eof(self) -> None:
        with self._alone("sending"):
            if self._closed:
                raise trio.ClosedResourceError("closed")
            self._outgoing.ended = True
            self._outgoing.changed()
            await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.close_now()
        await trio.lowlevel.checkpoint()

    def close_now(self) -> None:
        """Close: what was sent is still delivered, what comes is refused."""
        self._closed = True
        self._outgoing.ended = True
        self._incoming.broken = True
        self._incoming.data.clear()
        self._outgoing.changed()
        self._incoming.changed()

    def reset(self) -> None:
        """Cut both directions at once; what was not yet read is lost."""
        for pipe in (self._incoming, self._outgoing):
            pipe.broken = True
            pipe.data.clear()
            pipe.changed()

    async def _pause(self) -> None:
        random: Any = trio._core._run._r
        for _ in range(1 + (random.randrange(self._jitter + 1) if self._jitter else 0)):
            await trio.lowlevel.checkpoint()

    def _check(self, pipe: _Pipe) -> None:
        if self._closed:
            raise trio.ClosedResourceError("closed")
        if pipe.broken:
            raise trio.BrokenResourceError("connection lost") from _os_error(ConnectionResetError, errno.ECONNRESET)


def memory_pair(
    ours: tuple[str, int] = ("client", 1),
    theirs: tuple[str, int] = ("server", 1),
    *,
    stall: float = inf,
    jitter: int = 0,
) -> tuple[MemoryStream, MemoryStream]:
    """Both ends of a connection. `stall` holds for what the second one sends."""
    there, back = _Pipe(), _Pipe()
    return (
        MemoryStream(back, there, _Address(ours, theirs), jitter=jitter),
        MemoryStream(there, back, _Address(theirs, ours), stall=stall, jitter=jitter),
    )


@dataclass(slots=True)
class _Listener:
    handler: Handler
    nursery: trio.Nursery
    up: Callable[[], bool]
    stall: float


class Network:
    """Who listens where. `dial` is what a `create_app` or a `Connections` takes as such."""

    def __init__(self, jitter: int = 0) -> None:
        self._jitter = jitter
        self._listeners: dict[tuple[str, int], _Listener] = {}
        self._next_port = 40000
        self.last: dict[tuple[str, int], MemoryStream] = {}
        """Of each listener, the caller's end of the newest connection."""
        self.refusing: set[int] = set()
        """Ports that refuse, as if nobody listened."""
        self.silent: set[int] = set()
        """Ports that never answer, as a firewall does it."""

    def listen(
        self,
        host: str,
        port: int,
        handler: Handler,
        nursery: trio.Nursery,
        *,
        up: Callable[[], bool] = lambda: True,
        stall: float = inf,
    ) -> None:
        """`handler` gets each connection, as a task in `nursery`; refused while not `up()`."""
        self._listeners[host, port] = _Listener(handler, nursery, up, stall)

    def close(self, host: str, port: int) -> None:
        del self._listeners[host, port]

    async def dial(self, host: str, port: int) -> MemoryStream:
        """A connection to whoever listens there. Raises OSError as a kernel does."""
        await trio.lowlevel.checkpoint()
        if port in self.silent:
            await trio.sleep_forever()
        listener = self._listeners.get((host, port))
        if listener is None or port in self.refusing or not listener.up():
            raise _os_error(ConnectionRefusedError, errno.ECONNREFUSED)
        self._next_port += 1
        address = ("127.0.0.1", self._next_port)
        ours, theirs = memory_pair(address, (host, port), stall=listener.stall, jitter=self._jitter)
        listener.nursery.start_soon(listener.handler, theirs)
        self.last[host, port] = ours
        return ours


def _os_error(kind: type[OSError], number: int) -> OSError:
    return kind(number, os.strerror(number))
