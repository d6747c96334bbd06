"""The log: one line a record, JSON that parses, and nothing in it that must not be there."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from trio_pdproxy.core.report import DispatchReport, LegReport, Report
from trio_pdproxy.core.verdict import Debt
from trio_pdproxy.observe.log import LONGEST_REASON, configure, exchange_fields, log_exchange

FIELDS = [
    "id",
    "route",
    "kind",
    "stream",
    "status",
    "outcome",
    "prefill",
    "decode",
    "dispatches",
    "dispatch_id",
    "queue_ms",
    "ttft_ms",
    "total_ms",
    "settle_ms",
    "gap_ms",
    "events",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "debt",
    "settled",
    "rescue",
    "reason",
]

log = logging.getLogger("trio_pdproxy.test")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    logger = logging.getLogger("trio_pdproxy")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.level, logger.propagate, logger.handlers = before
    logger.setLevel(before[0])  # empties the loggers' caches


class Written:
    """All that has been written to stderr so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Written:
    return Written(capsys)


def lines(stream: Written | io.StringIO) -> list[str]:
    text = stream.getvalue()
    assert text.endswith("\n")
    return text.splitlines()


def objects(stream: Written | io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(stream)]


def report(**values: Any) -> Report:
    ours: dict[str, Any] = {
        "request_id": "r1",
        "route": "/v1/completions",
        "stream": True,
        "accepted": 10.0,
        "planned": 10.001,
        "leased": 10.006,
        "first_byte": 10.2,
        "last_byte": 11.2,
        "ended": 11.3,
        "status": 200,
        "outcome": "ok",
        "kind": "push",
        "events": 11,
        "prompt_tokens": None,
        "cached_tokens": None,
        "completion_tokens": None,
        "dispatches": [dispatch()],
    }
    return Report(**(ours | values))


def dispatch(name: str = "a", **values: Any) -> DispatchReport:
    return DispatchReport(
        id=name * 32,
        prefill=LegReport(f"p-{name}", sent=10.01),
        decode=LegReport(f"d-{name}", sent=10.0104),
        **({"debt": Debt.PAID} | values),
    )


# -- configure -----------------------------------------------------------------------------------


def test_configure_twice_writes_once(stderr: Written) -> None:
    configure("info", "text")
    configure("info", "json")
    log.info("hello")
    assert [entry["message"] for entry in objects(stderr)] == ["hello"]


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "critical"])
def test_level(level: str, stderr: Written) -> None:
    configure(level, "json")
    for each in ("debug", "info", "warning", "error", "critical"):
        getattr(log, each)("x")
    found = [entry["level"] for entry in objects(stderr)]
    assert found[0] == level
    assert found[-1] == "critical"


def test_level_of_the_last_call_counts(stderr: Written) -> None:
    configure("debug", "text")
    configure("error", "text")
    log.info("quiet")
    log_exchange(report())
    assert stderr.getvalue() == ""


def test_wrong_words_are_refused() -> None:
    with pytest.raises(ValueError, match="none of text, json"):
        configure("info", "xml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LOUD"):
        configure("loud", "text")


def test_only_our_loggers_are_touched(stderr: Written) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    other = logging.getLogger("somebody.else")
    configure("debug", "text")
    assert (root.level, root.handlers) == before
    assert other.handlers == []
    other.info("not ours")
    assert stderr.getvalue() == ""


def test_root_does_not_write_it_again(stderr: Written) -> None:
    heard: list[logging.LogRecord] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record)

    ear = Ear()
    logging.getLogger().addHandler(ear)
    try:
        configure("info", "text")
        log.info("once")
    finally:
        logging.getLogger().removeHandler(ear)
    assert heard == []
    assert len(lines(stderr)) == 1


def test_other_handlers_of_ours_are_kept() -> None:
    theirs = logging.NullHandler()
    logging.getLogger("trio_pdproxy").addHandler(theirs)
    configure("info", "text")
    assert theirs in logging.getLogger("trio_pdproxy").handlers


def test_follows_stderr(stderr: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("info", "text")
    log.info("here")
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    log.info("there")
    assert len(lines(stderr)) == len(lines(later)) == 1


def test_a_stderr_that_is_gone_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    configure("info", "text")
    monkeypatch.setattr(sys, "stderr", None)
    log.info("nobody hears this")


# -- one line ------------------------------------------------------------------------------------


def test_text_line(stderr: Written) -> None:
    configure("info", "text")
    log.warning("engine %s is down", "p0")
    stamp, level, name, message = lines(stderr)[0].split(" ", 3)
    assert stamp.endswith("Z")
    assert (level, name, message) == ("warning", "test:", "engine p0 is down")


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1b", "\x7f", "\x85", "\u2028", "\u2029", "\0"])
@pytest.mark.parametrize("how", ["text", "json"])
def test_nothing_breaks_a_line(how: Any, end: str, stderr: Written) -> None:
    configure("info", how)
    log.info("one%stwo", end)
    log_exchange(report(request_id=f"a{end}b", dispatches=[dispatch(reason=f"c{end}d")]))
    assert len(lines(stderr)) == 2
    assert end not in stderr.getvalue().replace("\n", "", 2) or end == "\n"
    assert stderr.getvalue().count("\n") == 2
    if how == "json":
        assert objects(stderr)[0]["message"] == f"one{end}two"


@pytest.mark.parametrize("how", ["text", "json"])
def test_traceback_is_in_the_line(how: Any, stderr: Written) -> None:
    configure("info", how)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        log.exception("it went wrong")
    (line,) = lines(stderr)
    assert "it went wrong" in line
    assert "RuntimeError: boom" in line
    if how == "json":
        assert list(json.loads(line)) == ["time", "level", "logger", "message", "exception"]


def test_json_line(stderr: Written) -> None:
    configure("info", "json")
    log.info("%d é \ud800", 1)
    (entry,) = objects(stderr)
    assert list(entry) == ["time", "level", "logger", "message"]
    assert (entry["level"], entry["logger"], entry["message"]) == ("info", "trio_pdproxy.test", "1 é \ud800")
    assert stderr.getvalue().isascii()


# -- the access record ---------------------------------------------------------------------------


def test_access_record_in_json(stderr: Written) -> None:
    configure("info", "json")
    log_exchange(report())
    (entry,) = objects(stderr)
    assert list(entry) == ["time", "level", "logger", "message", *FIELDS]
    del entry["time"]
    assert entry == {
        "level": "info",
        "logger": "trio_pdproxy.access",
        "message": "exchange",
        "id": "r1",
        "route": "/v1/completions",
        "kind": "push",
        "stream": True,
        "status": 200,
        "outcome": "ok",
        "prefill": "p-a",
        "decode": "d-a",
        "dispatches": 1,
        "dispatch_id": "a" * 32,
        "queue_ms": 5.0,
        "ttft_ms": 200.0,
        "total_ms": 1200.0,
        "settle_ms": 100.0,
        "gap_ms": 0.4,
        "events": 11,
        "prompt_tokens": None,
        "cached_tokens": None,
        "completion_tokens": None,
        "debt": "paid",
        "settled": None,
        "rescue": None,
        "reason": None,
    }


def test_access_record_in_text(stderr: Written) -> None:
    configure("info", "text")
    log_exchange(report(request_id='a "b"', dispatches=[dispatch(reason="decode engine d: answered 500")]))
    (line,) = lines(stderr)
    assert " info access: id=" in line
    assert 'id="a \\"b\\"" route=/v1/completions kind=push stream=true status=200 outcome=ok prefill=p-a' in line
    assert (
        "gap_ms=0.4 events=11 prompt_tokens=- cached_tokens=- completion_tokens=- debt=paid settled=- rescue=- " in line
    )
    assert line.endswith('reason="decode engine d: answered 500"')


@pytest.mark.parametrize("word", ["-", "", "a=b", "a b", "é", '"', "\\"])
def test_words_that_could_be_taken_for_something_else_are_quoted(word: str, stderr: Written) -> None:
    configure("info", "text")
    log_exchange(report(request_id=word))
    assert f" id={json.dumps(word)} route=" in stderr.getvalue()


@pytest.mark.parametrize(
    "empty",
    [
        Report(request_id="", route="", stream=False, accepted=0.0),
        Report(request_id="r", route="/x", stream=False, accepted=0.0, planned=1.0, ended=2.0),
    ],
)
@pytest.mark.parametrize("how", ["text", "json"])
def test_keys_are_the_same_where_nothing_happened(how: Any, empty: Report, stderr: Written) -> None:
    configure("info", how)
    log_exchange(empty)
    assert list(exchange_fields(empty)) == FIELDS
    if how == "json":
        assert list(objects(stderr)[0])[4:] == FIELDS


def test_499_for_a_client_that_left_before_its_status() -> None:
    assert exchange_fields(report(status=None, outcome="disconnect"))["status"] == 499
    assert exchange_fields(report(status=200, outcome="disconnect"))["status"] == 200
    assert exchange_fields(report(status=None, outcome="error"))["status"] is None


def test_several_pairs() -> None:
    first = dispatch("a", debt=Debt.STRANDED, settled="decode_failed", rescue="failed", reason="a: reset")
    fields = exchange_fields(report(dispatches=[first, dispatch("b")]))
    assert fields["dispatches"] == 2
    assert (fields["prefill"], fields["decode"], fields["dispatch_id"]) == ("p-b", "d-b", "b" * 32)
    assert fields["debt"] == "stranded"
    assert (fields["settled"], fields["rescue"], fields["reason"]) == ("decode_failed", "failed", "a: reset")


def test_debt_is_the_worst() -> None:
    none, paid, stranded = (dispatch(debt=debt) for debt in (Debt.NONE, Debt.PAID, Debt.STRANDED))
    assert exchange_fields(report(dispatches=[paid, none]))["debt"] == "paid"
    assert exchange_fields(report(dispatches=[none, stranded, paid]))["debt"] == "stranded"
    assert exchange_fields(report(dispatches=[none]))["debt"] == "none"
    assert exchange_fields(report(dispatches=[]))["debt"] == "none"


def test_one_engine_alone() -> None:
    alone = dispatch()
    alone.prefill = None
    fields = exchange_fields(report(dispatches=[alone]))
    assert (fields["prefill"], fields["decode"], fields["gap_ms"]) == (None, "d-a", None)


def test_long_reason_is_cut() -> None:
    reason = exchange_fields(report(dispatches=[dispatch(reason="x" * 5000)]))["reason"]
    assert reason == "x" * LONGEST_REASON


def test_other_handlers_get_the_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trio_pdproxy.access"):
        log_exchange(report())
    (record,) = caplog.records
    assert record.getMessage().startswith("id=r1 route=/v1/completions ")
