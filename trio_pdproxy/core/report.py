"""What an exchange leaves behind: one value with its instants and its outcome.

Instants are seconds on the clock the exchange was given (trio's), None where the thing never happened.
Whoever measures, logs or draws reads reports; the exchange knows none of them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from trio_pdproxy.core.trace import TraceContext
from trio_pdproxy.core.verdict import Debt, Decode, Prefill

PIECES = 128
"""Instants of an answer's pieces that a report keeps (an even number): of longer answers every second, fourth, ..."""


@dataclass(slots=True)
class LegReport:
    """One leg of one dispatch."""

    engine: str
    sent: float | None = None
    """On the wire: the first send of the request has returned."""
    head: float | None = None
    first: float | None = None
    """First byte of the body."""
    end: float | None = None
    status: int | None = None
    reused: bool = False
    """Sent on a kept-alive connection."""


@dataclass(slots=True)
class DispatchReport:
    """One pair tried for a request."""

    id: str
    prefill: LegReport | None
    """None where one engine alone was asked."""
    decode: LegReport
    prefill_outcome: Prefill = Prefill.UNSENT
    decode_outcome: Decode = Decode.UNSENT
    debt: Debt = Debt.NONE
    """What the debt came to: never CARRY or RESCUE once the exchange is over."""
    settled: str | None = None
    """Why the prefill leg was carried on when nobody waited for it: disconnect, decode_failed,
    prefill_failed, timeout, drain."""
    rescue: str | None = None
    """Why the prefill leg was sent again: the outcome that made it necessary, or `lapsed`."""
    rescue_paid: bool | None = None
    rescued: float | None = None
    """The second prefill leg was asked for."""
    settled_at: float | None = None
    """Both legs have ended, and the debt is paid, stranded, or was none."""
    prompt_tokens: int | None = None
    """As the prefill engine counted them."""
    reason: str | None = None
    """What went wrong in words, for the log."""

    @property
    def gap(self) -> float | None:
        """The decode-start gap: decode leg on the wire minus prefill leg on the wire, seconds."""
        if self.prefill is None or self.prefill.sent is None or self.decode.sent is None:
            return None
        return self.decode.sent - self.prefill.sent


@dataclass(slots=True)
class Report:
    """One exchange."""

    request_id: str
    route: str
    stream: bool
    accepted: float
    """The request's head was there."""
    planned: float | None = None
    """Its body was read and understood."""
    leased: float | None = None
    """It had its place on the first pair."""
    first_byte: float | None = None
    """First body byte handed to the client."""
    last_byte: float | None = None
    """The client's response was complete, or given up."""
    ended: float | None = None
    """Nothing of the exchange is left, debts included."""
    status: int | None = None
    """What the client was told; None if it left before."""
    outcome: str = "error"
    """ok, client_error, prefill_error, decode_error, proxy_error, timeout, cut, disconnect, overloaded."""
    kind: str = ""
    dropped: tuple[str, ...] = ()
    events: int = 0
    """Pieces of the answer handed to the client."""
    prompt_tokens: int | None = None
    """As far as an engine told: prefill does in every answer, decode in whole ones and where `usage` was asked for."""
    cached_tokens: int | None = None
    """Of the prompt's: found in prefill's cache."""
    completion_tokens: int | None = None
    pieces: array[float] = field(default_factory=lambda: array("d"))
    """When: of every `stride`-th, the first one included; never more than `PIECES`."""
    stride: int = 1
    trace: TraceContext | None = None
    """None where nobody traces."""
    dispatches: list[DispatchReport] = field(default_factory=list)

    def handed(self, now: float) -> None:
        """One more piece of the answer is handed to the client."""
        if self.first_byte is None:
            self.first_byte = now
        if self.events % self.stride == 0:
            if len(self.pieces) == PIECES:
                del self.pieces[1::2]
                self.stride *= 2
            self.pieces.append(now)
        self.events += 1
