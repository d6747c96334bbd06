"""The Kubernetes API as far as discovery needs it: one GET, and one GET whose answer is a line at a time.

On the proxy's own HTTP client. Each request has a connection of its own and reads the credentials again: tokens of
service accounts expire within the hour, and the cluster's certificates are rotated too.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from urllib.parse import urlencode

import msgspec
import trio

from trio_pdproxy.config import Address, Settings
from trio_pdproxy.engines.connections import Connections, Origin
from trio_pdproxy.engines.wire import Connection, EngineError, request_bytes

log = logging.getLogger("trio_pdproxy.discovery")

ANSWER_TIMEOUT = 10.0
"""Seconds for a connection, for an answer's head, and between two reads of a list."""

ANSWER_LIMIT = 64 * 2**20
LINE_LIMIT = 4 * 2**20
"""Bytes of a list and of one event: a pod has at most about 1.5 MiB in etcd."""


class ApiError(Exception):
    """The API cannot be asked, or refuses; the text says why."""


class GoneError(ApiError):
    """410: what was asked for is no longer remembered; list again."""


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int = 0


class Api:
    """Where the API is and how it is asked. The settings name it, else the cluster the proxy runs in."""

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self._url = settings.kubernetes_api or _in_cluster(environ)
        self._folder = settings.kubernetes_credentials
        self._namespace = settings.kubernetes_namespace

    async def namespace(self) -> str:
        """The namespace to look at. Raises `ApiError`."""
        if self._namespace:
            return self._namespace
        try:
            text = await trio.Path(self._folder / "namespace").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ApiError(f"kubernetes_namespace is not set and {self._folder}/namespace: {error}") from None
        return text.strip()

    async def get(self, path: str, query: Mapping[str, str]) -> bytes:
        """The body of a 200. Raises `ApiError`."""
        async with await self._open(path, query) as answer:
            return await answer.read()

    async def lines(self, path: str, query: Mapping[str, str]) -> Answer:
        """A 200 that is read a line at a time, to be used as `async with`. Raises `ApiError`."""
        return await self._open(path, query)

    async def _open(self, path: str, query: Mapping[str, str]) -> Answer:
        if self._url is None:
            raise ApiError(
                "not in a Kubernetes cluster (KUBERNETES_SERVICE_HOST is not set): name it by kubernetes_api"
            )
        origin = Origin.of(self._url)
        secure = origin.scheme == "https"
        headers = [(b"host", origin.authority.encode()), (b"accept", b"application/json"), (b"connection", b"close")]
        context = await trio.to_thread.run_sync(_context, self._folder) if secure else None
        if secure:  # never in the clear
            headers.append((b"authorization", await self._authorization()))
        connections = Connections(origin, connect_timeout=ANSWER_TIMEOUT, ssl_context=context)
        try:
            connection = await connections.take()
        except EngineError as error:
            raise ApiError(f"{self._url}: {error}") from None
        answer = Answer(connections, connection, f"GET {path}")
        try:
            data = request_bytes(b"GET", f"{path}?{urlencode(query)}".encode(), headers, b"")
            await answer.begin(data)
        except BaseException:
            with trio.CancelScope(shield=True):
                await answer.close()
            raise
        return answer

    async def _authorization(self) -> bytes:
        try:
            token = (await trio.Path(self._folder / "token").read_text(encoding="ascii")).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ApiError(f"cannot read the service account's token: {error}") from None
        if not token or any(not 32 < ord(c) < 127 for c in token):
            raise ApiError(f"{self._folder}/token holds no token")
        return b"Bearer " + token.encode()


class Answer:
    """One answer under way. `async with` closes its connection."""

    def __init__(self, connections: Connections, connection: Connection, what: str) -> None:
        self._connections = connections
        self._connection = connection
        self._what = what
        self._buffer = bytearray()

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with trio.CancelScope(shield=True):
            await self.close()

    async def close(self) -> None:
        await self._connections.close(self._connection)

    async def begin(self, request: bytes) -> None:
        """Send it and look at the status. Raises `ApiError`."""
        try:
            with trio.fail_after(ANSWER_TIMEOUT):
                await self._connection.send(request)
                head = await self._connection.receive_head()
        except EngineError as error:
            raise ApiError(f"{self._what}: {error}") from None
        except trio.TooSlowError:
            raise ApiError(f"{self._what}: no answer within {ANSWER_TIMEOUT:g} s") from None
        if head.status != 200:
            raise self._refusal(head.status, await self.read())

    def _refusal(self, status: int, body: bytes) -> ApiError:
        try:
            said = msgspec.json.decode(body, type=_Status).message
        except msgspec.DecodeError:
            said = body[:200].decode("utf-8", "replace")
        if status == 410:
            return GoneError(f"{self._what}: 410 {said}")
        hint = " (may the proxy's service account list and watch pods?)" if status in (401, 403) else ""
        return ApiError(f"{self._what}: {status} {said}{hint}")

    async def read(self) -> bytes:
        """All of it. Raises `ApiError`."""
        while piece := await self._receive(ANSWER_TIMEOUT):
            self._buffer += piece
            if len(self._buffer) > ANSWER_LIMIT:
                raise ApiError(f"{self._what}: the answer is larger than {ANSWER_LIMIT} bytes")
        return bytes(self._buffer)

    async def line(self, within: float) -> bytes | None:
        """The next line, waiting up to `within` seconds for each piece of it; None at the end. Raises `ApiError`."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > LINE_LIMIT:
                raise ApiError(f"{self._what}: a line is longer than {LINE_LIMIT} bytes")
            if not (piece := await self._receive(within)):
                return None  # half a line is no event
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    async def _receive(self, within: float) -> bytes:
        try:
            with trio.fail_after(within):
                return await self._connection.receive_body()
        except EngineError as error:
            raise ApiError(f"{self._what}: {error}") from None
        except trio.TooSlowError:
            raise ApiError(f"{self._what}: silent for {within:g} s") from None


def _in_cluster(environ: Mapping[str, str]) -> str | None:
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{Address(host, int(port))}" if host else None


def _context(folder: Path) -> ssl.SSLContext:
    authority = folder / "ca.crt"
    try:
        return ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
    except (OSError, ssl.SSLError) as error:
        raise ApiError(f"cannot use {authority}: {error}") from None
