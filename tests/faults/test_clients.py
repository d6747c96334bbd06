"""Clients that leave, in every way and at every moment; old ones; and those that do not read.

A half-close counts as leaving (it is what the server under the app makes of it). What it does not see at all, because
it does not read on after a complete request that more bytes followed, ends at the deadlines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import trio

from tests.faults.cells import TOKENS, Out, asked, settle
from tests.faults.client import connected, request
from tests.faults.table import Tables
from trio_pdproxy.core.verdict import Debt
from trio_pdproxy.sim import Fault, SimSettings, expected_text
from trio_pdproxy.testing import Rig, open_rig, waiting

Way = Literal["close", "half_close", "reset"]
WAYS: tuple[Way, ...] = ("close", "half_close", "reset")
NOTHING = Out(200, "text")
ENDLESS = 100_000
"""Tokens of a stream that no socket buffers hold."""

BOUNDS: dict[str, Any] = {"health_interval": 3600, "health_timeout": 10, "shutdown_grace": 1}


async def until(holds: Callable[[], object]) -> None:
    await waiting.until(holds, 30, step=0.001)


async def gone(rig: Rig, tables: Tables, row: str, column: str, *, stranded: int = 0) -> None:
    """The client has left and nothing else has happened: no engine, no place, no task is held by it."""
    left = await settle(rig, Out(0, "text", stranded=stranded, held=stranded))
    outcome = next((r.outcome for r in reversed(rig.app.recent) if r.outcome != "ok"), "ok")
    tables.cell("clients that leave", row, column, outcome)
    tables.leftovers += bool(left)
    assert left == {}
    assert rig.app.pool.waiting == 0
    # And the next one is served.
    async with connected(rig.url) as client:
        await client.send(asked("next", stream=True))
        assert (await client.answer()).text == expected_text("next", TOKENS)


# -- leaving that is seen ------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_while_queued(way: Way, tables: Tables) -> None:
    bounds = {"prefill_max_inflight": 1, "decode_max_inflight": 1, **BOUNDS}
    async with open_rig(**bounds) as rig, connected(rig.url) as first, connected(rig.url) as second:
        free = trio.Event()
        rig.p.faults.add(Fault("before_head", "slow", until=free))
        await first.send(asked("first", stream=False))
        await until(lambda: rig.d.requests)
        seen = len(rig.d.requests)
        await second.send(asked("second", stream=False))
        await until(lambda: rig.app.pool.waiting)
        await second.leave(way)
        await until(lambda: not rig.app.pool.waiting)
        await until(lambda: rig.app.active == 1)
        assert rig.report.outcome == "disconnect"
        assert rig.report.status is None
        free.set()
        assert (await first.answer()).status == 200
        assert len(rig.d.requests) == seen  # the second one never went anywhere
        await gone(rig, tables, way, "0 queued")


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_while_uploading(way: Way, tables: Tables) -> None:
    async with open_rig(**BOUNDS) as rig:
        for size in (0, 1, 40):
            async with connected(rig.url) as client:
                whole = asked("half a request", stream=True)
                head = whole.index(b"\r\n\r\n") + 4
                await client.send(whole[: head + size])
                await until(lambda: rig.app.active)
                await client.leave(way)
                await until(lambda: not rig.app.active)
                if way == "half_close":
                    got = await client.answer()
                    assert got.status in (0, 400)  # nobody can say more to half a request
        assert rig.d.requests == []
        await gone(rig, tables, way, "1 uploading")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("way", WAYS)
async def test_leaving_before_the_first_byte(way: Way, stream: bool, tables: Tables) -> None:
    async with open_rig(**BOUNDS) as rig, connected(rig.url) as client:
        free = trio.Event()
        rig.p.faults.add(Fault("before_head", "slow", until=free))
        await client.send(asked("early", stream=stream))
        await until(lambda: rig.d.blocks_held)
        await client.leave(way)
        await until(lambda: rig.d.requests[-1].how == "aborted")
        assert rig.app.pool.decode[0].debts == 1
        assert rig.d.orphans == 1
        free.set()
        await gone(rig, tables, way, "2 before the first byte")
        report = next(r for r in rig.app.recent if r.outcome == "disconnect")
        assert report.dispatches[0].debt is Debt.PAID
        assert report.status is None


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_in_the_middle_of_a_stream(way: Way, tables: Tables) -> None:
    async with open_rig(sim=SimSettings(itl=0.005), **BOUNDS) as rig, connected(rig.url) as client:
        await client.send(request({"model": "sim", "prompt": "x", "max_tokens": 4000, "stream": True}))
        await client.until(b"data: ")
        await client.leave(way)
        await until(lambda: rig.d.requests[-1].how == "aborted")
        await gone(rig, tables, way, "3 mid-stream")


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_while_a_whole_answer_is_made(way: Way, tables: Tables) -> None:
    async with open_rig(sim=SimSettings(itl=0.01), **BOUNDS) as rig, connected(rig.url) as client:
        await client.send(request({"model": "sim", "prompt": "x", "max_tokens": 4000}))
        await until(lambda: rig.d.running)
        await client.leave(way)
        await until(lambda: rig.d.requests[-1].how == "aborted")
        await gone(rig, tables, way, "4 whole answer")


async def test_leaving_while_a_failed_prefill_leg_is_rescued(tables: Tables) -> None:
    async with open_rig(**BOUNDS) as rig, connected(rig.url) as client:
        free = trio.Event()
        rig.p.faults.add(Fault("before_head", "status"))
        rig.p.faults.add(Fault("before_head", "slow", until=free))
        before = len(rig.p.requests)
        await client.send(asked("early", stream=True))
        await until(lambda: len(rig.p.requests) == before + 2)
        await client.leave("close")
        await until(lambda: rig.d.requests[-1].how == "aborted")
        assert rig.app.pool.decode[0].debts == 1
        free.set()
        await gone(rig, tables, "close", "5 rescue")


# -- leaving that the server does not see ------------------------------------------------------

UNSEEN: dict[str, Callable[[bytes], bytes]] = {
    "crlf": lambda body: body + b"\r\n",
    "pipelined": lambda body: body + body,
    "h2c": lambda body: body.replace(
        b"Host: a\r\n",
        b"Host: a\r\nConnection: upgrade, http2-settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
        1,
    ),
}


@pytest.mark.parametrize("trick", UNSEEN)
async def test_what_is_no_leaving_is_answered_all_the_same(trick: str) -> None:
    async with open_rig(**BOUNDS) as rig:
        for stream in (True, False):
            async with connected(rig.url) as client:
                await client.send(UNSEEN[trick](asked("stays", stream=stream)))
                for _ in range(1 + (trick == "pipelined")):
                    got = await client.answer()
                    assert (got.status, got.end, got.version) == (200, "complete", "HTTP/1.1")
                    assert got.text == expected_text("stays", TOKENS)
        assert await settle(rig, NOTHING) == {}


@pytest.mark.parametrize("trick", UNSEEN)
@pytest.mark.parametrize("hung", ["prefill", "decode before its stream", "decode in its stream", "decode at work"])
async def test_a_leaving_that_nobody_sees_ends_at_a_deadline(trick: str, hung: str, tables: Tables) -> None:
    bounds: dict[str, Any] = {"connect_timeout": 0.5, "drain_grace": 0.1, "idle_timeout": 0.5, **BOUNDS}
    bounds |= {"prefill_timeout": 1, "settle_timeout": 1.5, "queue_timeout": 0.5}
    bounds |= {"lease": 0.1, "first_byte_timeout": 2.5, "request_timeout": 3 if hung == "decode at work" else 60}
    async with open_rig(**bounds) as rig, connected(rig.url) as client:
        if hung == "prefill":
            rig.p.faults.add(Fault("before_head", "hang"))
        else:
            rig.d.faults.add(Fault("mid_body" if hung == "decode in its stream" else "after_head", "hang", after=2))
        if hung == "decode at work":
            rig.d.faults.faults[-1].where = "before_head"
        await client.send(UNSEEN[trick](asked("leaves", stream=hung != "decode at work")))
        await until(lambda: rig.d.requests)
        if hung == "decode in its stream":
            await client.until(b"data: ")
        await client.leave("close")
        await until(lambda: not rig.app.active)
        await gone(rig, tables, f"{trick} unseen", f"6 {hung}")


# -- what a client's connection was made of ------------------------------------------------------

LEFT_BEHIND = ["at once", "after an answer", "half-closed", "crlf", "pipelined", "h2c", "in a stream", "in two streams"]


async def test_closed_connections_leave_no_task_and_no_descriptor() -> None:
    """However their clients ended them; a server that kept them would run out of descriptors."""
    async with open_rig(sim=SimSettings(itl=0.002), **BOUNDS) as rig:
        async with connected(rig.url) as client:
            await client.send(asked("first", stream=True))
            await client.answer()
        await trio.sleep(0.1)
        before = held()
        for way in LEFT_BEHIND:
            for _ in range(10):
                await leave_behind(rig, way)
        await until(lambda: held() <= before)


def held() -> int:
    """Tasks: each connection of a client has some, and its descriptor lives as long as they do."""
    return trio.lowlevel.current_statistics().tasks_living


async def leave_behind(rig: Rig, way: str) -> None:
    async with connected(rig.url) as client:
        if way == "at once":
            return
        one = asked("x", stream=True)
        if way in ("in a stream", "in two streams"):
            await client.send(one * (1 + (way == "in two streams")))
            await client.until(b"data: ")
            return
        await client.send(UNSEEN.get(way, bytes)(one))
        await client.answer()
        if way == "half-closed":
            await client.leave("half_close")
            await trio.sleep(0.005)


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_client_that_leaves_with_the_last_event_has_had_its_answer(way: Any) -> None:
    async with open_rig(**BOUNDS) as rig, connected(rig.url) as client:
        rig.d.faults.add(Fault("after_body", "hang"))
        await client.send(asked("all of it", stream=True))
        await client.until(b"[DONE]")
        await client.leave(way)
        await until(lambda: not rig.app.active)
        assert rig.report.outcome == "ok"
        assert await settle(rig, NOTHING) == {}


# -- old clients -------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["", "Connection: keep-alive\r\n", "Connection: close\r\n"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_http_1_0_client_gets_no_chunks_and_sees_the_end(stream: bool, keep: str) -> None:
    body = {"model": "sim", "prompt": "old", "max_tokens": TOKENS, "stream": stream}
    async with open_rig(**BOUNDS) as rig:
        async with connected(rig.url) as client:
            await client.send(request(body, version="1.0", headers=keep))
            got = await client.answer()
            assert (got.status, got.end) == (200, "complete")
            assert got.framing == ("close" if stream else "length")
            assert "transfer-encoding" not in got.headers
            assert got.text == expected_text("old", TOKENS)
            if stream:
                assert got.events[-1] == b"[DONE]"
            if not got.headers.get("connection", "").lower().startswith("keep-alive"):
                await client.until_ended()
        async with connected(rig.url) as client:
            rig.d.faults.add(Fault("mid_body", "reset", after=2))
            await client.send(request(body, version="1.0", headers=keep))
            got = await client.answer()
            if stream:  # its connection ends either way: the events are all that tells
                assert b'"code":"stream_broken"' in got.events[-1]
                assert b"[DONE]" not in got.events
            else:
                assert got.status == 502
        assert await settle(rig, NOTHING) == {}


# -- clients that do not read --------------------------------------------------------------------


async def test_a_client_that_stops_reading_a_stream_holds_no_engine() -> None:
    sim = SimSettings(max_model_len=1_000_000)
    async with open_rig(sim=sim, write_timeout=0.5, **BOUNDS) as rig:
        async with connected(rig.url, receive_buffer=2048) as client:
            await client.send(request({"model": "sim", "prompt": "x", "max_tokens": ENDLESS, "stream": True}))
            await until(lambda: rig.d.running)
            # The client is still there. Everything but what its connection is made of is free again.
            await until(lambda: rig.d.requests[-1].how == "aborted")
            assert await settle(rig, NOTHING) == {}
            # It finds a stream that was cut.
            got = await client.answer()
            assert got.end == "cut"
            assert b"[DONE]" not in got.body
        assert rig.report.outcome == "disconnect"


async def test_a_client_that_stops_reading_a_whole_answer_holds_no_engine() -> None:
    async with open_rig(write_timeout=0.5, **BOUNDS) as rig:
        large = b'{"choices": [], "filler": "' + b"x" * 20_000_000 + b'"}'
        rig.d.faults.add(Fault("before_head", "status", status=200, body=large))
        async with connected(rig.url, receive_buffer=2048) as client:
            await client.send(asked("x", stream=False))
            await until(lambda: rig.d.requests and rig.d.requests[-1].how != "running")
            assert await settle(rig, NOTHING) == {}
            got = await client.answer()
            assert got.end == "cut"


async def test_a_slow_reader_is_no_dead_one() -> None:
    async with (
        open_rig(sim=SimSettings(max_model_len=100_000), write_timeout=5, **BOUNDS) as rig,
        connected(rig.url, receive_buffer=65536) as client,
    ):
        await client.send(request({"model": "sim", "prompt": "slow", "max_tokens": 1500, "stream": True}))
        for _ in range(20):
            await trio.sleep(0.02)
            if b"[DONE]" not in client.raw:
                await client.more()
        got = await client.answer()
        assert got.end == "complete"
        assert got.text == expected_text("slow", 1500)
        assert await settle(rig, NOTHING) == {}
