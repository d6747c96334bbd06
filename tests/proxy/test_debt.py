"""The debt: whatever fails and whoever leaves, the decode engine's blocks come free or are counted (I8)."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from trio_pdproxy.core.report import Report
from trio_pdproxy.core.verdict import Debt
from trio_pdproxy.sim import Fault, SimSettings
from trio_pdproxy.sim.faults import What
from trio_pdproxy.testing import Rig, open_rig, until

REFUSAL = b'{"error": {"message": "no"}}'


async def leave_early(rig: Rig, seconds: float, *, stream: bool) -> None:
    """A client that closes its connection after `seconds`."""
    with trio.move_on_after(seconds):
        if stream:
            await rig.stream(prompt="x" * 400, max_tokens=50)
        else:
            await rig.post(prompt="x" * 400, max_tokens=50)


def stranded(rig: Rig) -> int:
    return sum(engine.stranded for engine in rig.app.pool.decode)


async def ended(rig: Rig, seconds: float = 5.0) -> Report:
    await rig.quiet(seconds)
    return rig.report


async def test_a_client_that_leaves_before_the_kv_leaves_no_block_behind() -> None:
    async with open_rig(sim=SimSettings(prefill_base=0.2)) as rig:
        for stream in (True, False):
            pushes = rig.p.pushes
            await leave_early(rig, 0.05, stream=stream)
            await until(lambda: rig.d.requests[-1].how != "running", 0.1)  # decode's leg ends with the client
            assert rig.d.blocks_held > 0  # and it still holds what only the push frees
            assert rig.app.pool.decode[0].debts == 1
            report = await ended(rig)
            assert rig.p.pushes == pushes + 1
            assert rig.p.requests[-1].how == "complete"
            assert report.outcome == "disconnect"
            assert report.dispatches[0].settled == "disconnect"
            assert report.dispatches[0].debt is Debt.PAID
        assert stranded(rig) == 0


async def test_many_early_departures_leave_no_block_behind() -> None:
    async with open_rig(sim=SimSettings(prefill_base=0.05)) as rig:
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(leave_early_soon, rig, 0.002 * number)
        await rig.quiet()
        assert rig.d.orphans == 0
        assert stranded(rig) == 0


async def leave_early_soon(rig: Rig, seconds: float) -> None:
    await leave_early(rig, seconds, stream=True)


async def test_a_client_that_leaves_in_mid_stream_ends_decode_at_once() -> None:
    async with open_rig(sim=SimSettings(itl=0.02)) as rig:
        await leave_early(rig, 0.2, stream=True)
        report = await ended(rig, 0.2)
        assert report.outcome == "disconnect"
        assert report.status == 200
        assert rig.d.requests[-1].how == "aborted"


async def test_a_failed_prefill_leg_is_rescued_with_the_same_ids() -> None:
    cases: tuple[tuple[What, int], ...] = (
        ("status", 500),
        ("status", 429),
        ("status", 503),
        ("reset", 0),
        ("garbage", 0),
    )
    for what, status in cases:
        async with open_rig() as rig:
            rig.p.faults.add(Fault("before_head", what, status=status or 500))
            answer = await rig.stream(prompt="save me", max_tokens=3)
            assert answer.status == 200, (what, answer.raw)
            assert answer.complete
            first, second = rig.p.requests[-2:]
            assert first.id == second.id == rig.d.requests[-1].id
            assert first.body == second.body
            report = await ended(rig)
            # A kept-alive connection that dies unanswered is no failure: the leg goes out again on a fresh one.
            assert report.dispatches[0].rescue_paid is (None if what == "reset" else True)
            assert stranded(rig) == 0


async def test_a_prefill_engine_that_refuses_for_good_strands_the_debt_and_is_passed_on() -> None:
    async with open_rig(sim=SimSettings(max_model_len=4096)) as rig:
        rig.p.faults.add(Fault("before_head", "status", status=400, times=2, body=REFUSAL))
        response = await rig.post(prompt="x")
        assert response.status_code == 400
        assert response.json() == {"error": {"message": "no"}}
        await trio.sleep(0.05)
        assert stranded(rig) == 1
        report = rig.report
        assert report.dispatches[0].debt is Debt.STRANDED
        assert rig.app.pool.decode[0].debts == 0
        # Its place is given back all the same: the operator is told, and the engine goes on.
        assert rig.app.pool.decode[0].inflight == 0


async def test_a_decode_engines_refusal_ends_the_prefill_leg() -> None:
    async with open_rig(sim=SimSettings(prefill_base=0.5)) as rig:
        rig.d.faults.add(Fault("before_head", "status", status=422, body=REFUSAL))
        response = await rig.post(prompt="x")
        assert response.status_code == 422
        report = await ended(rig, 0.3)
        assert report.dispatches[0].debt is Debt.NONE
        assert rig.p.requests[-1].how == "aborted"


async def test_a_decode_engine_that_breaks_is_replaced_and_its_debt_settled() -> None:
    async with open_rig(decode=2, sim=SimSettings(prefill_base=0.05)) as rig:
        rig.cluster.decode[0].faults.add(Fault("before_head", "reset"))
        rig.cluster.decode[1].faults.add(Fault("before_head", "reset"))
        rig.cluster.decode[0].faults.add(Fault("before_head", "reset"))
        answer = await rig.stream(prompt="x", max_tokens=2)
        assert answer.status == 502
        await rig.quiet()
        rig.cluster.decode[0].faults.clear()
        answer = await rig.stream(prompt="x", max_tokens=2)
        assert answer.status == 200


async def test_decodes_own_error_as_first_event_becomes_a_status() -> None:
    async with open_rig() as rig:
        rig.d.faults.add(Fault("after_head", "sse_error"))
        answer = await rig.stream(prompt="x")
        assert answer.status == 500
        assert b"Internal server error" in answer.raw
        await trio.sleep(0.05)
        assert rig.report.dispatches[0].debt is Debt.NONE


async def test_a_stream_that_breaks_never_looks_complete() -> None:
    for what in ("reset", "fin", "garbage"):
        async with open_rig() as rig:
            rig.d.faults.add(Fault("mid_body", what, after=2))
            answer = await rig.stream(prompt="x", max_tokens=8)
            assert answer.status == 200
            assert not answer.complete, what
            assert b"[DONE]" not in answer.raw
            assert b'"code":"stream_broken"' in answer.events[-1]
            report = await ended(rig)
            assert report.outcome == "cut"


async def test_an_answer_that_breaks_is_a_502() -> None:
    async with open_rig() as rig:
        rig.d.faults.add(Fault("mid_body", "fin"))
        response = await rig.post(prompt="x", max_tokens=8)
        assert response.status_code == 502
        await rig.quiet()


async def test_a_late_prefill_is_a_504_and_settles() -> None:
    bounds: dict[str, Any] = {
        "connect_timeout": 0.1,
        "prefill_timeout": 0.2,
        "settle_timeout": 2,
        "lease": 1,
        "first_byte_timeout": 10,
    }
    async with open_rig(sim=SimSettings(prefill_base=0.5), ready=True, **bounds) as rig:
        with trio.fail_after(0.45):
            response = await rig.post(prompt="x")
        assert response.status_code == 504
        assert rig.app.pool.decode[0].debts == 1
        report = await ended(rig)
        assert report.outcome == "timeout"
        assert report.dispatches[0].settled == "timeout"
        assert report.dispatches[0].debt is Debt.PAID
        assert stranded(rig) == 0


async def test_a_hung_prefill_never_delays_the_end_of_an_answer() -> None:
    async with open_rig(drain_grace=0.1) as rig:
        rig.p.faults.add(Fault("before_head", "hang", after_work=True))
        with trio.fail_after(1):
            answer = await rig.stream(prompt="x", max_tokens=3)
        assert answer.complete
        report = await ended(rig, 1)
        assert report.outcome == "ok"
        assert report.last_byte is not None
        assert report.ended is not None
        assert report.ended - report.last_byte >= 0.09


async def test_a_lapsed_lease_is_rescued() -> None:
    bounds: dict[str, Any] = {"lease": 0.1, "first_byte_timeout": 20}
    # Decode hears of its request after prefill has forgotten it.
    async with open_rig(sim=SimSettings(lease=0.1), **bounds) as rig:
        rig.d.faults.add(Fault("before_head", "slow", delay=0.5))
        answer = await rig.stream(prompt="x", max_tokens=3)
        assert answer.status == 200
        report = await ended(rig)
        assert report.dispatches[0].rescue == "lapsed"
        assert report.dispatches[0].rescue_paid is True


async def test_a_restarted_prefill_engine_is_learned_again() -> None:
    async with open_rig(health_interval=3600, health_timeout=2) as rig:
        assert (await rig.post(prompt="a")).status_code == 200
        await rig.p.restart()
        first = await rig.post(prompt="b")
        assert first.status_code in (200, 502)  # the first one meets the old coordinates
        await until(lambda: not rig.app.missing())
        assert (await rig.post(prompt="c")).status_code == 200


async def test_no_engine_is_a_503_that_names_what_is_missing() -> None:
    async with open_rig(ready=False) as rig:
        await rig.p.kill()
        for engine in rig.app.pool.engines:
            engine.poked.set()
        await until(lambda: not rig.app.pool.prefill[0].usable)
        response = await rig.post()
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert "prefill-0" in response.json()["error"]["message"]
        ready = await rig.client.get("/ready")
        assert ready.status_code == 503
        assert "prefill-0" in ready.json()["missing"][0]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_answer_that_comes_after_decodes_is_read_and_its_connection_kept(stream: bool) -> None:
    async with open_rig(health_interval=3600, health_timeout=10) as rig:
        connections = rig.app.pool.prefill[0].connections
        for _ in range(5):
            rig.p.faults.add(Fault("before_head", "slow", after_work=True, delay=0.05))
            assert (await rig.post(max_tokens=1, stream=stream)).status_code == 200
            await rig.quiet()
            assert (connections.open, connections.idle) == (1, 1)
