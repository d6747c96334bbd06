"""The usual request, recognised and answered: what h11 would have said of it, and nothing that h11 should see."""

from __future__ import annotations

from typing import Any

import h11
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from trio_pdproxy.web.plain import HEAD_LIMIT, PlainRequest, read_head

USUAL = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"


def by_h11(data: bytes) -> h11.Request:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    event = connection.next_event()
    assert isinstance(event, h11.Request), event
    return event


def test_the_usual_head_is_read() -> None:
    head = read_head(USUAL + b"{}rest")
    assert head is not None
    assert (head.path, head.length, head.end) == (b"/v1/completions", 2, len(USUAL))
    assert head.headers == [(b"host", b"a"), (b"content-type", b"application/json"), (b"content-length", b"2")]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"POST", b"GET"),
        (b"POST ", b"POST  "),
        (b"\r\nHost", b"\nHost"),
        (b"/v1/completions", b"/v1/models"),
        (b"/v1/completions", b"/v1/completions?a"),
        (b"/v1/completions", b"/v1/completions/"),
        (b"/v1/completions", b"http://a/v1/completions"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"HTTP/1.1", b"HTTP/1.1 "),
        (b"Host: a\r\n", b""),
        (b"Host: a\r\n", b"Host: a\r\nHost: a\r\n"),
        (b"Host: a\r\n", b"Host: a\r\n b\r\n"),
        (b"Host: a", b"Host : a"),
        (b"Host: a", b"Host: a\x00"),
        (b"Host: a", b"Host: a\rX: b"),
        (b"Host: a", b"Host: a\nX: b"),
        (b"Host: a", b"H\xf6st: a"),
        (b"Host: a", b"Host a"),
        (b"Length: 2", b"Length: +2"),
        (b"Length: 2", b"Length: 2, 2"),
        (b"Length: 2", b"Length: 0x2"),
        (b"Length: 2", b"Length:"),
        (b"Length: 2", b"Length: 2\r\nContent-Length: 2"),
        (b"Length: 2", b"Length: 2000000000"),
        (b"Content-Length: 2\r\n", b""),
        (b"Content-Length: 2", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 2", b"Content-Length: 2\r\nTransfer-Encoding: chunked"),
        (b"Host: a", b"Host: a\r\nConnection: close"),
        (b"Host: a", b"Host: a\r\nConnection: keep-alive, upgrade"),
        (b"Host: a", b"Host: a\r\nUpgrade: h2c"),
        (b"Host: a", b"Host: a\r\nExpect: 100-continue"),
        (b"Host: a", b"Host: a\r\nTE: trailers"),
        (b"Host: a", b"Host: a\r\nX: " + b"x" * HEAD_LIMIT),
        (b"\r\n\r\n", b"\r\n"),
        (b"POST", b"\r\nPOST"),
    ],
)
def test_what_is_the_least_bit_unusual_is_not_for_here(old: bytes, new: bytes) -> None:
    assert read_head(USUAL.replace(old, new, 1) + b"{}") is None
    assert read_head(USUAL + b"{}") is not None


NAME = st.sampled_from(
    ["X-A", "host", "Accept", "content-length", "Connection", "x~!", "a b", "X\t", "", "TE", "Cookie"]
)
VALUE = st.text(st.sampled_from('ab1, \t:;"\\/=\x7f\x80\xff\x00\x0b\r\n'), max_size=6) | st.sampled_from(
    ["a", "2", "keep-alive", "Keep-Alive", "close", "chunked", " 2 ", "02"]
)
SPACE = st.sampled_from(["", " ", "\t", "  "])


@given(st.lists(st.tuples(NAME, SPACE, VALUE, SPACE), max_size=4))
def test_what_is_read_here_h11_reads_alike(fields: list[tuple[str, str, str, str]]) -> None:
    lines = "".join(f"{name}:{before}{value}{after}\r\n" for name, before, value, after in fields)
    data = USUAL[:-2] + lines.encode("latin-1") + b"\r\n{}"
    if (head := read_head(data)) is not None:
        request = by_h11(data)
        assert (request.method, request.target) == (b"POST", head.path)
        assert list(request.headers) == head.headers


class Ends:
    """What a connection sees of one request."""

    def __init__(self, data: bytes = USUAL) -> None:
        head = read_head(data)
        assert head is not None
        self.sent = b""
        self.kept: list[bool] = []
        self.request = PlainRequest(head, lambda _: [(b"date", b"now")], self._send, self._over)

    async def _send(self, data: bytes) -> None:
        self.sent += data

    async def _over(self, keep: bool) -> None:
        self.kept.append(keep)

    async def start(self, *headers: tuple[bytes, bytes], status: int = 200) -> None:
        await self.request.send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes = b"", *, more: bool = False) -> None:
        await self.request.send({"type": "http.response.body", "body": data, "more_body": more})


async def test_an_answer_of_unknown_length_comes_in_chunks() -> None:
    ends = Ends()
    ends.request.feed(b"{}")
    await ends.start((b"x", b"y"))
    await ends.body(b"one", more=True)
    await ends.body(more=True)
    await ends.body(b"last")
    head = b"HTTP/1.1 200 \r\nx: y\r\ndate: now\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert ends.sent == head + b"3\r\none\r\n4\r\nlast\r\n0\r\n\r\n"
    assert ends.kept == [True]


@pytest.mark.parametrize(
    ("status", "headers", "body", "read", "keep"),
    [
        (200, [(b"content-length", b"3")], b"one", True, True),
        (200, [(b"content-length", b"4")], b"one", True, False),
        (200, [(b"content-length", b"3"), (b"connection", b"close")], b"one", True, False),
        (400, [(b"content-length", b"3")], b"one", False, False),
        (204, [], b"", True, True),
    ],
)
async def test_a_connection_is_kept_where_both_sides_have_said_all(
    status: int, headers: list[tuple[bytes, bytes]], body: bytes, read: bool, keep: bool
) -> None:
    ends = Ends()
    if read:
        assert ends.request.feed(b"{}behind") == b"behind"
    await ends.start(*headers, status=status)
    await ends.body(body)
    assert ends.sent.endswith(b"\r\n\r\n" + body)
    assert ends.kept == [keep]


@pytest.mark.parametrize("headers", [[(b"x", b"a\r\ny: b")], [(b"x\r\ny", b"b")], [(b"", b"b")], [(b"x", b"\x00")]])
async def test_no_header_becomes_two(headers: list[tuple[bytes, bytes]]) -> None:
    ends = Ends()
    with pytest.raises(ValueError, match="headers"):
        await ends.start(*headers)
    assert ends.sent == b""


async def test_an_answer_that_is_none_is_refused() -> None:
    ends = Ends()
    with pytest.raises(ValueError, match="at this point"):
        await ends.body(b"x")
    await ends.start((b"content-length", b"1"))
    with pytest.raises(ValueError, match="at this point"):
        await ends.start()
    with pytest.raises(ValueError, match="longer"):
        await ends.body(b"xy")


async def run(ends: Ends, app: Any) -> None:
    async def called(_scope: Any, receive: Any, send: Any, *_: Any) -> None:
        await app(receive, send)

    await ends.request.run(called, {})


async def test_the_body_is_told_as_it_comes_and_then_the_leaving() -> None:
    ends = Ends()
    told: list[dict[str, Any]] = []

    async def app(receive: Any, _send: Any) -> None:
        while not told or told[-1]["type"] != "http.disconnect":
            told.append(await receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, ends, app)
        for piece in (b"{", b"}"):
            await trio.testing.wait_all_tasks_blocked()
            assert ends.request.feed(piece) == b""
        await trio.testing.wait_all_tasks_blocked()
        ends.request.lose()
    assert told == [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.request", "body": b"}", "more_body": False},
        {"type": "http.disconnect"},
    ]
    assert (ends.sent, ends.kept) == (b"", [False])


async def test_half_a_request_is_refused_where_that_can_still_be_read() -> None:
    ends = Ends()

    async def app(receive: Any, _send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    ends.request.feed(b"{")
    ends.request.lose()
    await run(ends, app)
    assert ends.sent == b"HTTP/1.1 400 \r\ncontent-length: 0\r\nconnection: close\r\ndate: now\r\n\r\n"
    assert ends.kept == [False]


async def test_of_a_body_that_is_refused_nothing_is_kept() -> None:
    ends = Ends()
    await ends.start((b"content-length", b"3"), status=413)
    assert ends.request.answered_early
    assert ends.request.feed(b"{") == b""
    await ends.body(b"one")
    assert ends.request.feed(b"}behind") == b"behind"
    assert await ends.request.receive() == {"type": "http.request", "body": b"", "more_body": False}
    assert ends.kept == [False]


async def test_a_failing_app_is_a_500_and_the_end_of_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    ends = Ends()

    async def app(_receive: Any, _send: Any) -> None:
        raise RuntimeError("ours")

    await run(ends, app)
    assert ends.sent == b"HTTP/1.1 500 \r\ncontent-length: 0\r\nconnection: close\r\ndate: now\r\n\r\n"
    assert ends.kept == [False]
    assert "the app failed" in caplog.text


async def test_an_app_that_fails_in_its_answer_leaves_it_short(caplog: pytest.LogCaptureFixture) -> None:
    ends = Ends()

    async def app(_receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        raise RuntimeError("ours")

    await run(ends, app)
    assert ends.sent.endswith(b"1\r\nx\r\n")
    assert ends.kept == [False]
    assert "the app failed" in caplog.text
