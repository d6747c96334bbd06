"""A decode engine that is silent past the prefill engine's lease: it missed the push, or it is just at work.

For an answer in one piece nobody can tell, so the prefill leg is sent again, and whatever comes of that, the answer
that the decode engine is at work on is not given up for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.faults.cells import Out, asked, settle, shorten_waits
from tests.faults.client import Client, connected
from trio_pdproxy.sim import Fault, SimSettings, expected_text
from trio_pdproxy.testing import Rig, open_rig
from trio_pdproxy.testing.waiting import until

NOTHING = Out(200, "text")


@asynccontextmanager
async def at_work(monkeypatch: pytest.MonkeyPatch, second: Fault | None, **bounds: Any) -> AsyncIterator[Any]:
    """A whole answer that its decode engine is at work on, its prefill leg sent again and answered with `second`."""
    shorten_waits(monkeypatch, reused=True)
    released = trio.Event()
    sim = SimSettings(keep_alive=600)
    bounds = {"lease": 0.2, "first_byte_timeout": 60, "health_interval": 3600, "health_timeout": 10, **bounds}
    async with open_rig(sim=sim, **bounds) as rig, connected(rig.url) as client:
        rig.d.faults.add(Fault("before_head", "slow", after_work=True, until=released))
        await client.send(asked("long work", stream=False))
        await until(lambda: [leg.how for leg in legs(rig)] == ["complete"], 30, step=0.001)
        if second is not None:
            rig.p.faults.add(second)
        await until(lambda: len(legs(rig)) == 2, 30)
        yield rig, client, released


def legs(rig: Rig) -> list[Any]:
    """What the prefill engine saw of the request: neither the proxy's probe nor the warm-up."""
    return [seen for seen in rig.p.requests if seen.body["prompt"] == "long work"]


async def is_served(rig: Rig, client: Client, released: trio.Event) -> None:
    released.set()
    got = await client.answer()
    assert (got.status, got.end) == (200, "complete"), got
    assert got.text == expected_text("long work", 6)
    assert await settle(rig, NOTHING) == {}
    assert len(rig.report.dispatches) == 1
    assert rig.report.dispatches[0].rescue == "lapsed"


@pytest.mark.parametrize("what", ["reset", "garbage", "status", "other_params"])
async def test_a_rescue_that_fails_does_not_fail_the_answer(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with at_work(monkeypatch, Fault("before_head", what)) as (rig, client, released):
        await trio.sleep(0.1)
        await is_served(rig, client, released)
        assert rig.report.dispatches[0].rescue_paid is False


async def test_a_rescue_that_hangs_does_not_fail_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = {"connect_timeout": 0.3, "prefill_timeout": 0.5, "settle_timeout": 1, "drain_grace": 0.1}
    async with at_work(monkeypatch, Fault("before_head", "hang"), **bounds) as (rig, client, released):
        await trio.sleep(1.5)  # past the prefill engine's deadline, and past that of settling
        await is_served(rig, client, released)


async def test_a_rescue_that_answers_clears_the_doubt_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async with at_work(monkeypatch, None) as (rig, client, _):
        await trio.sleep(1)  # the second answer's lease is over too
        await client.leave("close")
        assert await settle(rig, NOTHING) == {}
        assert rig.report.outcome == "disconnect"
        assert rig.report.dispatches[0].rescue_paid is True
        assert len(legs(rig)) == 2
