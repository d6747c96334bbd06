"""Timelines: what leaves the process, how much memory they take, and both pictures."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from trio_pdproxy.core.report import PIECES, DispatchReport, LegReport, Report
from trio_pdproxy.core.verdict import Debt, Decode, Prefill
from trio_pdproxy.observe.chrome import chrome_trace
from trio_pdproxy.observe.page import figures, html_page
from trio_pdproxy.observe.timeline import Timelines, read_timelines, size_of, spread, timeline_of

SECRET = "a reason that quotes </script><b>a prompt"


def report(number: int = 0, pieces: int = 11, *, gap: float = 0.0004, attempts: int = 1) -> Report:
    start = 100.0 + number
    made = Report(
        request_id=f"r{number}",
        route="/v1/completions",
        stream=True,
        accepted=start,
        planned=start + 0.001,
        leased=start + 0.002,
        last_byte=start + 1.2,
        ended=start + 1.3,
        status=200,
        outcome="ok",
        kind="push",
        dispatches=[
            DispatchReport(
                id=f"{number}-{attempt}",
                prefill=LegReport("p0", sent=start + 0.01, head=start + 0.1, end=start + 0.11, status=200),
                decode=LegReport("d0", sent=start + 0.01 + gap, head=start + 0.02, first=start + 0.2, end=start + 1.2),
                prefill_outcome=Prefill.OK,
                decode_outcome=Decode.DONE,
                debt=Debt.PAID,
                settled_at=start + 1.3,
                prompt_tokens=512,
                reason=SECRET,
            )
            for attempt in range(attempts)
        ],
    )
    for piece in range(pieces):
        made.handed(start + 0.2 + piece / pieces)
    return made


def test_a_timeline_says_it_all_in_seconds_after_the_request() -> None:
    line = timeline_of(report(), wall=1000.0)
    assert line.at == 1100.0
    assert (line.planned, line.leased, line.last_byte, line.ended) == (0.001, 0.002, 1.2, 1.3)
    assert line.gap == pytest.approx(0.0004)
    assert line.pieces[0] == line.first_byte == pytest.approx(0.2)
    tried = line.tries[0]
    assert tried.prefill is not None
    assert (tried.prefill.sent, tried.prefill.end, tried.decode.first) == (0.01, 0.11, 0.2)
    assert (tried.prompt_tokens, tried.debt, tried.settled_at) == (512, "paid", 1.3)


def test_it_survives_the_wire_and_no_sentence_goes_along() -> None:
    import msgspec

    lines = [timeline_of(report(number), 0.0) for number in range(3)]
    data = msgspec.json.encode(Timelines(lines))
    assert read_timelines(data) == lines
    assert b"quotes" not in data


@pytest.mark.parametrize("data", [b"", b"[]", b'{"timelines": 3}', b'{"timelines": [], "version": 2}'])
def test_what_is_no_timelines_is_told_so(data: bytes) -> None:
    with pytest.raises(ValueError, match="timelines"):
        read_timelines(data)


@pytest.mark.parametrize("pieces", [1, PIECES - 1, PIECES, PIECES + 1, 1000, 100_000])
def test_pieces_are_thinned_out_evenly(pieces: int) -> None:
    made = report(pieces=pieces)
    assert made.events == pieces
    assert len(made.pieces) <= PIECES
    assert len(made.pieces) == -(-pieces // made.stride)
    expected = [100.2 + piece / pieces for piece in range(0, pieces, made.stride)]
    assert list(made.pieces) == pytest.approx(expected)


def test_a_report_takes_no_more_memory_than_is_stated() -> None:
    """The documentation says 2 to 4 KiB, with an answer of any length and at most two pairs tried."""
    usual, longest = size_of(report()), size_of(report(pieces=100_000, attempts=2))
    assert usual < 2.5 * 1024
    assert longest < 4 * 1024


# -- figures -------------------------------------------------------------------------------------


def test_spread() -> None:
    assert spread([]) is None
    assert spread([None, None]) is None
    one = spread([2.0, None])
    assert one is not None
    assert (one.count, one.mean, one.p50, one.p99, one.max) == (1, 2.0, 2.0, 2.0, 2.0)
    many = spread(float(number) for number in range(101))
    assert many is not None
    assert (many.count, many.mean, many.p50, many.p90, many.p99, many.max) == (101, 50.0, 50.0, 90.0, 99.0, 100.0)


def test_figures_are_of_the_requests_that_have_them() -> None:
    lines = [timeline_of(report(number, gap=0.001 * (number + 1)), 0.0) for number in range(3)]
    found = figures(lines)
    gap, first = found["decode-start gap"], found["time to first token"]
    assert gap is not None
    assert first is not None
    assert gap.p50 == pytest.approx(0.002)
    assert gap.max == pytest.approx(0.003)
    assert first.p50 == pytest.approx(0.2)


# -- Chrome's trace JSON -------------------------------------------------------------------------


def test_chrome_trace_has_a_row_per_engine_both_legs_and_the_arrow() -> None:
    events = json.loads(chrome_trace([timeline_of(report(number), 0.0) for number in range(2)]))["traceEvents"]
    rows = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(rows) == {"proxy requests", "prefill p0", "decode d0"}
    slices = [event for event in events if event["ph"] == "X" and event["name"] in ("prefill leg", "decode leg")]
    assert [(s["name"], s["pid"]) for s in slices[:2]] == [
        ("prefill leg", rows["prefill p0"]),
        ("decode leg", rows["decode d0"]),
    ]
    assert (slices[0]["ts"], slices[0]["dur"]) == (10_000.0, 100_000.0)
    begin, end = (next(event for event in events if event["ph"] == ph) for ph in "sf")
    assert begin["pid"] == rows["prefill p0"]
    assert end["pid"] == rows["decode d0"]
    assert begin["id"] == end["id"]
    assert (begin["ts"], end["ts"]) == (110_000.0, 200_000.0)


def test_slices_of_one_track_nest_or_follow_each_other() -> None:
    lines = [timeline_of(report(number), -0.7 * number) for number in range(12)]  # overlap: 0.3 s apart, 1.2 s long
    events = json.loads(chrome_trace(lines))["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) > 3
    for spans in tracks.values():
        for start, end in spans:
            for other, other_end in spans:
                apart = end <= other + 0.2 or other_end <= start + 0.2
                nested = (start <= other + 0.2 and other_end <= end + 0.2) or (
                    other <= start + 0.2 and end <= other_end + 0.2
                )
                assert apart or nested


# -- the page ------------------------------------------------------------------------------------


def page_of(groups: dict[str, int]) -> str:
    made = {name: [timeline_of(report(n), 0.0) for n in range(count)] for name, count in groups.items()}
    return html_page(made).decode()


def test_the_page_is_one_file_that_reaches_for_nothing() -> None:
    page = page_of({"serial": 2, "concurrent": 3})
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href|action)\s*=|url\(|@import|fetch\(|XMLHttpRequest|import\s*\(""", page)
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    groups = json.loads(data[1])
    assert [(group["name"], len(group["timelines"])) for group in groups] == [("serial", 2), ("concurrent", 3)]
    assert groups[0]["figures"]["decode-start gap"]["count"] == 2


def test_nothing_in_the_data_can_end_its_script() -> None:
    made = report()
    made.request_id = "</script><script>alert(1)</script>"
    page = html_page({"<b>": [timeline_of(made, 0.0)]}).decode()
    assert "alert(1)</script>" not in page
    assert page.count("</script>") == 2


def test_the_pages_script_is_javascript(tmp_path: Path) -> None:
    """Where node is at hand: that it parses at all. (It is looked at in a browser by whoever changes it.)"""
    script = re.findall(r"<script>(.*?)</script>", page_of({"requests": 1}), re.DOTALL)[0]
    file = tmp_path / "page.js"
    file.write_text(script)
    try:
        subprocess.run(["node", "--check", str(file)], check=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("there is no node here")
