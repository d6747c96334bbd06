"""Timelines as Chrome's trace JSON, for https://ui.perfetto.dev and chrome://tracing.

One process row for the proxy and one for each engine. Slices of one track must nest, so requests that overlap take
tracks of their own. Both legs are slices; an arrow leads from the end of the prefill leg to the decode leg's first
token. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from trio_pdproxy.observe.timeline import Leg, Timeline, Try

Event = dict[str, Any]
PROXY = 1


class _Tracks:
    """The tracks of one process: the first that is free from `start` on."""

    def __init__(self) -> None:
        self._free_from: list[float] = []

    def take(self, start: float, end: float) -> int:
        for number, free_from in enumerate(self._free_from):
            if free_from <= start:
                self._free_from[number] = end
                return number
        self._free_from.append(end)
        return len(self._free_from) - 1


def chrome_trace(timelines: Iterable[Timeline]) -> bytes:
    """The JSON. Times in it are microseconds after the first request."""
    known = sorted(timelines, key=lambda timeline: timeline.at)
    return msgspec.json.encode({"traceEvents": _Writer().write(known), "displayTimeUnit": "ms"})


class _Writer:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._tracks: dict[int, _Tracks] = {}
        self._processes: dict[tuple[str, str], int] = {}
        self._flows = 0

    def write(self, timelines: list[Timeline]) -> list[Event]:
        self._process("proxy", "requests")
        for timeline in timelines:
            self._request(timeline, timeline.at - timelines[0].at)
        return self._events

    def _process(self, role: str, name: str) -> int:
        if (pid := self._processes.get((role, name))) is None:
            pid = self._processes[role, name] = len(self._processes) + PROXY
            self._tracks[pid] = _Tracks()
            # Prefill engines above decode engines, the proxy above all.
            order = {"proxy": 0, "prefill": 1000, "decode": 2000}[role] + pid
            for what, args in (
                ("process_name", {"name": f"{role} {name}"}),
                ("process_sort_index", {"sort_index": order}),
            ):
                self._events.append({"ph": "M", "pid": pid, "tid": 0, "name": what, "args": args})
        return pid

    def _slice(self, pid: int, tid: int, name: str, start: float, end: float, **args: object) -> None:
        self._events.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "cat": "pdproxy",
                "name": name,
                "ts": round(start * 1e6, 1),
                "dur": round(max(end - start, 0) * 1e6, 1),
                "args": {key: value for key, value in args.items() if value is not None},
            }
        )

    def _request(self, timeline: Timeline, zero: float) -> None:
        last = timeline.last_byte or timeline.ended or 0.0
        end = max(last, timeline.ended or 0.0)
        tid = self._tracks[PROXY].take(zero, zero + end)
        self._slice(
            *(PROXY, tid, timeline.id, zero, zero + last),
            outcome=timeline.outcome,
            status=timeline.status,
            route=timeline.route,
            kind=timeline.kind,
            gap_ms=_ms(timeline.gap),
            ttft_ms=_ms(timeline.first_byte),
            pieces=timeline.events,
        )
        if timeline.planned is not None and timeline.leased is not None and timeline.leased - timeline.planned > 1e-4:
            self._slice(PROXY, tid, "queue", zero + timeline.planned, zero + timeline.leased)
        for tried in timeline.tries:
            self._try(timeline, tried, zero)

    def _try(self, timeline: Timeline, tried: Try, zero: float) -> None:
        source = None
        if tried.prefill is not None:
            source = self._leg("prefill", tried.prefill, tried, timeline, zero)
        target = self._leg("decode", tried.decode, tried, timeline, zero)
        if source is None or target is None or not tried.decode.spoke:
            return
        assert tried.prefill is not None and tried.decode.first is not None  # noqa: PT018
        self._flows += 1
        start = min(tried.prefill.end or tried.decode.first, tried.decode.first)
        for ph, (pid, tid), at in (("s", source, start), ("f", target, tried.decode.first)):
            flow: Event = {"ph": ph, "pid": pid, "tid": tid, "cat": "kv", "name": "KV", "id": self._flows}
            self._events.append(flow | {"ts": round((zero + at) * 1e6, 1), **({"bp": "e"} if ph == "f" else {})})

    def _leg(self, role: str, leg: Leg, tried: Try, timeline: Timeline, zero: float) -> tuple[int, int] | None:
        """The leg's slices; where they are."""
        if leg.sent is None:
            return None
        end = leg.end if leg.end is not None else max(leg.sent, tried.settled_at or timeline.ended or leg.sent)
        pid = self._process(role, leg.engine)
        tid = self._tracks[pid].take(zero + leg.sent, zero + end)
        self._slice(
            *(pid, tid, f"{role} leg", zero + leg.sent, zero + end),
            request=timeline.id,
            dispatch=tried.id,
            outcome=leg.outcome,
            status=leg.status,
            prompt_tokens=tried.prompt_tokens if role == "prefill" else None,
            debt=tried.debt if role == "decode" else None,
            rescue=tried.rescue if role == "prefill" else None,
            settled=tried.settled if role == "prefill" else None,
            kept_alive_connection=leg.reused,
        )
        if role == "decode" and leg.spoke:
            assert leg.first is not None
            self._slice(pid, tid, "waits for KV", zero + leg.sent, zero + leg.first)
            self._slice(pid, tid, "tokens", zero + leg.first, zero + end, pieces=timeline.events)
            at = round((zero + leg.first) * 1e6, 1)
            self._events.append({"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": "first token", "ts": at})
        return pid, tid


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 4)
