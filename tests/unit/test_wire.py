"""One connection to an engine: the same result at every split, nothing lost, nothing invented, everything bounded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.raw import Pieces, RawServer, answering, eventually, raw_server
from trio_pdproxy.engines import wire
from trio_pdproxy.engines.wire import BrokenError, Connection, Headers, request_bytes


@dataclass(frozen=True)
class Read:
    """All that came of a response."""

    status: int
    headers: Headers
    body: bytes
    reusable: bool


async def read(connection: Connection) -> Read:
    head = await connection.receive_head()
    body = b""
    while piece := await connection.receive_body():
        body += piece
    assert await connection.receive_body() == b""
    assert connection.complete
    return Read(head.status, head.headers, body, connection.reusable)


async def collect(connection: Connection, pieces: list[bytes]) -> None:
    while piece := await connection.receive_body():
        pieces.append(piece)


def read_pieces(pieces: Sequence[bytes], then: str = "silence") -> Read:
    return trio.run(read, Connection(Pieces(pieces, then)))


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX-A: b\r\n\r\nhello world"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    b'5\r\nhello\r\n1;ext="\\""\r\n \r\n05\r\nworld\r\n0\r\n\r\n'
)
TRAILERS = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nSet-Cookie: a=b\r\nRetry-After: 5\r\n\r\n"
)
UNTIL_EOF = b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r\nhello world"

# response -> status, headers, body, reusable
GOOD: dict[str, tuple[bytes, Read]] = {
    "length": (LENGTH, Read(200, [(b"content-length", b"11"), (b"x-a", b"b")], b"hello world", True)),
    "chunked": (
        CHUNKED,
        Read(
            200,
            [(b"transfer-encoding", b"chunked"), (b"content-type", b"text/event-stream")],
            b"hello world",
            True,
        ),
    ),
    "trailers are no headers": (TRAILERS, Read(200, [(b"transfer-encoding", b"chunked")], b"hello", True)),
    "no content": (b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n", Read(204, [(b"x-a", b"b")], b"", True)),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", Read(304, [], b"", True)),
    "empty": (b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n", Read(400, [(b"content-length", b"0")], b"", True)),
    "empty chunked": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        Read(200, [(b"transfer-encoding", b"chunked")], b"", True),
    ),
    "after 100 and 103": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
        b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\nno",
        Read(503, [(b"retry-after", b"1"), (b"content-length", b"2")], b"no", True),
    ),
    "connection close": (
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        Read(200, [(b"connection", b"close"), (b"content-length", b"2")], b"ok", False),
    ),
    "http 1.0": (
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        Read(200, [(b"content-length", b"2")], b"ok", False),
    ),
    "http 1.0 keep-alive": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        Read(200, [(b"connection", b"keep-alive"), (b"content-length", b"2")], b"ok", True),
    ),
    "odd but legal": (
        b"HTTP/1.1 299 \r\nX-EMPTY:\r\nx-space:   a  b \t\r\nX-High: \xe9\r\nCONTENT-LENGTH:  2\r\n\r\n\r\n",
        Read(
            299,
            [(b"x-empty", b""), (b"x-space", b"a  b"), (b"x-high", b"\xe9"), (b"content-length", b"2")],
            b"\r\n",
            True,
        ),
    ),
    "same name twice": (
        b"HTTP/1.1 200 OK\r\nA: 1\r\nA: 2\r\nContent-Length: 0\r\n\r\n",
        Read(200, [(b"a", b"1"), (b"a", b"2"), (b"content-length", b"0")], b"", True),
    ),
}

good = pytest.mark.parametrize(("raw", "expected"), GOOD.values(), ids=GOOD.keys())


# --- every split ------------------------------------------------------------------------------------


@good
def test_every_split_into_two_reads_gives_the_same_result(raw: bytes, expected: Read) -> None:
    async def main() -> None:
        for at in range(len(raw)):
            assert await read(Connection(Pieces([raw[:at], raw[at:]], "silence"))) == expected, at

    trio.run(main)


@good
def test_single_bytes_give_the_same_result(raw: bytes, expected: Read) -> None:
    assert read_pieces([raw[i : i + 1] for i in range(len(raw))]) == expected


@settings(max_examples=40)
@given(st.sampled_from(sorted(GOOD)), st.lists(st.integers(0, 200), max_size=20))
def test_any_split_gives_the_same_result(name: str, cuts: list[int]) -> None:
    raw, expected = GOOD[name]
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    assert read_pieces([raw[a:b] for a, b in pairwise(edges)]) == expected


@good
def test_a_connection_closed_right_after_the_answer_changes_nothing_of_it(raw: bytes, expected: Read) -> None:
    assert read_pieces([raw], "eof") == expected
    assert read_pieces([raw], "reset") == expected


def test_a_body_without_framing_ends_with_the_stream_and_the_connection_with_it() -> None:
    for at in range(len(UNTIL_EOF)):
        assert read_pieces([UNTIL_EOF[:at], UNTIL_EOF[at:]], "eof") == Read(
            200, [(b"x-a", b"b")], b"hello world", False
        )


def test_what_came_together_is_handed_on_together() -> None:
    async def main() -> None:
        connection = Connection(Pieces([CHUNKED]))
        assert await connection.receive_body() == b"hello world"
        assert await connection.receive_body() == b""

    trio.run(main)


async def test_the_head_can_be_asked_for_again_and_at_any_time() -> None:
    connection = Connection(Pieces([CHUNKED]))
    head = await connection.receive_head()
    assert await connection.receive_body() == b"hello world"
    assert await connection.receive_head() is head
    assert head.get(b"content-type") == b"text/event-stream"
    assert head.get(b"x-none") is None


async def test_bytes_received_are_counted_heads_and_framing_included_and_anew_for_each_answer() -> None:
    connection = Connection(Pieces([CHUNKED, LENGTH], "silence"))
    assert connection.received == 0
    await read(connection)
    assert connection.received == len(CHUNKED)
    connection.recycle(0)
    assert connection.received == 0
    await read(connection)
    assert connection.received == len(LENGTH)


# --- cancelled and resumed --------------------------------------------------------------------------


@good
async def test_a_read_cancelled_at_every_byte_and_resumed_loses_nothing(
    raw: bytes, expected: Read, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    connection = Connection(ours)
    body, done = b"", False
    for i in range(len(raw)):
        with trio.move_on_after(1) as scope:
            await connection.receive_head()
            while piece := await connection.receive_body():
                body += piece
        assert scope.cancelled_caught, f"complete after {i} bytes"
        await theirs.send_all(raw[i : i + 1])
    while not done:
        piece = await connection.receive_body()
        body, done = body + piece, not piece
    head = await connection.receive_head()
    assert Read(head.status, head.headers, body, connection.reusable) == expected


async def test_on_a_socket_a_read_cancelled_at_every_byte_and_resumed_loses_nothing() -> None:
    go = trio.Event()
    step = trio.Event()

    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        nonlocal go
        await server.read_request(stream)
        for i in range(len(CHUNKED)):
            await go.wait()
            go = trio.Event()
            await stream.send_all(CHUNKED[i : i + 1])
            step.set()

    async with raw_server(handler) as server:
        connection = Connection(await trio.open_tcp_stream("127.0.0.1", server.port))
        await connection.send(request_bytes(b"POST", b"/", [], b""))
        body = b""
        for _ in CHUNKED:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.receive_body)
                    await trio.lowlevel.checkpoint()
                    scope.cancel()
            step = trio.Event()
            go.set()
            await step.wait()
            with trio.move_on_after(0.002):
                body += await connection.receive_body()
        while piece := await connection.receive_body():
            body += piece
        assert body == b"hello world"
        assert connection.reusable
        await connection.close()


# --- truncated and broken ---------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["eof", "reset"])
@pytest.mark.parametrize("raw", [LENGTH, CHUNKED, TRAILERS, GOOD["after 100 and 103"][0]])
def test_a_truncated_answer_never_looks_complete(raw: bytes, then: str) -> None:
    whole = read_pieces([raw])

    async def main() -> None:
        for at in range(len(raw)):
            connection = Connection(Pieces([raw[:at]], then))
            pieces: list[bytes] = []
            with pytest.raises(BrokenError):
                await collect(connection, pieces)
            assert whole.body.startswith(b"".join(pieces))
            assert not connection.complete
            assert not connection.reusable

    trio.run(main)


def test_a_body_without_framing_is_broken_by_a_reset_and_by_an_end_inside_its_head() -> None:
    head = UNTIL_EOF.index(b"\r\n\r\n") + 4
    for at in range(head):
        with pytest.raises(BrokenError):
            read_pieces([UNTIL_EOF[:at]], "eof")
    for at in range(len(UNTIL_EOF) + 1):
        with pytest.raises(BrokenError):
            read_pieces([UNTIL_EOF[:at]], "reset")


@pytest.mark.parametrize(
    ("pieces", "then", "words"),
    [
        ([], "eof", "closed before an answer"),
        ([b"HTTP/1.1 2"], "eof", "closed in the head"),
        ([LENGTH[:-1]], "eof", "closed before the end of the answer"),
        ([], "reset", "Connection reset by peer"),
        ([b"SSH-2.0-OpenSSH\r\n"], "silence", "not HTTP"),
    ],
)
def test_the_error_says_what_happened(pieces: list[bytes], then: str, words: str) -> None:
    with pytest.raises(BrokenError, match=words):
        read_pieces(pieces, then)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00",
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: folded\r\n line\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\x00c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloXX",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nbytes",
    ],
    ids=repr,
)
def test_what_is_no_answer_breaks_the_connection_at_every_split(raw: bytes) -> None:
    async def main() -> None:
        for at in range(len(raw)):
            connection = Connection(Pieces([raw[:at], raw[at:]], "silence"))
            with trio.fail_after(5), pytest.raises(BrokenError):
                await read(connection)
            assert not connection.reusable

    trio.run(main)


@settings(max_examples=200)
@given(st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", CHUNKED[:90], LENGTH]), st.binary(max_size=60))
def test_no_bytes_raise_anything_else(head: bytes, garbage: bytes) -> None:
    with suppress(BrokenError):
        read_pieces([head, garbage], "eof")


@pytest.mark.parametrize("raw", [LENGTH, CHUNKED, GOOD["no content"][0], GOOD["connection close"][0]])
@pytest.mark.parametrize(
    "extra", [b"x", b"\r\n\r\nx", LENGTH, LENGTH[:20], b"\x00"], ids=lambda extra: repr(extra[:20])
)
def test_bytes_beyond_the_answer_spoil_the_connection_and_not_the_answer(raw: bytes, extra: bytes) -> None:
    alone = read_pieces([raw])
    for at in range(len(raw)):
        together = read_pieces([raw[:at], raw[at:] + extra])
        assert (together.status, together.headers, together.body) == (alone.status, alone.headers, alone.body)
        assert not together.reusable


# --- bounds -----------------------------------------------------------------------------------------


class Endless(Pieces):
    """Sends `head` and then `more` again and again; counts what was taken."""

    def __init__(self, head: bytes, more: bytes) -> None:
        super().__init__([])
        self._next, self._more = head, more
        self.taken = 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        data, self._next = self._next, self._more
        self.taken += len(data)
        return data


@pytest.mark.parametrize("size", [16, 60_000])
@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"HTTP/1.1 200 ", b"a"),
        (b"HTTP/1.1 200 OK\r\nA", b"a"),
        (b"HTTP/1.1 200 OK\r\nA: ", b"a"),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 103 Hints\r\n", b"A: b\r\n\r\nHTTP/1.1 103 Hints\r\n"),
        (b"\r\n", b"\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: ", b"a"),
    ],
    ids=lambda part: repr(part[-22:]),
)
def test_what_never_comes_to_a_body_is_refused_after_a_bounded_number_of_bytes(
    head: bytes, more: bytes, size: int
) -> None:
    stream = Endless(head, more * max(1, size // len(more)))
    with pytest.raises(BrokenError):
        trio.run(read, Connection(stream))
    assert stream.taken <= wire.HEAD_LIMIT + wire.SILENT_LIMIT + size


@pytest.mark.parametrize(("count", "fits"), [(wire.HEADER_LIMIT, True), (wire.HEADER_LIMIT + 1, False)])
def test_the_number_of_headers_is_bounded_the_same_at_every_split(count: int, fits: bool) -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + b"A: b\r\n" * (count - 1) + b"\r\nok"
    for pieces in ([raw], [raw[:-1], raw[-1:]], [raw[:100], raw[100:]], [raw[:-2], raw[-2:]]):
        if fits:
            assert len(read_pieces(pieces).headers) == count
        else:
            with pytest.raises(BrokenError, match="more headers"):
                read_pieces(pieces)


@pytest.mark.parametrize("together", [True, False])
def test_the_number_of_interim_answers_is_bounded_the_same_at_every_split(together: bool) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    for count in (wire.INFORMATIONAL_LIMIT, wire.INFORMATIONAL_LIMIT + 1):
        pieces = [interim] * count + [LENGTH]
        if together:
            pieces = [b"".join(pieces)]
        if count == wire.INFORMATIONAL_LIMIT:
            assert read_pieces(pieces).body == b"hello world"
        else:
            with pytest.raises(BrokenError, match="more headers"):
                read_pieces(pieces)


def test_a_head_just_under_the_limit_is_taken() -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nA: " + b"a" * (wire.HEAD_LIMIT - 100) + b"\r\n\r\nok"
    assert read_pieces([raw[i : i + 1000] for i in range(0, len(raw), 1000)]).body == b"ok"


def test_framing_is_not_bounded_while_a_body_comes_with_it() -> None:
    chunk = b"1;" + b"x" * 10_000 + b"\r\na\r\n"
    raw = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[chunk] * 20, b"0\r\n\r\n"]
    assert read_pieces(raw).body == b"a" * 20


async def test_a_whole_body_is_read_up_to_the_limit_and_refused_beyond() -> None:
    assert await Connection(Pieces([LENGTH])).receive_all(11) == b"hello world"
    connection = Connection(Pieces([LENGTH], "silence"))
    with pytest.raises(BrokenError, match="more than 10 bytes"):
        await connection.receive_all(10)
    assert not connection.reusable


# --- sending ----------------------------------------------------------------------------------------


def test_a_request_is_written_with_its_length_once() -> None:
    assert request_bytes(b"POST", b"/v1/x", [(b"host", b"h:1"), (b"x", b"y")], b"body") == (
        b"POST /v1/x HTTP/1.1\r\nhost: h:1\r\nx: y\r\ncontent-length: 4\r\n\r\nbody"
    )
    assert request_bytes(b"POST", b"/", [], b"") == b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
    assert request_bytes(b"GET", b"/", [], b"") == b"GET / HTTP/1.1\r\n\r\n"


async def test_a_connection_that_is_gone_while_sending_is_broken() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    connection = Connection(ours)
    await theirs.aclose()
    with pytest.raises(BrokenError, match="while sending"):
        await connection.send(b"x")
    await connection.close()
    with pytest.raises(BrokenError):
        await connection.send(b"x")
    with pytest.raises(BrokenError):
        await connection.receive_head()


async def test_a_request_cut_by_cancellation_is_never_followed_by_another_even_after_an_early_answer() -> None:
    ours, theirs = trio.testing.lockstep_stream_pair()
    connection = Connection(ours)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.send, b"POST / HTTP/1.1\r\ncontent-length: 10\r\n\r\n12345")
            await theirs.receive_some(20)
            scope.cancel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(theirs.send_all, b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        assert (await connection.receive_head()).status == 413
    assert connection.complete
    assert not connection.reusable


async def test_an_answer_to_a_request_that_could_not_be_sent_is_still_read_and_not_followed_by_another() -> None:
    class Deaf(Pieces):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            await trio.lowlevel.checkpoint()
            raise trio.BrokenResourceError

    connection = Connection(Deaf([b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"]))
    with pytest.raises(BrokenError):
        await connection.send(b"x" * 100)
    assert await read(connection) == Read(413, [(b"content-length", b"2")], b"no", False)


# --- between requests, and the end ------------------------------------------------------------------


async def test_a_kept_connection_serves_one_answer_after_another() -> None:
    stream = Pieces([LENGTH, CHUNKED, GOOD["no content"][0], LENGTH], "silence")
    connection = Connection(stream)
    for served, expected in enumerate([b"hello world", b"hello world", b"", b"hello world"]):
        assert connection.served == served
        await connection.send(b"request")
        assert (await read(connection)).body == expected
        assert connection.reusable
        connection.recycle(float(served))
        assert connection.idle_since == served
        assert not connection.reusable  # until the next answer is complete
    assert stream.sent == b"request" * 4


async def test_an_incomplete_answer_makes_no_reusable_connection() -> None:
    connection = Connection(Pieces([LENGTH[:-1]], "silence"))
    assert not connection.reusable
    await connection.receive_body()
    assert not connection.reusable
    assert not connection.complete


async def test_a_socket_that_was_closed_or_spoken_on_while_idle_is_stale() -> None:
    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        await stream.receive_some(1)
        if server.accepted == 1:
            await stream.send_all(b"x")
            await stream.receive_some(1)

    async with raw_server(handler) as server:
        for _ in ("spoken", "closed"):
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            connection = Connection(stream)
            assert not connection.stale()
            await connection.send(b"x")
            await eventually(connection.stale)
            await connection.close()
            assert connection.stale()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_closing_closes_at_once_and_raises_nothing_also_when_cancelled(cancelled: bool) -> None:
    async with raw_server(answering()) as server:
        connection = Connection(await trio.open_tcp_stream("127.0.0.1", server.port))
        await server.until(lambda: server.open == 1)
        closed = False
        with trio.CancelScope() as scope:
            if cancelled:
                scope.cancel()
            await connection.close()
            await connection.close()
            closed = True
        assert closed
        assert connection.closed
        await server.until(lambda: server.open == 0)


# --- where chunks end -------------------------------------------------------------------------------

MISLEADING = [b"data: x\n\n", b"\n\n", b"\n", b"\r\n", b"\n\n\r\n", b"9\r\ndata: x\n\n\r\n", b"0\r\n\r\n", b"a", b"\r"]
chunks = st.lists(
    st.tuples(st.lists(st.sampled_from(MISLEADING), min_size=1, max_size=4).map(b"".join), st.sampled_from("xX0;")),
    min_size=1,
    max_size=8,
)


def as_chunk(data: bytes, how: str) -> bytes:
    size = {"x": b"%x", "X": b"%X", "0": b"0%x", ";": b"%x;a=b"}[how] % len(data)
    return size + b"\r\n" + data + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@settings(max_examples=300)
@given(chunks, st.lists(st.integers(0, 300), max_size=12), st.booleans())
def test_what_is_one_chunk_is_that_and_may_be_kept_from_the_parser(
    pieces: list[tuple[bytes, str]], cuts: list[int], at_ends: bool
) -> None:
    """Cut anywhere, or (as engines write) mostly between chunks."""
    framed = [as_chunk(*piece) for piece in pieces]
    raw = b"".join(framed)
    begins = [sum(map(len, framed[:i])) for i in range(len(framed))]
    bodies = dict(zip(begins, (data for data, _ in pieces), strict=True))
    ends = {edge for edge in begins if at_ends and edge % 4} | {min(cut, len(raw)) for cut in cuts[at_ends * 10 :]}
    edges = sorted({0, *ends, len(raw)})
    reads = [raw[a:b] for a, b in pairwise(edges)]

    async def main() -> None:
        connection = Connection(Pieces([HEAD], "silence"))
        await connection.receive_head()
        body = b""
        for at, data in zip(edges, reads, strict=False):
            if connection.is_one_chunk(data):
                assert data == as_chunk(bodies[at], "x")
                body += bodies[at]
            else:
                taken = connection.taken_in(data)
                assert taken is not None
                body += taken
        assert body == b"".join(data for data, _ in pieces)

    trio.run(main)


async def test_after_one_chunk_of_whole_events_the_next_is_one() -> None:
    event = as_chunk(b"data: x\n\n", "x")
    connection = Connection(Pieces([HEAD], "silence"))
    await connection.receive_head()
    assert not connection.is_one_chunk(event)  # it cannot know
    assert connection.taken_in(event) == b"data: x\n\n"
    assert connection.is_one_chunk(event)
    for other in (event * 2, event[:-1], event[1:], event + b"\n", b"0" + event, b"0\r\n\r\n", b"\r\n\r\n", b"", b"9"):
        assert not connection.is_one_chunk(other)
    assert connection.taken_in(event[:5]) == event[3:5]
    assert not connection.is_one_chunk(event)
    assert connection.taken_in(b"") is None
    connection.lost(ConnectionResetError(104, "Connection reset by peer"))
    assert connection.taken_in(event[5:]) is None
    assert await connection.receive_body() == event[5:-2]
    with pytest.raises(BrokenError, match="lost while receiving"):
        await connection.receive_body()


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Content-Length: 90", b"9\r\ndata: x\n\n\r\n" * 3),
        (b"X-A: b", b"9\r\ndata: x\n\n\r\n" * 3),
        (b"Transfer-Encoding: chunked", b"50\r\n" + b"9\r\ndata: x\n\n\r\n" * 3),
    ],
    ids=["a length", "no framing", "inside a chunk"],
)
async def test_a_body_that_looks_like_chunks_is_none(head: bytes, body: bytes) -> None:
    for size in (3, 14, 28, 42):
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        connection = Connection(Pieces([b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n", *pieces], "silence"))
        await connection.receive_head()
        for _ in pieces:
            await connection._pull()
            assert not connection.is_one_chunk(b"9\r\ndata: x\n\n\r\n")
