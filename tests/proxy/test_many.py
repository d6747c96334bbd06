"""Many requests at once: none lost, none mixed up, nothing left."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from trio_pdproxy.core import sse
from trio_pdproxy.engines.connections import KEEPALIVE
from trio_pdproxy.sim import Fault, SimSettings, expected_text
from trio_pdproxy.testing import Rig, open_rig, until


async def streamed(rig: Rig, prompt: str, tokens: int) -> str:
    """A streamed completion on a connection of its own: the text; httpx would be most of the work here."""
    body = msgspec.json.encode({"model": "sim", "prompt": prompt, "max_tokens": tokens, "stream": True})
    host, port = rig.url.removeprefix("http://").split(":")
    answer = b""
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        while piece := await stream.receive_some(65536):
            answer += piece
    head, _, chunked = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    assert chunked.endswith(b"0\r\n\r\n"), "the stream was cut"
    events = sse.events(dechunk(chunked))
    assert events[-1] == b"[DONE]"
    return "".join(msgspec.json.decode(event)["choices"][0]["text"] for event in events[:-1])


def dechunk(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body, data = body + data[:length], data[length + 2 :]
    return body


async def test_a_thousand_streams_at_once() -> None:
    sim = SimSettings(itl=0.02, max_num_seqs=2000)
    async with open_rig(sim=sim, prefill_max_inflight=2000, decode_max_inflight=2000, health_interval=3600) as rig:
        all_in = trio.Event()
        rig.p.faults.add(Fault("before_head", "slow", until=all_in, times=None))
        texts: dict[int, str] = {}

        async def one(number: int) -> None:
            texts[number] = await streamed(rig, f"prompt {number}", 6)

        async with trio.open_nursery() as nursery:
            for number in range(1000):
                nursery.start_soon(one, number)
            await until(lambda: rig.app.active == 1000, 60)
            all_in.set()
        assert texts == {number: expected_text(f"prompt {number}", 6) for number in range(1000)}
        await rig.quiet()
        # No pool growth: what is kept alive expires, and nothing else is open.
        for engine in rig.app.pool.engines:
            assert engine.connections.open == engine.connections.idle
        await trio.sleep(KEEPALIVE + 0.1)
        for engine in rig.app.pool.engines:
            await engine.connections.expire()
            assert engine.connections.open == 0


async def test_what_exceeds_the_caps_waits_here_and_not_at_the_engines() -> None:
    async with open_rig(prefill_max_inflight=2, decode_max_inflight=3, sim=SimSettings(itl=0.002)) as rig:
        most = 0

        async def one(number: int) -> None:
            answer = await rig.stream(prompt=f"prompt {number}", max_tokens=4)
            assert answer.text == expected_text(f"prompt {number}", 4)

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one, number)
            while rig.app.active or not most:
                most = max(most, rig.d.running + rig.d.waiting)
                await trio.sleep(0.001)
        assert 0 < most <= 3
        await rig.quiet()


async def test_a_full_queue_is_a_429_and_a_long_wait_too() -> None:
    bounds: dict[str, Any] = {
        "prefill_max_inflight": 1,
        "decode_max_inflight": 1,
        "queue_size": 1,
        "queue_timeout": 0.1,
    }
    async with open_rig(sim=SimSettings(prefill_base=0.5), **bounds) as rig:
        codes: list[tuple[int, str | None]] = []

        async def one() -> None:
            response = await rig.post()
            code = None if response.status_code == 200 else response.json()["error"]["code"]
            codes.append((response.status_code, code))
            assert response.status_code == 200 or response.headers["retry-after"] == "1"

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
                await trio.sleep(0.02)
        assert sorted(codes, key=str) == [(200, None), (429, "queue_full"), (429, "queue_timeout")]
        await rig.quiet()
