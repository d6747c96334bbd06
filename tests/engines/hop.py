"""A hop in front of a real engine where things go wrong: what a load balancer or a network does to a request.

Everything passes as raw bytes, but each POST takes the next fault that was armed, if there is one.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import trio

from trio_pdproxy.engines.connections import Origin

What = Literal[
    "answer",  # the hop answers by itself; the engine never sees the request
    "reset",  # so does the connection's end
    "hang",  # nor does it see this one, and nothing is ever said
    "delay",  # passed on `seconds` later
    "hold",  # passed on; its answer comes `seconds` later
    "cut",  # passed on; reset after `after` bytes of its answer
    "lose",  # passed on; reset once its answer is there
    "drop",  # passed on; both connections are reset `seconds` later
    "gateway",  # passed on; `seconds` later the hop answers by itself and gives the engine up
]


@dataclass(frozen=True, slots=True)
class Fault:
    what: What
    seconds: float = 0.0
    status: int = 500
    after: int = 60
    gated: bool = False
    """Not `seconds` later, but when the hop's `gate` is opened."""
    headers: bytes = b""
    body: bytes = b'{"error":{"message":"the hop says no","type":"Hop","param":null,"code":0}}'

    def __str__(self) -> str:
        status = f" {self.status}" if self.what in ("answer", "gateway") else ""
        return (
            self.what + status + (f" {self.seconds:g} s" if self.seconds else "") + (" kept back" if self.gated else "")
        )

    @property
    def answer(self) -> bytes:
        head = b"HTTP/1.1 %d Hop\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
        return head % (self.status, len(self.body), self.headers) + self.body


NO_FAULT = Fault("delay")


@dataclass(slots=True)
class Hop:
    """Made by `open_hop`."""

    origin: Origin
    url: str
    faults: deque[Fault] = field(default_factory=deque)
    """One for each POST to come, in order; the rest passes."""
    posts: list[bytes] = field(default_factory=list)
    """Every POST that came, heads included."""
    gate: trio.Event = field(default_factory=trio.Event)

    def arm(self, *faults: Fault) -> None:
        """These and no others, with the gate closed."""
        self.faults = deque(faults)
        self.gate = trio.Event()

    async def serve(self, client: trio.SocketStream) -> None:
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            async with client, await trio.open_tcp_stream(self.origin.host, self.origin.port) as engine:
                await _Passage(self, client, engine).run()


class _Passage:
    """One connection through the hop, and its own one behind it."""

    def __init__(self, hop: Hop, client: trio.SocketStream, engine: trio.SocketStream) -> None:
        self._hop = hop
        self._client = client
        self._engine = engine
        self._fault = NO_FAULT

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answers)
            try:
                while request := await self._next_request():
                    self._fault = NO_FAULT
                    if request.startswith(b"POST "):
                        self._hop.posts.append(request)
                        if self._hop.faults:
                            self._fault = self._hop.faults.popleft()
                    await self._pass(request)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            nursery.cancel_scope.cancel("one end is gone")

    async def _next_request(self) -> bytes:
        """One request's head and body, which has a length; b"" where the client has closed."""
        data = b""
        while b"\r\n\r\n" not in data:
            if not (more := await self._client.receive_some(65536)):
                return b""
            data += more
        length = _length(data)
        while len(data) < length:
            if not (more := await self._client.receive_some(65536)):
                return b""
            data += more
        return data

    async def _pass(self, request: bytes) -> None:
        fault = self._fault
        match fault.what:
            case "answer":
                await self._wait()
                await self._client.send_all(fault.answer)
            case "reset":
                await self._wait()
                self._reset()
            case "hang":
                await self._client.receive_some(1)  # no second request comes before an answer: this is its end
                self._reset()
            case "delay":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._until_closed, nursery.cancel_scope)
                    await self._wait()
                    await self._engine.send_all(request)
                    nursery.cancel_scope.cancel("passed on")
            case "drop" | "gateway":
                await self._engine.send_all(request)
                await self._wait()
                if fault.what == "gateway":
                    await self._client.send_all(fault.answer)
                    await self._client.aclose()
                self._reset()
            case _:
                await self._engine.send_all(request)

    async def _answers(self) -> None:
        passed = b""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await self._engine.receive_some(65536):
                match self._fault.what:
                    case "hold":
                        await self._wait()
                        self._fault = NO_FAULT
                    case "cut":
                        passed += data
                        if len(passed) > self._fault.after:
                            await self._client.send_all(data[: len(data) - len(passed) + self._fault.after])
                            self._reset()
                            return
                    case "lose":
                        passed += data
                        if b"\r\n\r\n" in passed and len(passed) >= _length(passed):
                            self._reset()
                            return
                        continue
                    case "drop" | "gateway":
                        continue
                await self._client.send_all(data)
        await self._client.aclose()

    async def _wait(self) -> None:
        if self._fault.gated:
            await self._hop.gate.wait()
        else:
            await trio.sleep(self._fault.seconds)

    async def _until_closed(self, scope: trio.CancelScope) -> None:
        """What is kept back is not passed on once nobody waits for it. (Nothing else comes before an answer.)"""
        await self._client.receive_some(1)
        self._reset()
        scope.cancel("closed")

    def _reset(self) -> None:
        """End the client's connection as a crash does. `_next_request` then finds it closed."""
        with suppress(OSError):
            self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._client.socket.close()


def _length(data: bytes) -> int:
    """Of the message that begins here, whose head is complete."""
    head, _, _ = data.partition(b"\r\n\r\n")
    named = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return len(head) + 4 + (int(named[0].split(b":")[1]) if named else 0)


@asynccontextmanager
async def open_hop(engine_url: str) -> AsyncIterator[Hop]:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    hop = Hop(Origin.of(engine_url), f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, hop.serve, listeners)
        yield hop
        nursery.cancel_scope.cancel("the hop is no longer needed")
