"""W3C trace context: whose trace a request belongs to, and what its legs are told of it.

The ids of the legs' spans are derived from the dispatch's id. So the engines can be told them before any span exists,
and whoever makes the spans afterwards, from a report, finds the same ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

# https://www.w3.org/TR/trace-context/#traceparent-header. Versions after 00 may append fields; ff is none.
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a request stands in a trace. Ids are lower-case hex: 32 digits the trace, 16 a span."""

    trace_id: str
    span_id: str
    """The request's own (SERVER) span."""
    parent_id: str | None = None
    """The client's span; None at the root."""
    sampled: bool = True
    attributes: tuple[tuple[str, str | int | float | bool], ...] = ()
    """Of the request, for its span. Never a prompt."""

    def traceparent(self, dispatch_id: str, role: str) -> bytes:
        """What the `role` leg of a dispatch tells its engine: that leg's span is the parent of the engine's."""
        return f"00-{self.trace_id}-{leg_span_id(dispatch_id, role)}-{self.sampled:02x}".encode()


def leg_span_id(dispatch_id: str, role: str) -> str:
    """The id of the span of one leg: `role` is prefill or decode. A rescue is the same leg."""
    return blake2b(f"{role} {dispatch_id}".encode(), digest_size=8).hexdigest()


def read_traceparent(value: bytes) -> tuple[str, str, bool] | None:
    """(trace id, the caller's span id, sampled); None where it is not valid, which starts a new trace."""
    match = _TRACEPARENT.fullmatch(value.strip())
    if match is None:
        return None
    trace_id, span_id, flags = match[1].decode(), match[2].decode(), int(match[3], 16)
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return trace_id, span_id, bool(flags & _SAMPLED)
