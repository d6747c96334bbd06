"""How the pool follows a source, on a source that says what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
import trio

from trio_pdproxy.config import EngineSpec
from trio_pdproxy.engines.discovery import Follower, Found
from trio_pdproxy.engines.discovery.source import Tell
from trio_pdproxy.sim import SimSettings
from trio_pdproxy.testing import Rig, open_rig, until
from trio_pdproxy.testing.rig import spec_of


class Said:
    """A source."""

    name = "said"
    trouble: str | None = None

    def __init__(self) -> None:
        self.tell: Tell | None = None

    async def watch(self, tell: Tell) -> None:
        self.tell = tell
        await trio.sleep_forever()

    def say(self, *found: Found) -> None:
        assert self.tell is not None
        self.tell(found)


@asynccontextmanager
async def followed(prefill_base: float = 0.01) -> AsyncIterator[tuple[Rig, Said, dict[str, Found]]]:
    """A rig with one pair, whose decode engine the source knows, and one more decode engine it may come to know."""
    async with open_rig(decode=2, sim=SimSettings(prefill_base=prefill_base)) as rig, trio.open_nursery() as nursery:
        found = {d.name: Found("decode", spec_of(d)) for d in rig.cluster.decode}
        source = Said()
        nursery.start_soon(Follower(rig.app.pool, source, present=found.values()).run)  # noqa: ASYNC113  until it is told
        await until(lambda: source.tell)
        yield rig, source, found
        nursery.cancel_scope.cancel("the test is over")


def names(rig: Rig) -> set[str]:
    return {engine.name for engine in rig.app.pool.decode}


async def test_who_is_missing_is_drained_and_who_comes_back_meanwhile_stays() -> None:
    async with followed(prefill_base=0.6) as (rig, source, found):
        d0, d1 = rig.app.pool.decode
        async with trio.open_nursery() as nursery:
            statuses: list[int] = []

            async def ask() -> None:
                statuses.append((await rig.post()).status_code)

            for _ in range(4):
                nursery.start_soon(ask)
            await until(lambda: d0.inflight and d1.inflight)
            source.say(found["decode-0"])
            await until(lambda: d1.draining)
            assert not d1.usable
            source.say(*found.values())
            await until(lambda: not d1.draining)
            assert rig.app.pool.decode[1] is d1  # the same, with what it has in hand
            source.say(found["decode-1"])
            await until(lambda: d0.draining)
            assert names(rig) == {"decode-0", "decode-1"}
        assert statuses == [200] * 4
        await until(lambda: names(rig) == {"decode-1"})
        source.say(*found.values())
        await until(lambda: names(rig) == {"decode-0", "decode-1"})


async def test_what_others_brought_is_left_alone() -> None:
    async with followed() as (rig, source, _):
        rig.app.pool.add("decode", EngineSpec(url="http://127.0.0.1:9", name="by"))
        source.say()
        await until(lambda: names(rig) == {"by"})
        assert len(rig.app.pool.prefill) == 1


async def test_an_address_that_is_taken_is_tried_again_until_it_is_free(caplog: pytest.LogCaptureFixture) -> None:
    """A new pod may get its predecessor's address while that one still drains."""
    async with followed() as (rig, source, found):
        heir = Found("decode", spec_of(rig.cluster.decode[0], name="heir"))
        with rig.app.pool.place(rig.app.pool.decode[0]):
            source.say(heir, found["decode-1"])
            await until(lambda: "is a decode engine already" in caplog.text)
            assert names(rig) == {"decode-0", "decode-1"}
        await until(lambda: names(rig) == {"heir", "decode-1"})
        await until(lambda: all(engine.usable for engine in rig.app.pool.decode))


async def test_an_engine_that_was_removed_by_hand_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with followed() as (rig, source, found):
        await rig.app.pool.remove("decode-0")
        source.say(found["decode-1"])
        await until(lambda: "had gone already" in caplog.text)
        assert names(rig) == {"decode-1"}
        source.say(*found.values())
        await until(lambda: names(rig) == {"decode-0", "decode-1"})


def unready(found: Iterable[Found]) -> list[Found]:
    return [Found(one.role, one.spec, ready=False) for one in found]


async def test_all_unready_keeps_those_in_use_and_adds_none() -> None:
    async with followed() as (rig, source, found):
        source.say(found["decode-0"])
        await until(lambda: names(rig) == {"decode-0"})
        source.say(*unready(found.values()))
        await trio.sleep(0.1)
        assert names(rig) == {"decode-0"}
        assert not rig.app.pool.decode[0].draining
        source.say(*unready([found["decode-0"]]), found["decode-1"])
        await until(lambda: names(rig) == {"decode-1"})
