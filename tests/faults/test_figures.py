"""Two times that matter, measured and printed; what is asserted of them does not depend on a machine's speed."""

from __future__ import annotations

from statistics import quantiles

import trio

from tests.faults.cells import TOKENS, Out, asked, settle
from tests.faults.client import connected, request
from tests.faults.table import Tables
from trio_pdproxy.sim import Fault, SimSettings, expected_text
from trio_pdproxy.testing import open_rig

TRIALS = 200
NOTHING = Out(200, "text")


async def test_from_a_clients_close_to_the_close_of_decodes_connection(tables: Tables) -> None:
    delays: list[float] = []
    async with open_rig(sim=SimSettings(itl=0.005), health_interval=3600, health_timeout=10) as rig:
        for _ in range(TRIALS):
            async with connected(rig.url) as client:
                await client.send(request({"model": "sim", "prompt": "x", "max_tokens": 4000, "stream": True}))
                await client.until(b"data: ")
                seen = rig.d.requests[-1]
                left = trio.current_time()
                await client.leave("close")
                with trio.fail_after(30):
                    while seen.ended is None:  # noqa: ASYNC110  the engine's own clock says when; this only waits
                        await trio.lowlevel.checkpoint()
                delays.append(seen.ended - left)
                assert seen.how == "aborted"
        assert await settle(rig, NOTHING) == {}
        assert all(report.outcome == "disconnect" for report in rig.app.recent)
    cuts = quantiles(delays, n=100)
    tables.figure(
        f"client's close to decode's: p50 {cuts[49] * 1e3:.2f} ms, p99 {cuts[98] * 1e3:.2f} ms, "
        f"{TRIALS} trials (bar on a calm machine: 2 ms)"
    )


async def test_a_hung_prefill_engine_does_not_delay_the_end_of_an_answer(tables: Tables) -> None:
    """Its leg is still on when the client has everything, and ends only then."""
    async with open_rig(drain_grace=30, health_interval=3600, health_timeout=10) as rig:
        for stream in (True, False):
            never = trio.Event()
            rig.p.faults.add(Fault("before_head", "slow", after_work=True, until=never))
            async with connected(rig.url) as client:
                begun = trio.current_time()
                await client.send(asked("hung", stream=stream))
                got = await client.answer()
                took = trio.current_time() - begun
                assert (got.status, got.end) == (200, "complete")
                assert got.text == expected_text("hung", TOKENS)
                assert rig.p.requests[-1].how == "running"
                assert rig.app.active == 1
                # The same connection serves on meanwhile.
                await client.send(asked("next", stream=stream))
                assert (await client.answer()).text == expected_text("next", TOKENS)
                assert rig.p.requests[-2].how == "running"
            never.set()
            assert await settle(rig, NOTHING) == {}
            kind = "stream" if stream else "whole answer"
            tables.figure(f"{kind} of {TOKENS} tokens while prefill hangs: complete after {took * 1e3:.1f} ms")
