"""Errors the client sees, told by whose fault they are.

An engine's own error body is passed on as it came and never becomes one of these; these are what the
proxy itself has to say. Each carries the HTTP status it hints at.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TypeVar

import msgspec

E = TypeVar("E", bound=BaseException)

JSON_TYPE = (b"content-type", b"application/json")


class Fault(Enum):
    """Whose fault an error is. The value is the `type` in OpenAI's error shape."""

    CLIENT = "invalid_request_error"
    PREFILL = "prefill_error"
    DECODE = "decode_error"
    PROXY = "server_error"
    BUSY = "overloaded_error"


class Dialect(Enum):
    """The shapes in which the APIs tell errors."""

    OPENAI = "openai"
    RESPONSES = "responses"
    """OpenAI's, but for the events of /v1/responses."""
    ANTHROPIC = "anthropic"


# Anthropic's names, by status: https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ProxyError(Exception):
    """Something the proxy answers itself.

    `status` is an HTTP status; `code` a stable word for programs; `param` the member of the request
    at fault, if one is; `retry_after` seconds, for 429 and 503.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        fault: Fault,
        code: str,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.fault = fault
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self, dialect: Dialect = Dialect.OPENAI) -> bytes:
        """The error as a body: OpenAI's `{"error": {"message", "type", "param", "code"}}`, or Anthropic's
        `{"type": "error", "error": {"type", "message"}}`."""
        if dialect is Dialect.ANTHROPIC:
            return msgspec.json.encode(
                {"type": "error", "error": {"type": self._anthropic_type(), "message": self.message}}
            )
        return msgspec.json.encode({"error": self._members()})

    def event(self, dialect: Dialect = Dialect.OPENAI, after: bytes = b"") -> bytes:
        """The error as one server-sent event, blank line included. Never followed by a `[DONE]` of ours.

        `after` are the stream's last events: those of /v1/responses are numbered.
        """
        if dialect is Dialect.OPENAI:
            return b"data: " + self.body() + b"\n\n"
        if dialect is Dialect.RESPONSES:
            number = next_sequence_number(after)
            members = {"type": "error", "code": self.code, "message": self.message, "param": self.param}
            return b"event: error\ndata: " + msgspec.json.encode(members | {"sequence_number": number}) + b"\n\n"
        return b"event: error\ndata: " + self.body(dialect) + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [JSON_TYPE]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        return headers

    def _anthropic_type(self) -> str:
        default = "invalid_request_error" if self.status < 500 else "api_error"
        return _ANTHROPIC_TYPES.get(self.status, default)

    def _members(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.fault.value, "param": self.param, "code": self.code}


_NUMBERS = re.compile(rb'"sequence_number":\s*([0-9]{1,15})')


def next_sequence_number(events: bytes) -> int:
    """The number of the event that follows these of /v1/responses; 0 where there are none."""
    found = _NUMBERS.findall(events)
    return int(found[-1]) + 1 if found else 0


def as_event(body: bytes, dialect: Dialect) -> bytes:
    """A whole error body (an engine's or ours) as one event of a stream that has begun with nothing but comments."""
    if dialect is Dialect.RESPONSES:
        body = _flat(body)
    data = b"".join(b"data: %b\n" % line for line in body.splitlines() or [b""])
    return (b"" if dialect is Dialect.OPENAI else b"event: error\n") + data + b"\n"


class _Told(msgspec.Struct):
    message: str = "the request failed"
    code: str | int | None = None
    param: str | None = None


class _Body(msgspec.Struct):
    error: _Told


def _flat(body: bytes) -> bytes:
    try:
        told = msgspec.json.decode(body, type=_Body).error
    except (msgspec.DecodeError, RecursionError):
        told = _Told()
    code = None if told.code is None else str(told.code)
    members = {"type": "error", "code": code, "message": told.message, "param": told.param, "sequence_number": 0}
    return msgspec.json.encode(members)


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_request") -> ProxyError:
    """A client's fault that no engine has to be asked about: 400."""
    return ProxyError(message, status=400, fault=Fault.CLIENT, code=code, param=param)


def only(group: BaseExceptionGroup[BaseException], kind: type[E]) -> E | None:
    """The error to show where a group holds nothing but errors of `kind`; None where it must be passed on as it is.

    Of several it is the first by text: the order in a group is that in which tasks ended, and means nothing.
    """
    found, others = group.split(kind)
    if found is None or others is not None:
        return None
    return min(_leaves(found), key=str)


def _leaves(group: BaseExceptionGroup[E]) -> list[E]:
    leaves: list[E] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
