"""A client that can be rude: one request on a connection of its own, read or not read, closed at any time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from trio_pdproxy.engines.connections import Connections, Dial, Origin
from trio_pdproxy.engines.wire import Connection, request_bytes


@asynccontextmanager
async def requested(url: str, path: str, body: Any, *, dial: Dial | None = None) -> AsyncIterator[Connection]:
    """`body` (JSON) is sent to `path`; the connection, to be read with `receive_head` and `receive_body`. It is closed
    at the end of the block, whatever is still to come on it."""
    origin = Origin.of(url)
    connection = await Connections(origin, dial=dial).take()
    try:
        headers = [(b"host", origin.authority.encode()), (b"content-type", b"application/json")]
        await connection.send(request_bytes(b"POST", path.encode(), headers, msgspec.json.encode(body)))
        yield connection
    finally:
        await connection.close()  # noqa: ASYNC102  shielded inside, and waits for nobody
