"""The engines' connections behind httpx: for health, coordinates and calls that one engine answers.

The relay does not come through here (an httpx request costs more than both legs' bytes do). This is the only module
that imports httpx.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import httpx
import trio

from trio_pdproxy.engines.connections import Connections, Dial, Origin
from trio_pdproxy.engines.wire import BrokenError, Connection, EngineError, Head, RefusedError, request_bytes

# Hop-by-hop, or written by `request_bytes` itself.
_OURS = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection"})


class EngineTransport(httpx.AsyncBaseTransport):
    """httpx on an engine's `Connections`. HTTP/1.1, no proxies, no redirects of its own; a GET or HEAD is asked once
    more where a kept-alive connection failed it, nothing else is.

    httpx's connect, read and write timeouts are kept as trio deadlines; its pool timeout has nothing to wait for.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeouts = request.extensions.get("timeout", {})
        body = await request.aread()
        headers = [(b"host", self._connections.origin.authority.encode())]
        headers.extend((name, value) for name, value in request.headers.raw if name.lower() not in _OURS)
        data = request_bytes(request.method.encode(), request.url.raw_path, headers, body)
        connection = await self._take(timeouts)
        try:
            head = await self._ask(connection, data, timeouts)
        except (httpx.WriteError, httpx.ReadError):
            # What a kept-alive connection says may be the end of an earlier answer, or of the engine's patience with
            # it: that says nothing of the engine, and this can be asked twice.
            if not connection.served or request.method not in ("GET", "HEAD"):
                raise
            connection = await self._take(timeouts, fresh=True)
            head = await self._ask(connection, data, timeouts)
        if request.method == "HEAD":
            # Its answer has no body whatever it declares; the parser below does not know that.
            await self._connections.close(connection)
            return httpx.Response(head.status, headers=head.headers, request=request)
        return httpx.Response(
            head.status,
            headers=head.headers,
            stream=_Body(self._connections, connection, _seconds(timeouts, "read")),
            request=request,
        )

    async def _take(self, timeouts: dict[str, float | None], *, fresh: bool = False) -> Connection:
        try:
            with trio.fail_after(_seconds(timeouts, "connect")):
                return await self._connections.take(fresh=fresh)
        except RefusedError as error:
            raise httpx.ConnectError(str(error)) from error
        except trio.TooSlowError:
            raise httpx.ConnectTimeout("no connection in time") from None

    async def _ask(self, connection: Connection, data: bytes, timeouts: dict[str, float | None]) -> Head:
        """Send a request, receive its answer's head; the connection is closed where that fails."""
        head: Head | None = None
        try:
            await _send(connection, data, _seconds(timeouts, "write"))
            head = await _receive_head(connection, _seconds(timeouts, "read"))
        finally:
            if head is None:
                with trio.CancelScope(shield=True):
                    await self._connections.close(connection)
        return head

    async def aclose(self) -> None:
        await self._connections.shut()


async def _send(connection: Connection, data: bytes, seconds: float) -> None:
    try:
        with trio.fail_after(seconds):
            await connection.send(data)
    except BrokenError as error:
        raise httpx.WriteError(str(error)) from error
    except trio.TooSlowError:
        raise httpx.WriteTimeout("the request was not taken in time") from None


async def _receive_head(connection: Connection, seconds: float) -> Head:
    try:
        with trio.fail_after(seconds):
            return await connection.receive_head()
    except BrokenError as error:
        raise httpx.ReadError(str(error)) from error
    except trio.TooSlowError:
        raise httpx.ReadTimeout("no answer in time") from None


class _Body(httpx.AsyncByteStream):
    def __init__(self, connections: Connections, connection: Connection, timeout: float) -> None:
        self._connections = connections
        self._connection = connection
        self._timeout = timeout
        self._done = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        # No nursery and no cancel scope spans the yield: the deadline is around the read alone.
        while True:
            try:
                with trio.fail_after(self._timeout):
                    data = await self._connection.receive_body()
            except BrokenError as error:
                raise httpx.ReadError(str(error)) from error
            except trio.TooSlowError:
                raise httpx.ReadTimeout("no answer in time") from None
            if not data:
                return
            yield data

    async def aclose(self) -> None:
        if not self._done:
            self._done = True
            await self._connections.give_back(self._connection)


def _seconds(timeouts: dict[str, float | None], name: str) -> float:
    value = timeouts.get(name)
    return float("inf") if value is None else value


def open_client(
    base_url: str,
    *,
    timeout: float,
    ssl_context: ssl.SSLContext | None = None,
    dial: Dial | None = None,
    connections: Connections | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.AsyncClient:
    """An httpx client for one engine, to be used as `async with`. `timeout` in seconds, for each step of a call.

    With `connections` it shares an engine's; else it has its own, closed with the client. The environment
    (proxies, .netrc) is not looked at and redirects are not followed: an engine is where its url says.
    """
    if connections is None:
        connections = Connections(Origin.of(base_url), connect_timeout=timeout, ssl_context=ssl_context, dial=dial)
    return httpx.AsyncClient(
        base_url=base_url,
        transport=EngineTransport(connections),
        timeout=timeout,
        trust_env=False,
        follow_redirects=False,
        headers=headers,
    )


async def fetch(base_url: str, path: str, *, token: str | None = None, within: float) -> tuple[int, bytes]:
    """One GET, read to its end: status and body. `within`: seconds for each of its steps. Raises `EngineError`."""
    async with open_client(base_url.rstrip("/"), timeout=within) as client:
        try:
            response = await client.get(path, headers={"authorization": f"Bearer {token}"} if token else None)
        except httpx.HTTPError as error:
            raise EngineError(str(error)) from None
    return response.status_code, response.content
