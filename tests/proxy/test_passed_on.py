"""A stream is passed on in the hub's task where it is plain, and by its exchange's own where it is not: no client can
tell which."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import trio
from trio.testing import memory_stream_pair

from trio_pdproxy.engines.hub import Hub
from trio_pdproxy.exchange.relay import Relay
from trio_pdproxy.sim import SimSettings, expected_text
from trio_pdproxy.testing import open_rig, until
from trio_pdproxy.web.direct import Direct
from trio_pdproxy.web.sink import AsgiSink

SLOW = SimSettings(prefill_base=0.0, itl=0.01)


async def test_the_bytes_are_the_same_with_the_hub_without_it_and_where_it_ends() -> None:
    async with open_rig(sim=SLOW) as rig:
        hub = rig.app.pool.hub

        async def end_it_again_and_again() -> None:
            while True:
                await until(lambda: bool(hub._readers))
                for reader in list(hub._readers.values()):
                    reader.stopped()
                await trio.sleep(0.003)

        async def without() -> None:
            epoll, hub._epoll = hub._epoll, None
            try:
                await trio.sleep_forever()
            finally:
                hub._epoll = epoll

        for meanwhile in (trio.sleep_forever, end_it_again_and_again, without):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(meanwhile)
                await trio.testing.wait_all_tasks_blocked()
                seen = await rig.stream(max_tokens=40)
                nursery.cancel_scope.cancel("seen")
            assert seen.complete
            assert seen.text == expected_text("hello", 40)
            assert seen.raw.endswith(b"data: [DONE]\n\n")
            await rig.quiet()
            assert rig.report.outcome == "ok"
            assert rig.report.completion_tokens in (None, 40)
        assert not hub._readers


@pytest.mark.skipif("PUBLIC_SENDS" in os.environ, reason="there every event wakes it")
async def test_plain_events_do_not_wake_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    added = 0
    add = Hub.add

    def counted(hub: Hub, fd: int, reader: object) -> None:
        nonlocal added
        added += 1
        add(hub, fd, reader)  # type: ignore[arg-type]

    monkeypatch.setattr(Hub, "add", counted)
    async with open_rig(sim=SLOW) as rig:
        seen = await rig.stream(max_tokens=40)
        assert seen.text == expected_text("hello", 40)
    assert 1 <= added <= 3


async def test_a_fault_of_ours_in_the_hubs_task_is_that_of_its_exchange_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_rig(sim=SLOW) as rig:
        assert (await rig.stream(max_tokens=3)).complete
        await rig.quiet()
        hand = Relay._hand
        calls = 0

        def failing(relay: Relay, block: bytes, write: Callable[[bytes], bool]) -> bool:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("a fault of ours")
            return hand(relay, block, write)

        with monkeypatch.context() as patch:
            patch.setattr(Relay, "_hand", failing)
            seen = await rig.stream(max_tokens=30)
        assert (seen.status, seen.complete) == (200, False)
        await rig.quiet()
        assert rig.report.outcome == "proxy_error"
        assert rig.app.failure is None
        assert (await rig.stream(max_tokens=30)).text == expected_text("hello", 30)


async def test_what_is_left_of_a_chunk_goes_out_before_anything_else() -> None:
    """A deadline may end a stream in the middle of one: the error event must not become a part of it."""
    out = b""

    async def send(data: bytes | memoryview) -> None:
        nonlocal out
        out += data

    async def nothing(*_: object) -> None: ...

    ours, _ = memory_stream_pair()
    sink = AsgiSink(nothing, Direct(ours, trio.Lock(), send, nothing))
    await sink.start(200, [])
    await sink.write(b"one")
    assert not sink.pass_on(b"3\r\ntwo\r\n")
    await sink.write(b"three")
    assert out == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n"
