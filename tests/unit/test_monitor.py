"""What a look at an engine makes of its silence: one that works is not taken for gone because a probe was late."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import trio

from tests.unit.test_pool import make
from trio_pdproxy.engines.coordinates import Meta, SideChannelError, SideChannelSilentError
from trio_pdproxy.engines.engine import Engine
from trio_pdproxy.engines.monitor import WORKING, look
from trio_pdproxy.engines.wire import RefusedError, SilentError


class SideChannel:
    def __init__(self, error: SideChannelError | None = None) -> None:
        self.error = error

    async def ask(self, host: str, port: int) -> Meta:
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return Meta("p0", "same")


def answering(monkeypatch: pytest.MonkeyPatch, engine: Engine, error: Exception | None) -> None:
    async def call(*_: Any, **__: Any) -> httpx.Response:
        await trio.lowlevel.checkpoint()
        if error is not None:
            raise error
        return httpx.Response(200)

    monkeypatch.setattr(engine, "call", call)


@pytest.mark.parametrize("silent", ["health", "side channel"])
async def test_one_late_probe_is_forgiven_and_two_are_not_unless_requests_say_that_it_works(
    silent: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    for at_work in (False, True):
        engine = make().prefill[0]
        answering(monkeypatch, engine, SilentError("no answer in time") if silent == "health" else None)
        side_channel = SideChannel(SideChannelSilentError("silent") if silent != "health" else None)
        if at_work:
            engine.succeeded()
        usable = []
        for _ in range(3):
            await look(engine, side_channel)
            usable.append(engine.usable)
        assert usable == ([True, True, True] if at_work else [True, False, False])
        await trio.sleep(WORKING)
        await look(engine, side_channel)
        assert not engine.usable


@pytest.mark.parametrize("error", [RefusedError("refused"), None])
async def test_a_refusal_or_a_strange_side_channel_counts_at_once(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make().prefill[0]
    engine.succeeded()
    answering(monkeypatch, engine, error)
    await look(engine, SideChannel(None if error else SideChannelError("no NIXL side channel")))
    assert not engine.usable
