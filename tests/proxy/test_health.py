"""Engines that fail, rest, come back; pairs that are warmed; retries that are bounded."""

from __future__ import annotations

from collections import Counter

import trio

from trio_pdproxy.sim import Fault, SimSettings, open_cluster
from trio_pdproxy.testing import open_rig, until
from trio_pdproxy.testing.rig import open_rig_on


async def test_every_pair_is_warmed_by_a_transfer_before_it_gets_requests() -> None:
    async with open_rig(prefill=2, decode=2, warm_up=True) as rig:
        await until(lambda: not rig.app.pool.roster.cold)
        assert [sim.pushes for sim in rig.cluster.prefill] == [2, 2]
        assert len(rig.app.recent) == 0  # ours, not clients'
        assert (await rig.post()).status_code == 200
        await rig.quiet()


async def test_a_pair_whose_first_transfer_fails_gets_no_requests_and_says_why() -> None:
    async with open_rig(prefill=2, warm_up=True, ready=False) as rig:
        broken = rig.cluster.prefill[0]
        # The probe has no partner; what comes after it is the warm-up.
        broken.faults.add(
            Fault(
                "before_head",
                "status",
                status=500,
                times=None,
                match=lambda seen: "transfer_id" in (seen.transfer or {}),
            )
        )
        await until(lambda: not rig.app.missing())
        for _ in range(6):
            assert (await rig.post()).status_code == 200
        assert rig.cluster.prefill[1].pushes == 7
        assert broken.pushes == 0
        assert any(p.name == broken.name for p, _ in rig.app.pool.roster.cold)


async def test_a_restarted_engine_is_warmed_again() -> None:
    async with (
        open_cluster() as cluster,
        open_rig_on(cluster, warm_up=True, health_interval=1, health_timeout=1) as rig,
    ):
        before = rig.app.pool.prefill[0].coordinates
        await rig.p.restart()
        await until(lambda: not rig.app.missing() and rig.app.pool.prefill[0].coordinates != before, 10)
        assert rig.p.pushes == 1
        assert (await rig.post()).status_code == 200


async def test_an_engine_that_keeps_failing_is_left_alone_and_tried_again() -> None:
    async with open_rig(decode=2, eject_after=3, eject_time=0.3, health_interval=1, health_timeout=1) as rig:
        bad = rig.cluster.decode[0]
        fault = bad.faults.add(Fault("before_head", "status", status=500, times=None))
        for number in range(20):
            assert (await rig.post(prompt=f"prompt {number}")).status_code == 200  # by the other one
        assert fault.hits == 3
        engine = next(e for e in rig.app.pool.decode if e.name == bad.name)
        assert not engine.usable
        assert "3 times in a row" in engine.why
        bad.faults.clear()
        await until(lambda: engine.usable)
        assert engine.max_inflight == 1  # half open
        for number in range(6):
            assert (await rig.post(prompt=f"again {number}")).status_code == 200
        assert engine.max_inflight == engine.cap
        assert len(bad.requests) > fault.hits


async def test_a_clients_fault_never_counts_against_an_engine() -> None:
    async with open_rig(eject_after=1) as rig:
        for _ in range(5):
            assert (await rig.client.post("/v1/completions", json={"model": "nope", "prompt": "x"})).status_code == 404
        assert (await rig.post()).status_code == 200


async def test_the_last_resort_is_an_engine_that_was_left_alone() -> None:
    async with open_rig(eject_after=1, eject_time=60) as rig:
        rig.d.faults.add(Fault("before_head", "status", status=500))
        assert (await rig.post()).status_code == 500
        engine = rig.app.pool.decode[0]
        assert not engine.usable
        await until(lambda: engine.known)  # asked again who it is
        assert (await rig.post()).status_code == 200


async def test_retries_have_a_budget() -> None:
    async with open_rig(decode=4, eject_after=1000, retry_budget=0.0, attempts=3) as rig:
        for sim in rig.cluster.decode:
            sim.faults.add(Fault("before_head", "status", status=500, times=None))
        for _ in range(30):
            assert (await rig.post()).status_code == 500
        await rig.quiet()
        tried = sum(len(sim.requests) for sim in rig.cluster.decode)
        assert tried == 30 + 10  # the burst, and no storm


async def test_a_flapping_engine_does_not_flap_its_clients() -> None:
    async with open_rig(prefill=2, decode=3, health_interval=1, health_timeout=1, eject_time=0.1) as rig:
        codes: Counter[int] = Counter()
        over = trio.Event()

        async def flap() -> None:
            while not over.is_set():
                await rig.cluster.decode[0].kill()
                await trio.sleep(0.05)
                await rig.cluster.decode[0].revive()
                await trio.sleep(0.05)

        async def ask(number: int) -> None:
            codes[(await rig.post(prompt=f"prompt {number}", max_tokens=2)).status_code] += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flap)
            for number in range(150):
                await ask(number)
                await trio.sleep(0.005)
            over.set()
        assert codes == {200: 150}


async def test_without_prefill_engines_the_answer_is_an_error_or_as_configured_decode_alone() -> None:
    for fallback, status in (("error", 503), ("decode_only", 200)):
        async with open_rig(fallback=fallback, health_interval=1, health_timeout=1) as rig:
            await rig.p.kill()
            await until(lambda: not rig.app.pool.prefill[0].usable)
            response = await rig.post()
            assert response.status_code == status
            if status == 200:
                await rig.quiet()
                assert rig.report.kind == "decode_only"


async def test_short_prompts_may_go_to_decode_alone() -> None:
    async with open_rig(min_prefill_tokens=20) as rig:
        for prompt, kind in (("short", "decode_only"), ("long " * 40, "push"), ([1, 2, 3], "decode_only")):
            assert (await rig.post(prompt=prompt)).status_code == 200
            await rig.quiet()
            assert rig.report.kind == kind


async def test_prefix_affinity_sends_what_has_a_prefix_in_common_to_one_engine() -> None:
    async with open_rig(prefill=4, prefill_policy="prefix_affinity", sim=SimSettings(max_model_len=8192)) as rig:
        for number in range(24):
            system = f"system prompt {number % 3} " * 60
            assert (await rig.post(prompt=f"{system} question {number}", max_tokens=1)).status_code == 200
        homes = [
            sum(seen.transfer is not None and "transfer_id" in seen.transfer for seen in sim.requests)
            for sim in rig.cluster.prefill
        ]
        assert sum(homes) == 24
        assert all(count % 8 == 0 for count in homes)


async def test_session_affinity_follows_the_header() -> None:
    async with open_rig(decode=4, decode_policy="session_affinity") as rig:
        for number in range(12):
            headers = {"x-session-id": f"user {number % 2}"}
            body = {"model": "sim", "prompt": f"prompt {number}", "max_tokens": 1}
            assert (await rig.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        counts = [len(sim.requests) for sim in rig.cluster.decode]
        assert sorted(count for count in counts if count) in ([6, 6], [12])
