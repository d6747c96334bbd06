"""Reading what an engine answers to one leg, as far as the verdict needs to know it.

Both readers can be cancelled and called again; nothing that came is lost. They raise nothing an engine can cause:
what became of the leg is what they return.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from trio_pdproxy.core import sse
from trio_pdproxy.core.plan import Api, told_in
from trio_pdproxy.core.report import LegReport
from trio_pdproxy.core.verdict import Decode, Prefill
from trio_pdproxy.engines.wire import BrokenError, Connection, Head, Headers

ANSWER_LIMIT = 64 * 1024 * 1024
"""Bytes of an answer that has to be held as a whole: prefill's, an error, a non-stream completion."""

OPENING_WAIT = 0.01
"""Seconds an event that opens a stream waits for the next one. Engines write both at once (vLLM 0.32: the role of a
chat, the message_start of /v1/messages), also where the second is an error: then no status has been told yet."""

# /v1/messages names no code in its events; this is the type that vLLM gives all of its own failures there.
_CODES = {"internal_error": 500}

# Names in lower case; the server adds its own date and server, and the client is told our request id.
_NOT_PASSED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"date",
        b"server",
        b"x-request-id",
    }
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's complete answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def retry_after(self) -> int | None:
        for name, value in self.headers:
            if name == b"retry-after" and value.isdigit():
                return int(value)
        return None


def passed_headers(head: Head) -> list[tuple[bytes, bytes]]:
    """What the client sees of an engine's headers: all but what belongs to one hop, and our own."""
    named = {token.strip().lower() for token in (head.get(b"connection") or b"").split(b",")}
    return [pair for pair in head.headers if pair[0] not in _NOT_PASSED and pair[0] not in named]


class Body:
    """A response read as a whole: `read` may be cancelled and called again."""

    __slots__ = ("_pieces", "_size", "connection", "report")

    def __init__(self, connection: Connection, report: LegReport) -> None:
        self.connection = connection
        self.report = report
        self._pieces: list[bytes] = []
        self._size = 0

    async def head(self) -> Head:
        head = await self.connection.receive_head()
        if self.report.head is None:
            self.report.head = trio.current_time()
            self.report.status = head.status
        return head

    async def read(self) -> Answer:
        """The complete answer. Raises `BrokenError`, also beyond `ANSWER_LIMIT`."""
        head = await self.head()
        while piece := await self.connection.receive_body():
            if self.report.first is None:
                self.report.first = trio.current_time()
            self._pieces.append(piece)
            self._size += len(piece)
            if self._size > ANSWER_LIMIT:
                self.connection.spoiled = True
                raise BrokenError(f"an answer of more than {ANSWER_LIMIT} bytes")
        self.report.end = trio.current_time()
        return Answer(head.status, passed_headers(head), b"".join(self._pieces))


def judge_prefill(answer: Answer, engine_id: str) -> Prefill:
    """What a prefill engine's answer means for a decode engine that was sent to `engine_id`."""
    if answer.status == 200:
        told = told_in(answer.body)
        return Prefill.OK if told is not None and told.remote_engine_id == engine_id else Prefill.FOREIGN
    if answer.status in (429, 503):
        return Prefill.BUSY
    if 400 <= answer.status < 500:
        return Prefill.REJECTED
    return Prefill.FAILED


class DecodeLeg:
    """The decode leg's answer up to the point where the client's status is known, and its stream after that."""

    def __init__(self, connection: Connection, report: LegReport, api: Api, *, several: bool = False) -> None:
        self.connection = connection
        self.report = report
        self._api = api
        self._several = several
        self._said: list[bytes] = []
        self.answer: Answer | None = None
        """Complete, where it is not a stream."""
        self.head: Head | None = None
        self.opening = b""
        """The first whole events of a stream."""
        self.reason = ""
        """What went wrong, in words."""
        self.framer: sse.EventFramer | None = None
        self.error_seen = False
        """The stream reported an error of its own after its first event."""
        self._body = Body(connection, report)

    async def speak(self) -> Decode:
        """Wait for what the engine says first: SPEAKING (a stream has begun), DONE (a complete 200), REJECTED,
        FAILED or BROKEN."""
        try:
            head = await self._body.head()
            if head.status == 200 and _is_event_stream(head):
                self.head = head
                return await self._first_event()
            self.answer = await self._body.read()
        except BrokenError as error:
            self.reason = str(error)
            return Decode.BROKEN
        if self.answer.status == 200:
            return Decode.DONE
        self.reason = f"answered {self.answer.status}"
        if 400 <= self.answer.status < 500:
            return Decode.REJECTED
        return Decode.FAILED if _is_engines_own(self.answer) else Decode.BROKEN

    async def _first_event(self) -> Decode:
        if self.framer is None:
            self.framer = sse.EventFramer()
        while not self._said:
            await self._read_opening()
        if len(self._said) == 1 and self._api.opening and self._api.opening in self._said[0]:
            with trio.move_on_after(OPENING_WAIT):
                while len(self._said) == 1:
                    await self._read_opening()
        return self._judge()

    async def _read_opening(self) -> None:
        """Some more of the stream's beginning, which is kept until it says something."""
        assert self.framer is not None
        data = await self.connection.receive_body()
        if not data:
            raise BrokenError("the stream ended before its first event")
        if self.report.first is None:
            self.report.first = trio.current_time()
        block = self._whole_events(data)
        self.opening += block
        if block:
            # Comments say nothing: an engine may send them (`: ping`) long before it has its KV. Nor do the events
            # that /v1/responses begins with.
            early = self._api.early
            self._said += [event for event in sse.events(block) if not early or sse.type_of(event) not in early]
        if not self._said and len(self.opening) > sse.EVENT_LIMIT:
            self.connection.spoiled = True
            raise BrokenError(f"more than {sse.EVENT_LIMIT} bytes before its first event")

    def _judge(self) -> Decode:
        first, *others = self._said
        if (error := sse.error_event(first)) is None and self._api.opening and self._api.opening in first and others:
            first, *others = others  # what opens a stream proves nothing by itself
            error = sse.error_event(first)
        if error is None:
            self.error_seen = any(sse.error_event(event) for event in others)
            return Decode.SPEAKING
        code = error.get("code") or _CODES.get(str(error.get("type")))
        status = code if isinstance(code, int) and 400 <= code < 600 else 502
        self.reason = f"its first event is an error ({code})"  # not its message: that may quote a prompt
        self.answer = Answer(status, [(b"content-type", b"application/json")], first)
        # A client's fault stays one, whichever way it is told: no other pair would judge it otherwise. But a refusal
        # proves that the engine holds nothing, and here one of several sequences speaks only for itself.
        return Decode.REJECTED if status < 500 and not self._several else Decode.FAILED

    def _whole_events(self, data: bytes) -> bytes:
        """The whole events that `data` completes. Raises `BrokenError` where one has no end."""
        assert self.framer is not None
        try:
            return self.framer.feed(data)
        except sse.EventTooLongError as error:
            self.connection.spoiled = True
            raise BrokenError(str(error)) from error

    async def more(self) -> bytes:
        """The stream's next whole events; `b""` at its proper end, after which `framer.tail` may hold a last
        unfinished one. Raises `BrokenError`."""
        assert self.framer is not None
        while True:
            data = await self.connection.receive_body()
            if not data:
                self.report.end = trio.current_time()
                return b""
            if block := self._looked_at(data):
                return block

    def passes(self, data: bytes) -> bool:
        """Whether what has come at the connection is one whole chunk of whole events, none of which has to be looked
        at. Then the client may get it as it is, and nobody else need see it."""
        assert self.framer is not None
        api = self._api
        return self.connection.is_one_chunk(data) and not (
            api.mark in data or api.end in data or b'"error"' in data or self.framer.tail
        )

    def more_in(self, data: bytes) -> bytes | None:
        """The whole events that what has come at the connection completes. None: `more` has to be asked. Raises
        `BrokenError`."""
        body = self.connection.taken_in(data)
        return self._looked_at(body) if body else body

    def _looked_at(self, data: bytes) -> bytes:
        """The whole events that `data` completes, an error among them noted."""
        block = self._whole_events(data)
        if b'"error"' in block and any(sse.error_event(event) for event in sse.events(block)):
            self.error_seen = True
        return block

    @property
    def passed_headers(self) -> Headers:
        assert self.head is not None
        return passed_headers(self.head)


def _is_engines_own(answer: Answer) -> bool:
    """Whether a 5xx is the engine's word, which proves that it holds nothing. A gateway between us says 502, 503 or
    504, seldom in JSON, when it has given up waiting for an engine that works on."""
    return answer.status not in (502, 504) and sse.error_event(answer.body) is not None


def _is_event_stream(head: Head) -> bool:
    return (head.get(b"content-type") or b"").lower().startswith(b"text/event-stream")
