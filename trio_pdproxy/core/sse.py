"""Server-sent events, incrementally: bytes in at any split, whole events out, not one byte changed.

An engine's stream is relayed in whole events. So a stream that breaks in the middle of an event leaves
nothing half-said at the client, and what the proxy adds there (one error event) is always well formed.
vLLM writes each event in one piece, so holding back an unfinished tail costs no time in practice.
"""

from __future__ import annotations

import re

import msgspec

EVENT_LIMIT = 8 * 1024 * 1024
"""Bytes an event may have before the stream counts as broken (vLLM's are some hundred)."""

# The three line ends of the format; an event ends with an empty line (WHATWG HTML, section 9.2.5).
_BOUNDARY = re.compile(rb"\n\n|\r\r\n|\r\r|\r\n\r\n|\n\r\n|\r\n\n|\n\r")


class EventTooLongError(Exception):
    """An event has grown past the limit without ending."""


class EventFramer:
    """Cuts a byte stream at its last event boundary.

    `feed(data)` returns all whole events that have not been returned yet (maybe `b""`); the concatenation
    of everything returned and of `tail` is always the concatenation of everything fed.
    Raises `EventTooLongError` once `tail` would exceed `limit` bytes.
    """

    __slots__ = ("_limit", "tail")

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self.tail = b""
        self._limit = limit

    def feed(self, data: bytes) -> bytes:
        if not self.tail and data.endswith(b"\n\n"):  # one engine write, whole events: the usual case
            return data
        data = self.tail + data
        end = self._last_boundary(data)
        self.tail = data[end:]
        if len(self.tail) > self._limit:
            raise EventTooLongError(f"an event of more than {self._limit} bytes")
        return data[:end]

    def _last_boundary(self, data: bytes) -> int:
        if b"\r" not in data:
            return data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        end = 0
        # The tail never holds a boundary, so a search from a little before the new bytes would do;
        # carriage returns are too rare (no engine sends them) for that to matter.
        for match in _BOUNDARY.finditer(data):
            end = match.end()
        # A lone CR at the end may be the first half of CRLF: wait for what follows.
        if end == len(data) and data.endswith(b"\r"):
            return self._last_boundary(data[:-1]) if len(data) > 1 else 0
        return end


def events(block: bytes) -> list[bytes]:
    """The `data` of each event in `block` (whole events), comments and other fields left out.

    An event without data is no event (the format says so); several data lines are joined by a newline.
    """
    found: list[bytes] = []
    data: list[bytes] = []
    for line in block.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if not line:
            if data:
                found.append(b"\n".join(data))
                data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line == b"data":
            data.append(b"")
    return found


def has_event(block: bytes) -> bool:
    """Whether `block` (whole events) says anything: comments alone (`: ping`) do not."""
    if block.startswith(b"data:"):
        return True
    return bool(events(block))


def error_event(data: bytes) -> dict[str, object] | None:
    """The error an event reports, or None if it is no error.

    vLLM reports what goes wrong after its 200 as `data: {"error": {...}}`, on /v1/messages with a type beside it. A
    top-level member named error that holds an object is taken for one; generated text cannot look like it. On
    /v1/responses errors are events of type `error` (flat) or `response.failed`.
    """
    if b'"error"' not in data:
        return None
    try:
        members = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        kind = bytes(members.get("type", b""))
        if kind == b'"error"' and "error" not in members:
            return msgspec.json.decode(data, type=dict[str, object])
        if kind == b'"response.failed"':
            members = msgspec.json.decode(members["response"], type=dict[str, msgspec.Raw])
        error = msgspec.json.decode(members["error"], type=dict[str, object])
    except (KeyError, msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    return error


class _Typed(msgspec.Struct):
    type: str = ""


def type_of(data: bytes) -> bytes:
    """The top-level `type` of an event's data; empty where it has none."""
    try:
        return msgspec.json.decode(data, type=_Typed).type.encode()
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return b""
