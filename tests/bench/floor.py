"""What any ASGI app on Hypercorn's public interface costs: one that reads a chunk and sends it on, and nothing else.

It knows no prefill leg, keeps no account, and trusts the benchmark's engines to answer in whole chunks. Not a proxy:
the floor of `ours-hypercorn`.
"""

from __future__ import annotations

import os
from typing import Any

import trio

DECODE = "FLOOR_DECODE"
"""The environment variable that has the decode engine's port, on this machine."""

_idle: list[trio.SocketStream] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for _ in range(2):
            event = await receive()
            await send({"type": f"{event['type']}.complete"})
        return
    body = b""
    more = True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event.get("more_body", False)
    stream = _idle.pop() if _idle else await _connect()
    await stream.send_all(
        b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (scope["raw_path"], len(body), body)
    )
    await _pass_on(stream, send)
    _idle.append(stream)


async def _connect() -> trio.SocketStream:
    stream = await trio.open_tcp_stream("127.0.0.1", int(os.environ[DECODE]))
    stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
    return stream


async def _pass_on(stream: trio.SocketStream, send: Any) -> None:
    """One answer. Raises `ValueError` where it is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await _some(stream)
    head, _, data = data.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    passed = [(name, headers[name]) for name in (b"content-type", b"content-length") if name in headers]
    await send({"type": "http.response.start", "status": int(status.split()[1]), "headers": passed})
    if b"content-length" in headers:
        while len(data) < int(headers[b"content-length"]):
            data += await _some(stream)
        await send({"type": "http.response.body", "body": data})
        return
    while True:
        events, data, ended = _chunks(data)
        if events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        if ended:
            await send({"type": "http.response.body"})
            return
        data += await _some(stream)


async def _some(stream: trio.SocketStream) -> bytes:
    if not (data := await stream.receive_some(65536)):
        raise ValueError("the engine closed in the middle of an answer")
    return bytes(data)


def _chunks(data: bytes) -> tuple[bytes, bytes, bool]:
    """The bodies of the whole chunks at the beginning of `data`, what is behind them, and whether the last was one."""
    bodies = b""
    while (end := data.find(b"\r\n")) > 0 and len(data) >= (behind := end + 4 + int(data[:end], 16)):
        if behind == end + 4:
            return bodies, data[behind:], True
        bodies += data[end + 2 : behind - 2]
        data = data[behind:]
    return bodies, data, False
