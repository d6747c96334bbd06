"""The event framer: any split of a stream gives the same events, and no byte is changed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trio_pdproxy.core import sse
from trio_pdproxy.core.sse import EventFramer, EventTooLongError

# Dense in line ends, which is where a framer goes wrong.
streams = st.one_of(
    st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"data: a", b"data:", b": ping", b"id: 1", b"data", b""])).map(
        b"".join
    ),
    st.lists(st.sampled_from([b"\n\n", b"data: x", b"data: [DONE]", b"data: {}\n"])).map(b"".join),
    st.binary(max_size=60),
)
cuts = st.lists(st.integers(0, 120), max_size=12)


def pieces(data: bytes, at: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in at), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def run(parts: Sequence[bytes]) -> tuple[list[bytes], bytes]:
    framer = EventFramer()
    return [framer.feed(part) for part in parts], framer.tail


def reference(data: bytes) -> list[bytes]:
    """The data of all complete events, by the book: line by line over the whole stream."""
    found: list[bytes] = []
    current: list[bytes] = []
    # What follows the last line end is no line yet.
    for line in re.split(rb"\r\n|\n|\r", data)[:-1]:
        if not line:
            if current:
                found.append(b"\n".join(current))
            current = []
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            current.append(value.removeprefix(b" "))
    return found


@given(streams, cuts)
@example(b"data: a\r\r\ndata: b\n\n", [8, 9])
@example(b"data: a\n\r\n", [9])
def test_what_comes_out_and_the_tail_are_what_went_in(data: bytes, at: list[int]) -> None:
    blocks, tail = run(pieces(data, at))
    assert b"".join(blocks) + tail == data


@given(streams, cuts)
@example(b"data: a\r\r\ndata: b\n\n", [8, 9])
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [8, 9, 10])
@example(b"data: a\n\r\ndata: b\n\n", [9])
def test_any_split_gives_the_same_events(data: bytes, at: list[int]) -> None:
    # An event that ends with a lone CR is held back until the next byte tells whether it is half of a CRLF.
    data += b"."
    blocks, _ = run(pieces(data, at))
    assert [event for block in blocks for event in sse.events(block)] == reference(data)


@given(streams)
def test_an_unfinished_event_is_never_let_out(data: bytes) -> None:
    blocks, _ = run([data + b"data: unfinished"])
    assert b"unfinished" not in b"".join(blocks)


@given(st.lists(st.sampled_from([b"data: a\n\n", b": ping\n\n", b"data: [DONE]\n\n"]), min_size=1))
def test_whole_events_are_never_held_back(events: list[bytes]) -> None:
    assert run(events) == (events, b"")


@pytest.mark.parametrize(
    "end", [b"\n\n", b"\r\n\r\n", b"\r\r\n", b"\n\r\n", b"\r\n\n"], ids=lambda end: end.hex("-").replace("-", "")
)
def test_an_event_ends_with_an_empty_line_in_each_line_end(end: bytes) -> None:
    for split in range(len(end) + 1):
        blocks, tail = run([b"data: a" + end[:split], end[split:]])
        assert (b"".join(blocks), tail) in [(b"data: a" + end, b""), (b"data: a" + end[:-1], end[-1:])]


def test_a_lone_cr_at_the_end_waits_for_what_follows() -> None:
    framer = EventFramer()
    assert framer.feed(b"data: a\r\r") == b""
    assert framer.feed(b"data: b") == b"data: a\r\r"
    assert framer.tail == b"data: b"


def test_an_event_may_be_as_long_as_the_limit_and_no_longer() -> None:
    framer = EventFramer(limit=10)
    assert framer.feed(b"data: 7890") == b""
    assert framer.feed(b"\n\n" + b"x" * 10) == b"data: 7890\n\n"
    with pytest.raises(EventTooLongError, match="more than 10 bytes"):
        framer.feed(b"x")


def test_whole_events_that_come_together_may_be_longer_than_the_limit() -> None:
    block = b"data: a\n\n" * 10
    assert EventFramer(limit=10).feed(block) == block


def test_an_event_at_the_limit_costs_milliseconds_not_minutes() -> None:
    framer = EventFramer()
    began = time.perf_counter()
    for _ in range(100):
        assert framer.feed(b"x" * 65536) == b""
    framer.feed(b"\r" + b"y" * 65536)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    ("block", "events"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"event: x\nid: 1\ndata: a\nretry: 3\n\n", [b"a"]),
        (b": ping\n\n", []),
        (b"event: x\n\n", []),
        (b"data\n\n", [b""]),
        (b"data:\n\n", [b""]),
        (b"database: x\n\n", []),
        (b" data: x\n\n", []),
        (b"data: a\r\n\r\ndata: b\r\r", [b"a", b"b"]),
        (b"data: a\xff\x00\n\n", [b"a\xff\x00"]),
        (b"\n\n\n", []),
        (b"", []),
    ],
)
def test_the_data_of_events(block: bytes, events: list[bytes]) -> None:
    assert sse.events(block) == events
    assert sse.has_event(block) == bool(events)


@given(st.dictionaries(st.text(), st.text()))
def test_an_error_event_is_read_back_whatever_it_says(error: dict[str, str]) -> None:
    assert sse.error_event(json.dumps({"error": error}).encode()) == error


@pytest.mark.parametrize(
    "data",
    [
        b"[DONE]",
        b"",
        b'{"error": null}',
        b'{"error": "text"}',
        b'{"error": []}',
        b'{"error": {}',
        b'{"choices": [{"text": "{\\"error\\": {}}"}]}',
        b'{"choices": [{"error": {}}]}',
        b'[{"error": {}}]',
        b'"error"',
        b'{"error": {"a": "\xff"}}',
        b'{"error": {"a": ' + b"[" * 50_000,
    ],
    ids=lambda data: repr(data[:24]),
)
def test_what_is_no_error_event(data: bytes) -> None:
    assert sse.error_event(data) is None


@given(st.binary())
def test_no_bytes_make_the_error_reader_raise(data: bytes) -> None:
    sse.error_event(b'{"error":' + data)
    sse.error_event(b'{"error":{' + data + b"}}")
