"""The server around the app: keep-alive, stopping, and clients that do not behave."""

from __future__ import annotations

import socket
import time

import h2.connection
import h2.events
import pytest
import trio

from trio_pdproxy import serve
from trio_pdproxy.config import Settings
from trio_pdproxy.serve import ServerConfig, ServerError, serving
from trio_pdproxy.sim import SimSettings, open_cluster
from trio_pdproxy.testing import Rig, open_rig, requested, until
from trio_pdproxy.testing.rig import spec_of
from trio_pdproxy.web.app import create_app

BODY = b'{"model": "sim", "prompt": "x", "max_tokens": 2}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(
    BODY
)
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"


async def connect(rig: Rig) -> trio.SocketStream:
    host, port = rig.url.removeprefix("http://").split(":")
    return await trio.open_tcp_stream(host, int(port))


async def answer_on(stream: trio.SocketStream) -> bytes:
    """One answer whose body has a Content-Length."""
    data = b""
    with trio.fail_after(5):
        while True:
            head, found, body = data.partition(b"\r\n\r\n")
            if found:
                length = next(
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                )
                if len(body) >= length:
                    return data
            piece = await stream.receive_some()
            assert piece, f"closed after {data!r}"
            data += piece


@pytest.mark.parametrize("request_head", [GET, POST])
async def test_a_connection_is_kept_and_closed_as_the_client_asks(request_head: bytes) -> None:
    body = BODY if request_head is POST else b""
    async with open_rig() as rig, await connect(rig) as stream:
        for _ in range(3):
            await stream.send_all(request_head + b"\r\n" + body)
            assert (await answer_on(stream)).startswith(b"HTTP/1.1 200 ")
        await stream.send_all(request_head + b"Connection: close\r\n\r\n" + body)
        assert (await answer_on(stream)).startswith(b"HTTP/1.1 200 ")
        with trio.fail_after(2):
            assert await stream.receive_some() == b""


@pytest.mark.parametrize("request_head", [GET, POST])
async def test_an_idle_client_does_not_hold_up_the_stop(request_head: bytes) -> None:
    body = BODY if request_head is POST else b""
    stream: trio.SocketStream | None = None
    with trio.fail_after(10):
        async with open_rig(shutdown_grace=60) as rig:
            stream = await connect(rig)
            await stream.send_all(request_head + b"\r\n" + body)
            await answer_on(stream)
            begun = trio.current_time()
    assert trio.current_time() - begun < 5
    assert stream is not None
    await stream.aclose()


@pytest.mark.parametrize("shutdown", [False, True], ids=["idle for too long", "the server stops"])
async def test_an_idle_client_of_http_2_is_let_go(shutdown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "KEEP_ALIVE", 60 if shutdown else 0.3)
    protocol = h2.connection.H2Connection()
    protocol.initiate_connection()
    asked = [(":method", "GET"), (":path", "/health"), (":scheme", "http"), (":authority", "a")]
    protocol.send_headers(1, asked, end_stream=True)
    stream: trio.SocketStream | None = None
    with trio.fail_after(10):
        async with open_rig(shutdown_grace=60) as rig:
            stream = await connect(rig)
            await stream.send_all(protocol.data_to_send())
            events: list[h2.events.Event] = []
            while not any(isinstance(event, h2.events.StreamEnded) for event in events):
                events += protocol.receive_data(await stream.receive_some())
            while not shutdown and await stream.receive_some():
                pass
    assert stream is not None
    await stream.aclose()


async def test_a_connection_of_rubbish_ends_alone() -> None:
    async with open_rig() as rig:
        for rubbish in (
            # An upgrade with bytes behind it: Hypercorn fails on it with an exception.
            b"GET /health HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\nrubbish",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 10_000,
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        ):
            async with await connect(rig) as stream:
                await stream.send_all(rubbish)
                with trio.move_on_after(0.3):
                    while await stream.receive_some():
                        pass
            assert (await rig.client.get("/health")).status_code == 200
        assert (await rig.post()).status_code == 200


async def test_a_client_that_stops_reading_frees_both_engines() -> None:
    sim = SimSettings(itl=0.0, max_model_len=400_000, num_blocks=65536)
    async with open_rig(sim=sim, write_timeout=0.5) as rig:
        body = {"model": "sim", "prompt": "x", "stream": True, "max_tokens": 300_000}
        async with requested(rig.url, "/v1/completions", body) as connection:
            assert (await connection.receive_head()).status == 200
            await until(lambda: not rig.app.active, 20)
            await rig.quiet()
            assert rig.report.outcome == "disconnect"
            assert rig.d.requests[-1].how == "aborted"


async def test_stopping_says_so_at_once_and_lets_running_requests_finish() -> None:
    async with open_rig(sim=SimSettings(prefill_base=0.5)) as rig, await connect(rig) as kept:
        await kept.send_all(GET + b"\r\n")
        await answer_on(kept)
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await rig.post()).status_code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: rig.p.running)
            rig.app.quiescing = True
            await kept.send_all(GET.replace(b"/health", b"/ready") + b"\r\n")
            assert (await answer_on(kept)).startswith(b"HTTP/1.1 503 ")
            refused = await rig.post()
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "not_serving"
        assert statuses == [200]


async def test_a_core_task_that_dies_is_seen() -> None:
    class Broken:
        async def ask(self, host: str, port: int) -> object:
            raise RuntimeError("a fault of ours")

    async with open_cluster() as cluster:
        settings = Settings(
            prefill=[spec_of(cluster.prefill[0])], decode=[spec_of(cluster.decode[0])], bind="127.0.0.1:0"
        )
        app = create_app(settings, side_channel=Broken())  # type: ignore[arg-type]

        async def until_it_dies() -> None:
            async with serving(app, settings):
                with trio.fail_after(5):
                    await app.core_died.wait()

        with pytest.raises(ServerError, match="a fault of ours"):
            await until_it_dies()


def test_the_listening_socket_bounds_what_the_kernel_waits_for() -> None:
    settings = Settings(prefill=["http://a:1"], decode=["http://b:2"], bind="127.0.0.1:0", write_timeout=7)
    sockets = ServerConfig(settings, settings.bind).create_sockets()
    try:
        listening = sockets.insecure_sockets[0]
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
    finally:
        for listening in sockets.insecure_sockets:
            listening.close()


def test_the_date_of_an_answer_is_that_of_its_second(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(prefill=["http://a:1"], decode=["http://b:2"])
    config = ServerConfig(settings, settings.bind)
    for now, told in ((0.0, b"00:00:00"), (0.9, b"00:00:00"), (1.0, b"00:00:01"), (61.5, b"00:01:01")):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        monkeypatch.setattr("hypercorn.config.time", time.time)
        assert dict(config.response_headers("h11"))[b"date"] == b"Thu, 01 Jan 1970 %b GMT" % told
