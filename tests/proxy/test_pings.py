"""Comments while a stream waits for its first token: for load balancers that close silent connections."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trio_pdproxy.core import sse
from trio_pdproxy.sim import Fault, SimSettings, expected_chat, expected_text
from trio_pdproxy.testing import open_rig, requested

PING = b": ping\n\n"
SLOW = SimSettings(prefill_base=0.5)
SAID = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 4},
    "/v1/responses": {"input": SAID, "max_output_tokens": 4},
    "/v1/messages": {"messages": SAID, "max_tokens": 4},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_waits_is_pinged_and_then_is_the_same_stream(path: str) -> None:
    async with open_rig(sim=SLOW, ping_interval=0.1) as rig:
        answer = await rig.stream(path, **BODIES[path])
        assert (answer.status, answer.complete) == (200, True)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.raw.startswith(PING)
        rest = answer.raw.replace(PING, b"")
        assert b"ping" not in rest
        assert answer.raw == PING * answer.raw.count(PING) + rest, "none once the stream has begun"
        if path in ("/v1/completions", "/v1/chat/completions"):
            text = expected_chat(SAID, 4) if "chat" in path else expected_text("hello", 4)
            assert answer.text == text
        await rig.quiet()
        assert rig.report.outcome == "ok"


async def test_without_the_setting_and_for_whole_answers_there_are_none() -> None:
    async with open_rig(sim=SLOW) as rig:
        assert b"ping" not in (await rig.stream(max_tokens=2)).raw
    async with open_rig(sim=SLOW, ping_interval=0.1) as rig:
        response = await rig.post(max_tokens=2)
        assert response.json()["choices"][0]["text"] == expected_text("hello", 2)
        await rig.quiet()


async def test_a_stream_that_does_not_wait_is_not_pinged() -> None:
    async with open_rig(ping_interval=5) as rig:
        answer = await rig.stream(max_tokens=3)
        assert b"ping" not in answer.raw
        assert answer.text == expected_text("hello", 3)
        await rig.quiet()


@pytest.mark.parametrize("path", BODIES)
async def test_what_fails_after_a_ping_is_told_in_an_error_event_under_the_200(path: str) -> None:
    async with open_rig(ping_interval=0.1) as rig:
        for engine in (rig.p, rig.d):
            engine.faults.add(Fault("before_head", "status", status=400, delay=0.5, times=None))
        answer = await rig.stream(path, **BODIES[path])
        assert (answer.status, answer.complete) == (200, False)
        assert answer.raw.startswith(PING)
        (event,) = answer.events
        assert sse.error_event(event) is not None
        assert b"[DONE]" not in answer.raw
        last = answer.raw.removesuffix(b"\n\n").split(b"\n\n")[-1]
        assert last.startswith(b"event: error\n") == (path in ("/v1/responses", "/v1/messages"))
        if path == "/v1/responses":
            assert {"type", "code", "message", "param", "sequence_number"} == set(json.loads(event))
        rig.p.faults.clear()
        rig.d.faults.clear()
        await rig.quiet()


async def test_another_pair_is_still_tried_after_a_ping() -> None:
    async with open_rig(decode=2, ping_interval=0.1) as rig:
        rig.cluster.decode[0].faults.add(Fault("before_head", "status", status=500, delay=0.4))
        rig.cluster.decode[1].faults.add(Fault("before_head", "status", status=500, delay=0.4))
        answer = await rig.stream(max_tokens=3)
        assert answer.status == 200
        assert answer.raw.startswith(PING)
        await rig.quiet()
        assert len(rig.report.dispatches) == 2


async def test_a_client_that_leaves_between_two_pings_leaves_nothing() -> None:
    async with open_rig(sim=SLOW, ping_interval=0.1) as rig:
        body = {"model": "sim", "prompt": "hello", "stream": True}
        async with requested(rig.url, "/v1/completions", body) as connection:
            assert (await connection.receive_head()).status == 200
            assert await connection.receive_body() == PING
        await rig.quiet()
        assert rig.report.outcome == "disconnect"
        assert rig.d.orphans == 0
