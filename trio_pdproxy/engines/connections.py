"""An engine's kept-alive connections: O(1) to take and to give back, however many are open.

Idle ones lie in a deque, newest last. The newest is taken first, the oldest expire first, and well before the
engine's own keep-alive ends (vLLM's server closes after 5 s), so that a request never races that close.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import trio

from trio_pdproxy.engines.wire import Connection, RefusedError

KEEPALIVE = 3.0
"""Seconds an idle connection may be used again."""

Dial = Callable[[str, int], Awaitable[trio.abc.Stream]]
"""Opens a stream to host and port; raises OSError. Tests put a network in memory here."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an engine is: scheme, host (IPv6 without brackets) and port."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https address: {url!r}")
        return cls(parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))

    @property
    def authority(self) -> str:
        """For the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connections:
    """The connections to one engine.

    `take` gives one that is ready for a request: a kept-alive one that the engine has not closed, else a new one;
    `give_back` returns it after a request: kept if it can serve another, else closed. A taken connection
    is given back or closed by whoever took it, whatever happens.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        connect_timeout: float = 5.0,
        ssl_context: ssl.SSLContext | None = None,
        dial: Dial | None = None,
    ) -> None:
        self.origin = origin
        self._connect_timeout = connect_timeout
        self._ssl = ssl_context
        if origin.scheme == "https" and ssl_context is None:
            self._ssl = ssl.create_default_context()
        self._dial = dial or trio.open_tcp_stream
        self._idle: deque[Connection] = deque()
        self.open = 0
        """Connections that exist, idle ones included."""
        self._shut = False

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def take(self, *, fresh: bool = False) -> Connection:
        """A connection. `fresh`: not one that has served before. Raises `RefusedError`."""
        if not fresh:
            while self._idle:
                connection = self._idle.pop()
                if connection.idle_since + KEEPALIVE > trio.current_time() and not connection.stale():
                    return connection
                await self._drop(connection)
        return await self._connect()

    async def _connect(self) -> Connection:
        try:
            with trio.fail_after(self._connect_timeout):
                stream = await self._dial(self.origin.host, self.origin.port)
                if self._ssl is not None:
                    stream = await self._handshake(stream)
        except trio.TooSlowError:
            raise RefusedError(f"no connection within {self._connect_timeout:g} s") from None
        except (OSError, UnicodeError, trio.BrokenResourceError) as error:  # UnicodeError: no host name
            raise RefusedError(f"no connection ({_words(error)})") from error
        self.open += 1
        return Connection(stream)

    async def _handshake(self, stream: trio.abc.Stream) -> trio.abc.Stream:
        assert self._ssl is not None
        try:
            secure = trio.SSLStream(stream, self._ssl, server_hostname=self.origin.host, https_compatible=True)
            await secure.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return secure

    async def give_back(self, connection: Connection) -> None:
        """Take `connection` back: keep it if its response is complete and it may serve again, else close it."""
        if self.keep(connection):
            await self._expire()
        else:
            await self._drop(connection)

    def keep(self, connection: Connection) -> bool:
        """The better half of `give_back`, without a checkpoint: keep it if it may serve again, else say no."""
        if self._shut or not connection.reusable:
            return False
        connection.recycle(trio.current_time())
        self._idle.append(connection)
        return True

    async def close(self, connection: Connection) -> None:
        """Close a taken connection instead of giving it back."""
        await self._drop(connection)

    async def _drop(self, connection: Connection) -> None:
        if not connection.closed:
            self.open -= 1
            await connection.close()

    async def _expire(self) -> None:
        deadline = trio.current_time() - KEEPALIVE
        while self._idle and self._idle[0].idle_since <= deadline:
            await self._drop(self._idle.popleft())

    async def expire(self) -> None:
        """Close the connections that have been idle too long. Called now and then by whoever watches the engine."""
        await self._expire()

    async def shut(self) -> None:
        """Close all idle connections, and from now on each one that is given back."""
        self._shut = True
        while self._idle:
            await self._drop(self._idle.popleft())


def _words(error: BaseException) -> str:
    """What the operating system said; trio wraps several attempts into one error."""
    leaf: BaseException = error
    while isinstance(cause := leaf.__cause__, BaseException):
        leaf = cause
    while isinstance(leaf, BaseExceptionGroup) and leaf.exceptions:
        leaf = leaf.exceptions[0]
    if isinstance(leaf, OSError) and leaf.strerror:
        return leaf.strerror
    return str(error) or type(error).__name__
