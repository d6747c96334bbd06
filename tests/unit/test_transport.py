"""The engines behind httpx: its API and its errors, our connections and their bounds."""

from __future__ import annotations

import httpx
import pytest
import trio
import trio.testing

from tests.unit.raw import Pieces, RawServer, answering, raw_server
from trio_pdproxy.engines.connections import Connections, Origin
from trio_pdproxy.engines.transport import open_client

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"


class Memory:
    """An engine in memory: one stream a dial, each with its own pieces."""

    def __init__(self, *streams: Pieces) -> None:
        self._next = iter(streams)

    async def dial(self, host: str, port: int) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return next(self._next)


def connected(*streams: Pieces) -> tuple[Connections, httpx.AsyncClient]:
    connections = Connections(Origin("http", "engine", 81), dial=Memory(*streams).dial)
    return connections, open_client("http://engine:81", timeout=2, connections=connections, headers={"x-key": "k"})


async def test_a_request_goes_out_once_with_our_host_and_length_and_its_answer_comes_back() -> None:
    stream = Pieces([OK], "silence")
    _, client = connected(stream)
    async with client:
        response = await client.post("/v1/x?a=b", content=b"body", headers={"connection": "close", "x-a": "b"})
    assert (response.status_code, response.text, response.headers["content-type"]) == (200, "ok", "text/plain")
    head, _, body = stream.sent.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/x?a=b HTTP/1.1"
    names = [line.partition(b":")[0].lower() for line in lines[1:]]
    assert names.count(b"host") == names.count(b"content-length") == 1
    assert b"connection" not in names
    assert b"host: engine:81" in lines
    assert b"content-length: 4" in lines
    assert {b"x-key: k", b"x-a: b"} <= {line.lower() for line in lines}
    assert body == b"body"


async def test_an_answer_is_the_same_at_every_split() -> None:
    for at in range(len(CHUNKED)):
        connections, client = connected(Pieces([CHUNKED[:at], CHUNKED[at:]], "silence"))
        assert (await client.get("/")).content == b"hello world"
        assert (connections.open, connections.idle) == (1, 1)
        await client.aclose()
        assert connections.open == 0


async def test_calls_share_one_kept_connection() -> None:
    async with raw_server(answering(OK, CHUNKED, OK)) as server:
        async with open_client(f"http://127.0.0.1:{server.port}", timeout=5) as client:
            assert [(await client.get("/")).text for _ in range(3)] == ["ok", "hello world", "ok"]
        await server.until(lambda: server.open == 0)
        assert server.accepted == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("left_over", [b"", b"what is no answer\r\n\r\n"], ids=["nothing", "garbage"])
async def test_what_a_kept_connection_fails_is_asked_once_more_if_it_may_be(method: str, left_over: bytes) -> None:
    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        await server.read_request(stream)
        await stream.send_all(OK)
        if await server.read_request(stream) and left_over:
            await stream.send_all(left_over)

    async with raw_server(handler) as server:
        async with open_client(f"http://127.0.0.1:{server.port}", timeout=5) as client:
            assert (await client.request(method, "/")).text == "ok"
            if method == "GET":
                assert (await client.request(method, "/")).text == "ok"
            else:
                with pytest.raises(httpx.ReadError):
                    await client.request(method, "/")
        assert server.accepted == (2 if method == "GET" else 1)
        assert len(server.requests) == (3 if method == "GET" else 2)


@pytest.mark.parametrize("read_all", [True, False])
async def test_a_streamed_answer_gives_its_connection_back_if_it_was_read_to_its_end(read_all: bool) -> None:
    connections, client = connected(Pieces([CHUNKED[:-5], CHUNKED[-5:]], "silence"))
    async with client:
        async with client.stream("GET", "/") as response:
            if read_all:
                assert [piece async for piece in response.aiter_raw()] == [b"hello world"]
        assert (connections.open, connections.idle) == ((1, 1) if read_all else (0, 0))


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200", OK[:-1], CHUNKED[:-2], b"garbage\r\n\r\n"], ids=repr)
@pytest.mark.parametrize("then", ["eof", "reset"])
async def test_a_broken_answer_is_httpxs_read_error_and_its_connection_is_closed(raw: bytes, then: str) -> None:
    connections, client = connected(Pieces([raw], then))
    async with client:
        with pytest.raises(httpx.ReadError):
            await client.get("/")
        assert connections.open == 0


async def test_an_engine_that_is_not_there_is_httpxs_connect_error() -> None:
    with trio.socket.socket() as placeholder:
        await placeholder.bind(("127.0.0.1", 0))
        async with open_client(f"http://127.0.0.1:{placeholder.getsockname()[1]}", timeout=5) as client:
            with pytest.raises(httpx.ConnectError, match="Connection refused"):
                await client.get("/")


@pytest.mark.parametrize("raw", [b"", OK[:10], OK[:-1], CHUNKED[:-5]], ids=repr)
async def test_an_engine_that_falls_silent_anywhere_is_a_read_timeout(
    raw: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    connections, client = connected(Pieces([raw], "silence"))
    async with client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/")
        assert connections.open == 0
        assert trio.current_time() == pytest.approx(2, abs=0.1)


async def test_a_calls_own_timeout_is_kept(autojump_clock: trio.testing.MockClock) -> None:
    _, client = connected(Pieces([], "silence"))
    async with client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/", timeout=7)
    assert trio.current_time() == pytest.approx(7, abs=0.1)


async def test_an_engine_that_does_not_accept_in_time_is_a_connect_timeout_or_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def silent(host: str, port: int) -> trio.abc.Stream:
        await trio.sleep_forever()
        raise AssertionError

    connections = Connections(Origin("http", "engine", 1), dial=silent, connect_timeout=60)
    async with open_client("http://engine:1", timeout=2, connections=connections) as client:
        with pytest.raises(httpx.ConnectTimeout):
            await client.get("/")
    assert connections.open == 0
    async with open_client("http://engine:1", timeout=2, dial=silent) as client:
        with pytest.raises((httpx.ConnectTimeout, httpx.ConnectError)):
            await client.get("/")


@pytest.mark.parametrize("raw", [b"", OK[:10], OK[:-1]], ids=repr)
async def test_a_cancelled_call_closes_its_connection(raw: bytes) -> None:
    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        await server.read_request(stream)
        if raw:
            await stream.send_all(raw)
        await stream.receive_some(1)

    async with raw_server(handler) as server:
        connections = Connections(Origin("http", "127.0.0.1", server.port))
        async with open_client("http://engine", timeout=5, connections=connections) as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.get, "/")
                await server.until(lambda: bool(server.requests))
                await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
            assert connections.open == 0
            await server.until(lambda: server.open == 0)


async def test_redirects_are_not_followed() -> None:
    moved = b"HTTP/1.1 307 Moved\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n"
    _, client = connected(Pieces([moved], "silence"))
    async with client:
        assert (await client.get("/")).status_code == 307


async def test_the_environments_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with (
        raw_server(answering(OK)) as server,
        open_client(f"http://127.0.0.1:{server.port}", timeout=5) as client,
    ):
        assert (await client.get("/")).text == "ok"


async def test_closing_a_client_that_shares_an_engines_connections_closes_the_idle_ones() -> None:
    connections, client = connected(Pieces([OK], "silence"))
    await client.get("/")
    assert connections.idle == 1
    await client.aclose()
    assert (connections.open, connections.idle) == (0, 0)
