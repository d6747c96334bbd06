"""A minimal HTTP/1.1 client on a trio stream: what engines in different processes call each other with."""

from __future__ import annotations

from collections.abc import Mapping

import h11
import msgspec
import trio


class Client:
    """One connection: a request, then `head` and `body`. Broken answers raise h11.RemoteProtocolError."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._h11 = h11.Connection(h11.CLIENT)

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        head = [("host", "engine"), ("content-length", str(len(body))), *(headers or {}).items()]
        raw = self._h11.send(h11.Request(method=method, target=path, headers=head)) or b""
        self._h11.send(h11.Data(body))
        self._h11.send(h11.EndOfMessage())
        await self.stream.send_all(bytes(raw) + body)

    async def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> None:
        await self.request(
            "POST", path, msgspec.json.encode(body), {"content-type": "application/json", **(headers or {})}
        )

    async def head(self) -> tuple[int, dict[str, str]]:
        event = await self._next()
        if not isinstance(event, h11.Response):
            raise h11.RemoteProtocolError(f"no response but {event!r}")
        return event.status_code, {name.decode(): value.decode("latin-1") for name, value in event.headers}

    async def piece(self) -> bytes:
        """The body's next piece as it arrives, b"" at its end."""
        event = await self._next()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise h11.RemoteProtocolError(f"the body was cut: {event!r}")
        if self._h11.their_state is h11.DONE and self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        return b""

    async def body(self) -> bytes:
        whole = bytearray()
        while piece := await self.piece():
            whole += piece
        return bytes(whole)

    async def _next(self) -> object:
        while True:
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._h11.receive_data(bytes(await self.stream.receive_some(65536)))


async def call(url: str, path: str, body: object) -> tuple[int, bytes]:
    """POST to an engine on a fresh connection. Raises OSError or h11.RemoteProtocolError."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            client = Client(stream)
            await client.post(path, body, {"connection": "close"})
            status, _ = await client.head()
            return status, await client.body()
    except trio.BrokenResourceError as error:
        raise ConnectionResetError(str(error)) from error
