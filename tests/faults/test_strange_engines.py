"""Engines that are no engines: bytes that are no HTTP, answers without end, answers before the question."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import trio

from tests.faults.cells import PROMPT, TOKENS, Out, asked, settle, shorten_waits
from tests.faults.client import Client, connected, request
from tests.faults.table import Tables
from tests.unit.raw import RawServer, raw_server
from trio_pdproxy.core import sse
from trio_pdproxy.exchange import legs
from trio_pdproxy.exchange.legs import DecodeLeg
from trio_pdproxy.sim import SimSettings
from trio_pdproxy.testing import Rig, open_rig

NOTHING = Out(200, "text")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": [{"index": 0, "text": " one"}]}\n\n'
REFUSAL = b'{"error": {"message": "too large", "type": "T", "param": null, "code": 413}}'
TOO_LARGE = b"HTTP/1.1 413 Too Large\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(REFUSAL),
    REFUSAL,
)

Handler = Callable[[RawServer, trio.SocketStream], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def strange(
    role: Literal["P", "D"], handler: Handler, monkeypatch: pytest.MonkeyPatch, **bounds: Any
) -> AsyncIterator[tuple[Rig, RawServer]]:
    """A stack in which, once ready, every connection to the one engine of that role is answered by `handler`."""
    shorten_waits(monkeypatch, reused=False)
    bounds = {"health_interval": 3600, "health_timeout": 10, "attempts": 1, **bounds}
    sim = SimSettings(keep_alive=600, max_model_len=100_000_000, num_blocks=10_000_000)
    async with open_rig(sim=sim, **bounds) as rig, raw_server(handler) as server:
        engine = rig.app.pool.prefill[0] if role == "P" else rig.app.pool.decode[0]

        async def dial(host: str, port: int) -> trio.SocketStream:
            return await trio.open_tcp_stream("127.0.0.1", server.port)

        monkeypatch.setattr(engine.connections, "_dial", dial)
        yield rig, server


def endless(opening: bytes, piece: bytes) -> Handler:
    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        await server.read_request(stream)
        await stream.send_all(opening)
        while True:
            await stream.send_all(piece)

    return handler


ENDLESS: dict[str, tuple[bytes, bytes, str]] = {
    # opening, what follows without end, what the client sees: a 502 or a stream that was cut
    "a status line": (b"HTTP/1.1 200 ", b"O" * 1000, "502"),
    "a header": (b"HTTP/1.1 200 OK\r\nx: ", b"x" * 1000, "502"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 100, "502"),
    "interim answers": (b"", b"HTTP/1.1 102 Processing\r\n\r\n", "502"),
    "no HTTP": (b"", b"\x00\xff" * 500, "502"),
    "a chunk's extension": (HEAD + b"5;", b"x" * 1000, "502"),
    "an extension in a stream": (HEAD + chunk(EVENT) + b"5;", b"x" * 1000, "cut"),
    "trailers": (HEAD + chunk(EVENT) + b"0\r\n", b"x: y\r\n" * 100, "cut"),
    "a first event": (HEAD, chunk(b"data: " + b"x" * 60_000), "502"),
    "a later event": (HEAD + chunk(EVENT), chunk(b"data: " + b"x" * 60_000), "cut"),
    "comments before an event": (HEAD, chunk(b": ping\n\n" * 1000), "502"),
    "an answer": (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n",
        b" " * 60_000,
        "502",
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_has_no_end_is_bounded(what: str, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its size: no deadline of these is short."""
    monkeypatch.setattr(sse, "EVENT_LIMIT", 1_000_000)
    monkeypatch.setattr(legs, "ANSWER_LIMIT", 1_000_000)
    framer = sse.EventFramer.__init__
    monkeypatch.setattr(framer, "__defaults__", (1_000_000,))
    opening, piece, seen = ENDLESS[what]
    async with strange("D", endless(opening, piece), monkeypatch) as (rig, server), connected(rig.url) as client:
        await client.send(asked(PROMPT, stream=True))
        with trio.fail_after(60):
            got = await client.answer()
        tables.cell("answers without end", what, "decode", str(got.status) if got.end == "complete" else got.end)
        if seen == "cut":
            assert (got.status, got.end) == (200, "cut")
            assert b'"code":"stream_broken"' in got.events[-1]
            assert b"[DONE]" not in got.body
        else:
            assert (got.status, got.end) == (502, "complete"), got
            assert got.error["type"] == "decode_error"
        assert await settle(rig, NOTHING) == {}
        await server.until(lambda: server.open == 0)


@pytest.mark.parametrize("what", ["a status line", "headers", "no HTTP", "a chunk's extension", "an answer"])
async def test_a_prefill_engines_answer_without_end_is_bounded(
    what: str, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legs, "ANSWER_LIMIT", 1_000_000)
    opening, piece, _ = ENDLESS[what]
    async with strange("P", endless(opening, piece), monkeypatch) as (rig, server), connected(rig.url) as client:
        await client.send(asked(PROMPT, stream=True))
        with trio.fail_after(60):
            got = await client.answer()
        tables.cell("answers without end", what, "prefill", str(got.status))
        assert (got.status, got.end) == (502, "complete"), got
        assert got.error["type"] == "prefill_error"
        # It computed nothing, twice: what decode holds cannot be paid.
        assert await settle(rig, Out(502, "proxy", stranded=1, held=1)) == {}
        await server.until(lambda: server.open == 0)


# -- answers before the question has been read -------------------------------------------------


def early(then: Literal["close", "stay"]) -> Handler:
    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        await stream.receive_some(1000)
        await stream.send_all(TOO_LARGE)
        if then == "stay":
            await trio.sleep_forever()

    return handler


async def ask_large(client: Client) -> None:
    await client.send(request({"model": "sim", "prompt": "x" * 20_000_000, "max_tokens": TOKENS}))


@pytest.mark.parametrize("then", ["close", "stay"])
@pytest.mark.parametrize("role", ["P", "D"])
async def test_an_answer_before_a_large_request_was_read_is_heard(
    role: Literal["P", "D"], then: Literal["close", "stay"], tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine does not read on, so waiting until all is sent would be waiting for the deadline. Where it closes, the
    kernel may have thrown its answer away with the connection: then it is a failure of the engine."""
    async with strange(role, early(then), monkeypatch) as (rig, _), connected(rig.url) as client:
        await ask_large(client)
        with trio.fail_after(60):
            got = await client.answer()
        tables.cell("early answers", f"{then}", role, str(got.status))
        assert got.status in ((413,) if then == "stay" else (413, 502)), got
        assert got.end == "complete"
        if got.status == 413:
            assert got.body == REFUSAL
        # What decode holds of a request that it may have had no time to read is not for this test to say.
        seen = [engine.orphans for engine in rig.cluster.decode]
        held = {name for name in rig.leftovers() if name.endswith(" blocks")} if role == "P" else set()
        with trio.fail_after(60):
            while set(rig.leftovers()) - held or seen != [engine.orphans for engine in rig.cluster.decode]:
                seen = [engine.orphans for engine in rig.cluster.decode]
                held = {name for name in rig.leftovers() if name.endswith(" blocks")} if role == "P" else set()
                await trio.sleep(0.01)
        assert rig.app.pool.decode[0].stranded == (role == "P")
        assert sum(seen) <= (role == "P")


async def test_a_strange_stream_of_single_bytes_is_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        await server.read_request(stream)
        stream.setsockopt(6, 1, 1)  # TCP_NODELAY
        for byte in HEAD + chunk(EVENT + b": ping\r\r") + chunk(EVENT[:9]) + chunk(EVENT[9:] + b"data: [DONE]\n\n"):
            await stream.send_all(bytes([byte]))
            await trio.lowlevel.checkpoint()
        await stream.send_all(b"0\r\n\r\n")
        await stream.receive_some(1)

    async with strange("D", handler, monkeypatch) as (rig, _), connected(rig.url) as client:
        await client.send(asked(PROMPT, stream=True))
        got = await client.answer()
        assert got.end == "complete"
        assert got.body == EVENT + b": ping\r\r" + EVENT + b"data: [DONE]\n\n"
        assert await settle(rig, NOTHING) == {}


@pytest.mark.parametrize("seed", range(6))
async def test_a_strange_stream_in_strange_chunks_is_the_same_stream(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of it as engines write, an event a chunk a write; between that events in pieces, several in a chunk or a
    write, with extensions, and text that looks like chunks. What is passed on as it came must be whole chunks."""
    rng = random.Random(seed)
    said: list[bytes] = []

    def event(number: int) -> bytes:
        look = rng.choice((" one", "\r\n", "9\r\ndata: x\n\n\r\n", "\\u000a", "\u20ac")) if number % 3 == 2 else " one"
        data = b"data: %d %b\n\n" % (number, look.encode().replace(b"\n\n", b"\ndata: "))
        said.append(data)
        return data

    def write(number: int) -> list[bytes]:
        """What is written at once, each."""
        how = rng.random()
        if how < 0.6:
            return [chunk(event(number))]
        if how < 0.7:
            return [chunk(event(number)) + chunk(event(number + 500))]
        if how < 0.8:
            return [
                chunk(event(number) + event(number + 500) + b": ping\n\n")[:-2].replace(b"\r\n", b";a=b\r\n", 1)
                + b"\r\n"
            ]
        data = event(number)
        if how < 0.85:  # the rest of a chunk that looks like one, after whole events
            said.append(b"9\r\ndata: x\n\n")
            framed = chunk(data + said[-1])
            return [framed[: -len(said[-1]) - 2], said[-1] + b"\r\n"]
        if how < 0.9:
            at = rng.randrange(1, len(data))
            return [chunk(data[:at]), chunk(data[at:])]
        framed = chunk(data)
        at = rng.randrange(1, len(framed))
        return [framed[:at], framed[at:]]

    writes = [piece for number in range(60) for piece in write(number)]
    raw = b"".join(said)

    async def handler(server: RawServer, stream: trio.SocketStream) -> None:
        await server.read_request(stream)
        stream.setsockopt(6, 1, 1)  # TCP_NODELAY
        await stream.send_all(HEAD + chunk(EVENT))
        for piece in writes:
            await stream.send_all(piece)
            await trio.sleep(0.002)
        await stream.send_all(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await stream.receive_some(1)

    passed = 0
    passes = DecodeLeg.passes

    def counted(leg: DecodeLeg, data: bytes) -> bool:
        nonlocal passed
        passed += (yes := passes(leg, data))
        return yes

    monkeypatch.setattr(DecodeLeg, "passes", counted)
    async with strange("D", handler, monkeypatch) as (rig, _), connected(rig.url) as client:
        await client.send(asked(PROMPT, stream=True))
        got = await client.answer()
        assert got.end == "complete"
        assert got.body.replace(b": ping\n\n", b"") == EVENT + raw + b"data: [DONE]\n\n"
        assert await settle(rig, NOTHING) == {}
    assert passed > 20 or "PUBLIC_SENDS" in os.environ
