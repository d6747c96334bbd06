"""One HTTP/1.1 connection to an engine, on a trio stream.

The relay's upstream half: heads and framing are httptools' (llhttp); what is ours is how it is driven.
A read takes up to 64 KiB and hands on everything that came with it at once; reads can be cancelled and
resumed, no byte is lost; nothing here has a deadline of its own, whoever calls brings one.

A connection serves one request at a time: `send` (in pieces), `receive_head`, `receive_body` until it returns
`b""`, then `reusable` says whether another may follow. Whatever else happens, `close` it.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import httptools
import trio

READ_SIZE = 64 * 1024
HEAD_LIMIT = 64 * 1024
"""Bytes of a response before its body: far above any engine's, far below what could hurt."""
HEADER_LIMIT = 100
INFORMATIONAL_LIMIT = 8
SILENT_LIMIT = 64 * 1024
"""Bytes of framing (chunk extensions, trailers) without one byte of body."""

Headers = list[tuple[bytes, bytes]]


class EngineError(Exception):
    """An engine could not be talked to. The text says what happened, not to whom: the caller knows."""


class RefusedError(EngineError):
    """No connection was had: nothing was sent, for sure."""


class SilentError(EngineError):
    """It did not answer in time: it may be gone, or its machine be starved."""


class BrokenError(EngineError):
    """A connection broke, or what came is no HTTP. What was sent before may have been acted upon."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of a response; header names in lower case."""

    status: int
    headers: Headers

    def get(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None


def request_bytes(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A whole request. Headers must be free of line breaks (what a server has parsed is)."""
    lines = [b"%s %s HTTP/1.1\r\n" % (method, target)]
    lines += [b"%s: %s\r\n" % pair for pair in headers]
    if body or method == b"POST":
        lines.append(b"content-length: %d\r\n" % len(body))
    lines.append(b"\r\n")
    lines.append(body)
    return b"".join(lines)


async def read_socket(socket: trio.socket.SocketType, size: int) -> bytes:
    """What a `SocketStream`'s own `receive_some` does, in fewer steps; always a checkpoint. Raises
    `trio.ClosedResourceError` and `trio.BrokenResourceError`."""
    while True:
        if socket.fileno() < 0:
            raise trio.ClosedResourceError("this end has closed it")
        await trio.lowlevel.wait_readable(socket)
        try:
            return os.read(socket.fileno(), size)
        except BlockingIOError:
            continue
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error


class Connection:
    """See the module. `stream` is any trio stream; staleness can only be seen on sockets, where the system has poll."""

    __slots__ = (
        "_between_chunks",
        "_complete",
        "_data",
        "_failure",
        "_fast",
        "_framed",
        "_head",
        "_header_count",
        "_headers",
        "_informational",
        "_keep_alive",
        "_parser",
        "_poll",
        "_received",
        "_silent",
        "_socket",
        "_stream",
        "closed",
        "idle_since",
        "served",
        "spoiled",
    )

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        transport = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
        self._socket = transport.socket if isinstance(transport, trio.SocketStream) else None
        self._fast = self._socket if stream is transport else None
        """The socket, where its bytes are the stream's."""
        self._poll: select.poll | None = None
        if self._socket is not None and hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(self._socket.fileno(), select.POLLIN)
        self.idle_since = 0.0
        self.served = 0
        """Responses completed: more than none means the next request is sent on a reused connection."""
        self.closed = False
        self.spoiled = False
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._data: list[bytes] = []
        self._failure: BrokenError | None = None  # to be raised once what came before it has been taken
        self._headers: Headers = []
        self._head: Head | None = None
        self._header_count = 0
        self._informational = 0
        self._framed = False
        self._between_chunks = False  # the parser has seen a chunk's end last, for sure
        self._keep_alive = False
        self._complete = False
        self._received = 0
        self._silent = 0

    # -- what the parser reports -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self.spoiled = True  # more than one answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._complete:
            return
        self._header_count += 1
        if self._head is None:  # else it is a trailer: no header of the answer
            self._headers.append((name.lower(), value.rstrip(b" \t")))  # llhttp strips the front only

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._informational += 1
            self._headers = []
            return
        if self._header_count > HEADER_LIMIT or self._informational > INFORMATIONAL_LIMIT:
            return  # no head that anybody is to see
        # Asked here because llhttp forgets what it knew once the message is complete.
        self._keep_alive = self._parser.should_keep_alive()
        self._framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)
        self._head = Head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._data.append(data)

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._complete = True

    # -- sending ---------------------------------------------------------------------------------

    def send_now(self, data: memoryview) -> int:
        """Send what the kernel takes of `data` at once; the number of bytes, 0 where it takes none or this is no
        plain socket. No checkpoint: nothing else runs between this and what the caller does next. Raises `BrokenError`.
        """
        if self._fast is None:
            return 0
        try:
            return os.write(self._fast.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.spoiled = True
            raise BrokenError(f"connection lost while sending ({error.strerror})") from error

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of `data`. Raises `BrokenError`; after that or a cancellation the request is not resumable."""
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.spoiled = True
            raise BrokenError(f"connection lost while sending ({_cause(error)})") from error
        except BaseException:
            self.spoiled = True  # cut in the middle: whatever comes next would be read as the rest of it
            raise

    # -- receiving -------------------------------------------------------------------------------

    @property
    def received(self) -> int:
        """Bytes of this response that have come, heads and framing included, but for what was kept from `taken_in`."""
        return self._received

    async def receive_head(self) -> Head:
        """Status and headers of the final response (1xx are skipped). May be called again: same answer."""
        while self._head is None:
            await self._pull()
        return self._head

    async def receive_body(self) -> bytes:
        """What has come of the body since the last call, at least one byte; `b""` at its proper end.

        Raises `BrokenError` where the body ends before it should: a truncated body never looks complete.
        """
        while not self._data and not self._complete:
            await self._pull()
        return self._taken()

    def _taken(self) -> bytes:
        """What has come of the body, taken out."""
        pieces, self._data = self._data, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def waiting_for(self) -> int | None:
        """The socket that more of the body can be waited for at; None where that is no way to it: some has come, or
        the end, or this is no plain socket."""
        if self._fast is None or self._data or self._complete or self._failure is not None:
            return None
        return fd if (fd := self._fast.fileno()) >= 0 else None

    def is_one_chunk(self, data: bytes) -> bool:
        """Whether `data`, the next that has come, is one whole chunk that ends as an event does, framed as everybody
        frames chunks: no extension, no leading zero, digits in lower case. May be False where it is.

        Such a chunk may be kept from `taken_in`: whoever has it knows all that could be found in it.
        """
        return (
            self._between_chunks
            and data[-4:] == b"\n\n\r\n"
            and len(data) > 6  # else the first of these line feeds is the size's
            and data[: (end := data.find(b"\r\n", 0, 8))] == b"%x" % (len(data) - end - 4)
        )

    def taken_in(self, data: bytes) -> bytes | None:
        """The body in `data`, which somebody has read at the socket; `b""` where it has none. None: something else is
        there (an end, a failure), which `receive_body` tells."""
        if data:
            with suppress(BrokenError):  # it is kept
                self._take_in(data)
        if not data or self._complete or self._failure is not None:
            return None
        return self._taken()

    def lost(self, error: OSError) -> None:
        """Somebody could not read at the socket: `receive_body` tells."""
        self.spoiled = True
        self._failure = BrokenError(f"connection lost while receiving ({error.strerror})")

    async def receive_all(self, limit: int) -> bytes:
        """The whole body, of at most `limit` bytes (`BrokenError` beyond). Not resumable."""
        pieces = []
        size = 0
        while piece := await self.receive_body():
            size += len(piece)
            if size > limit:
                self.spoiled = True
                raise BrokenError(f"an answer of more than {limit} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    async def _pull(self) -> None:
        """Take in what has come, at least one byte or the end; always a checkpoint."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._fast is None:
                data: bytes | bytearray = await self._stream.receive_some(READ_SIZE)
            else:
                data = await read_socket(self._fast, READ_SIZE)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.spoiled = True
            raise BrokenError(f"connection lost while receiving ({_cause(error)})") from error
        if data:
            self._take_in(data)
        else:
            self._end_of_stream()

    def _take_in(self, data: bytes | bytearray) -> None:
        self._received += len(data)
        had, head = len(self._data), self._head
        wrong = ""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.spoiled = True  # after a complete answer only the connection suffers
            if not self._complete:
                wrong = f"not HTTP: {error}"
        self._between_chunks = False
        if head is not None and len(self._data) > had and not wrong:
            self._silent = 0
            # The last piece does not end as the data does, so something of the framing is behind it. A line of that
            # would have no line feed before its end: it is the line end after a chunk.
            self._between_chunks = data[-4:] == b"\n\n\r\n" and self._data[-1][-2:] == b"\n\n"
            return  # more of a body: nothing else can be wrong with it
        if wrong := wrong or self._out_of_bounds(len(data), progress=len(self._data) > had or self._complete):
            self.spoiled = True
            self._failure = BrokenError(wrong)
            if len(self._data) == had and self._head is head:
                raise self._failure

    def _end_of_stream(self) -> None:
        self.spoiled = True
        if self._head is None:
            raise BrokenError(
                "connection closed before an answer" if not self._received else "connection closed in the head"
            )
        if self._framed:
            raise BrokenError("connection closed before the end of the answer")
        self._complete = True  # neither length nor chunks: the end of the stream is the end of the body

    def _out_of_bounds(self, size: int, *, progress: bool) -> str:
        """What there is too much of, if anything."""
        if self._header_count > HEADER_LIMIT or self._informational > INFORMATIONAL_LIMIT:
            return "more headers than any engine sends"
        if self._head is None:
            return "a head beyond all bounds" if self._received > HEAD_LIMIT else ""
        self._silent = 0 if progress else self._silent + size
        return "framing without end" if self._silent > SILENT_LIMIT else ""

    # -- the life between requests ---------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """The response has been received to its proper end (its last bytes may still be here to take)."""
        return self._complete

    @property
    def reusable(self) -> bool:
        return self._complete and not self.spoiled and not self.closed and self._keep_alive

    def recycle(self, now: float) -> None:
        """Make ready for the next request. Only when `reusable`."""
        self.idle_since = now
        self.served += 1
        self._begin()

    def stale(self) -> bool:
        """Whether the engine has closed (or spoken out of turn on) this idle connection."""
        if self.closed or self._poll is None:
            return self.closed
        return bool(self._poll.poll(0))

    async def close(self) -> None:
        """Close at once, also under cancellation; never raises, never waits for the engine."""
        self.closed = True
        with trio.CancelScope(shield=True):  # it waits for nothing; the caller's cancellation is not its to raise
            await trio.aclose_forcefully(self._stream)


def _cause(error: BaseException) -> str:
    """The operating system's word for a broken stream, where there is one."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(error) or type(error).__name__
