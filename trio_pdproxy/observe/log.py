"""Log records: one line each, on stderr, for people or for collectors; and one record for each exchange.

Only our own loggers, those under `trio_pdproxy`, are touched. A line never holds a prompt, a body or a key, and what
others wrote into it (an engine's error, a client's request id) cannot break it: line ends are escaped.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Literal

from trio_pdproxy.core.report import Report
from trio_pdproxy.core.verdict import Debt

Value = str | int | float | bool | None

ROOT = "trio_pdproxy"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left before it was told one. It is logged, never sent."""

LONGEST_REASON = 200
"""Characters. A reason may quote an engine's error, and an engine's error may quote a request."""

access = logging.getLogger(f"{ROOT}.access")


def configure(level: str = "info", format: Literal["text", "json"] = "text") -> None:
    """Write our records of at least `level` to stderr, in `format`. The last call is the one that counts.

    Our records then no longer reach the root logger: whoever configures that one as well would see each twice. Raises
    ValueError for a level or a format that does not exist.
    """
    if format not in _FORMATTERS:
        raise ValueError(f"log format {format!r} is none of {', '.join(_FORMATTERS)}")
    logger = logging.getLogger(ROOT)
    logger.setLevel(level.upper())
    logger.propagate = False
    handler = next((h for h in logger.handlers if isinstance(h, _Stderr)), None)
    if handler is None:
        handler = _Stderr()
        logger.addHandler(handler)
    handler.setFormatter(_FORMATTERS[format]())


def log_exchange(report: Report) -> None:
    """One record of level info for an exchange that is over, on `trio_pdproxy.access`."""
    if access.isEnabledFor(logging.INFO):
        # What `info` does, without looking through the stack for its caller.
        access.handle(access.makeRecord(access.name, logging.INFO, __file__, 0, Exchanged(report), (), None))


class Exchanged:
    """The message of an access record. As text it is `name=value ...`, `-` where there is none.

    `fields` always has the same names in the same order. Times are in ms, None where the thing never happened. The
    engines, `gap_ms` and `dispatch_id` (under which the engines know the request) are the last pair's.
    """

    __slots__ = ("fields",)

    def __init__(self, report: Report) -> None:
        self.fields = exchange_fields(report)

    def __str__(self) -> str:
        return " ".join(f"{name}={_word(value)}" for name, value in self.fields.items())


def exchange_fields(report: Report) -> dict[str, Value]:
    """What is said of an exchange; see `Exchanged`."""
    last = report.dispatches[-1] if report.dispatches else None
    status = report.status
    if status is None and report.outcome == "disconnect":
        status = CLIENT_CLOSED_REQUEST
    return {
        "id": report.request_id,
        "route": report.route,
        "kind": report.kind or None,
        "stream": report.stream,
        "status": status,
        "outcome": report.outcome,
        "prefill": last.prefill.engine if last and last.prefill else None,
        "decode": last.decode.engine if last else None,
        "dispatches": len(report.dispatches),
        "dispatch_id": last.id if last else None,
        "queue_ms": _ms(report.planned, report.leased),
        "ttft_ms": _ms(report.accepted, report.first_byte),
        "total_ms": _ms(report.accepted, report.last_byte),
        "settle_ms": _ms(report.last_byte, report.ended),
        "gap_ms": _ms(0.0, last.gap) if last else None,
        "events": report.events,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "completion_tokens": report.completion_tokens,
        "debt": _debt(report),
        "settled": next((d.settled for d in reversed(report.dispatches) if d.settled), None),
        "rescue": next((d.rescue for d in reversed(report.dispatches) if d.rescue), None),
        "reason": next((d.reason[:LONGEST_REASON] for d in reversed(report.dispatches) if d.reason), None),
    }


def _debt(report: Report) -> str:
    """The worst that any of its dispatches came to."""
    debts = {dispatch.debt for dispatch in report.dispatches}
    return next((debt.value for debt in (Debt.STRANDED, Debt.PAID) if debt in debts), Debt.NONE.value)


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round((end - start) * 1000, 3)


_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")  # printable ASCII, less the space, the quote, the backslash and =


def _word(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value != "-" else json.dumps(value)
    return str(value)


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at the time: whoever redirects it later is followed."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _Text(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info pool: message`."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname.lower()} {record.name.removeprefix(f'{ROOT}.')}: "
        line += "\n".join(filter(None, (record.getMessage(), _traceback(record))))
        return _CONTROLS.sub(_escape, line)


class _Json(logging.Formatter):
    """One object: time, level, logger, message; an access record's fields beside them; exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        members: dict[str, Value] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, Exchanged):
            members["message"] = "exchange"
            members |= record.msg.fields
        else:
            members["message"] = record.getMessage()
        if traceback := _traceback(record):
            members["exception"] = traceback
        return json.dumps(members)


_FORMATTERS: dict[str, type[logging.Formatter]] = {"text": _Text, "json": _Json}

# All that some reader takes for the end of a line or for a terminal's command.
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1] if match[0] != "\x7f" else "\\u007f"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_plain = logging.Formatter()


def _traceback(record: logging.LogRecord) -> str:
    return _plain.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
