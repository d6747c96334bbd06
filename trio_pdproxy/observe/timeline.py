"""Timelines: what a report says, in a form that leaves the process.

A timeline holds instants, sizes, engines' names and the words of fixed sets: no prompt, no answer, and none of the
sentences in a report (an engine's error may quote a request). It is made when somebody asks, from the reports that are
kept, so it costs a request nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from statistics import fmean, quantiles

import msgspec

from trio_pdproxy.core.report import DispatchReport, LegReport, Report
from trio_pdproxy.core.verdict import Decode

VERSION = 1

_SPOKE = frozenset(outcome.value for outcome in (Decode.DONE, Decode.SPEAKING, Decode.CUT))


class Leg(msgspec.Struct, frozen=True):
    """One leg. Instants in seconds after the timeline's `at`; null where the thing never happened."""

    engine: str
    outcome: str
    """What it came to: the words of `core.verdict`."""
    sent: float | None = None
    head: float | None = None
    first: float | None = None
    end: float | None = None
    status: int | None = None
    reused: bool = False

    @property
    def spoke(self) -> bool:
        """Of a decode leg: its first byte was the answer's (and no error's)."""
        return self.first is not None and self.outcome in _SPOKE


class Try(msgspec.Struct, frozen=True):
    """One pair tried."""

    id: str
    """Under which both engines know it."""
    prefill: Leg | None
    decode: Leg
    debt: str
    settled: str | None = None
    rescue: str | None = None
    rescue_paid: bool | None = None
    rescued: float | None = None
    settled_at: float | None = None
    prompt_tokens: int | None = None

    @property
    def gap(self) -> float | None:
        """The decode-start gap in seconds."""
        if self.prefill is None or self.prefill.sent is None or self.decode.sent is None:
            return None
        return self.decode.sent - self.prefill.sent


class Timeline(msgspec.Struct, frozen=True):
    """One exchange. `at`: seconds since 1970, when the request's head was there. All else in seconds after it."""

    id: str
    at: float
    route: str
    kind: str
    stream: bool
    outcome: str
    status: int | None
    planned: float | None
    leased: float | None
    first_byte: float | None
    last_byte: float | None
    ended: float | None
    events: int
    pieces: list[float]
    """When the client took the pieces of its answer: of every `stride`-th one."""
    stride: int
    tries: list[Try]

    @property
    def gap(self) -> float | None:
        """The decode-start gap of the pair that was tried last."""
        return self.tries[-1].gap if self.tries else None


class Timelines(msgspec.Struct, frozen=True):
    """What `GET /timelines` answers and what `trio-pdproxy trace` reads."""

    timelines: list[Timeline]
    version: int = VERSION


def timelines_of(reports: Iterable[Report], wall: float) -> list[Timeline]:
    """The timelines of finished exchanges, in their order. `wall`: what to add to a report's instants to get seconds
    since 1970."""
    return [timeline_of(report, wall) for report in reports]


def timeline_of(report: Report, wall: float) -> Timeline:
    zero = report.accepted

    def after(instant: float | None) -> float | None:
        return None if instant is None else round(instant - zero, 7)

    def leg(of: LegReport, outcome: str) -> Leg:
        return Leg(
            engine=of.engine,
            outcome=outcome,
            sent=after(of.sent),
            head=after(of.head),
            first=after(of.first),
            end=after(of.end),
            status=of.status,
            reused=of.reused,
        )

    def tried(of: DispatchReport) -> Try:
        return Try(
            id=of.id,
            prefill=None if of.prefill is None else leg(of.prefill, of.prefill_outcome.value),
            decode=leg(of.decode, of.decode_outcome.value),
            debt=of.debt.value,
            settled=of.settled,
            rescue=of.rescue,
            rescue_paid=of.rescue_paid,
            rescued=after(of.rescued),
            settled_at=after(of.settled_at),
            prompt_tokens=of.prompt_tokens,
        )

    return Timeline(
        id=report.request_id,
        at=round(zero + wall, 6),
        route=report.route,
        kind=report.kind,
        stream=report.stream,
        outcome=report.outcome,
        status=report.status,
        planned=after(report.planned),
        leased=after(report.leased),
        first_byte=after(report.first_byte),
        last_byte=after(report.last_byte),
        ended=after(report.ended),
        events=report.events,
        pieces=[round(piece - zero, 7) for piece in report.pieces],
        stride=report.stride,
        tries=[tried(dispatch) for dispatch in report.dispatches],
    )


def read_timelines(data: bytes) -> list[Timeline]:
    """The other way round. Raises ValueError, with the place, for what is no timelines."""
    try:
        read = msgspec.json.decode(data, type=Timelines)
    except msgspec.DecodeError as error:  # also what is JSON and not of this shape
        raise ValueError(f"not the timelines of a trio-pdproxy: {error}") from None
    if read.version != VERSION:
        raise ValueError(f"timelines of version {read.version}; this trio-pdproxy reads version {VERSION}")
    return read.timelines


# -- figures over many ---------------------------------------------------------------------------


class Spread(msgspec.Struct, frozen=True):
    """How one figure is distributed; in the unit of the values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """Over the values that are there (None: there is none). Percentiles are interpolated, as numpy's are."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    cuts = quantiles(known, n=100, method="inclusive") if len(known) > 1 else known * 99
    return Spread(len(known), fmean(known), cuts[49], cuts[89], cuts[98], known[-1])


def size_of(report: Report) -> int:
    """Bytes of memory a report holds, what is shared with others (class objects, interned words) not counted."""
    seen: set[int] = set()

    def size(value: object) -> int:
        if id(value) in seen or value is None or isinstance(value, bool | type):
            return 0
        seen.add(id(value))
        total = sys.getsizeof(value)
        if isinstance(value, list | tuple):
            return total + sum(map(size, value))
        if is_dataclass(value):
            return total + sum(size(getattr(value, member.name)) for member in fields(value))
        return total

    return size(report)
