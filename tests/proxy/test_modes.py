"""Engines in pull mode, and prefill engines with data parallelism."""

from __future__ import annotations

import trio

from trio_pdproxy.sim import Fault, SimSettings, expected_text, open_cluster
from trio_pdproxy.testing import open_rig, until
from trio_pdproxy.testing.rig import open_rig_on

PULL = SimSettings(mode="pull", prefill_base=0.02)


async def test_in_pull_mode_the_legs_go_one_after_the_other_with_what_prefill_said() -> None:
    async with open_rig(sim=PULL) as rig:
        for number in range(4):
            stream = await rig.stream(prompt=f"prompt {number}", max_tokens=4)
            assert stream.text == expected_text(f"prompt {number}", 4)
            whole = await rig.post(prompt=f"whole {number}", max_tokens=4)
            assert whole.json()["choices"][0]["text"] == expected_text(f"whole {number}", 4)
            assert "kv_transfer_params" not in whole.text
        await rig.quiet()
        assert rig.report.kind == "pull"
        dispatch = rig.report.dispatches[0]
        assert dispatch.prefill is not None
        assert dispatch.prefill.end is not None
        assert dispatch.decode.sent is not None
        assert dispatch.decode.sent >= dispatch.prefill.end
        assert rig.d.requests[-1].body["kv_transfer_params"]["transfer_mode"] == "pull"
        assert rig.p.blocks_held <= 1  # the probe's


async def test_in_pull_mode_several_sequences_go_to_decode_alone() -> None:
    async with open_rig(sim=PULL) as rig:
        response = await rig.post(prompt=["one", "two"], max_tokens=3)
        assert response.status_code == 200
        assert len(response.json()["choices"]) == 2
        assert rig.d.alive
        await rig.quiet()
        assert rig.report.kind == "decode_only"


async def test_in_pull_mode_whoever_leaves_ends_both_legs() -> None:
    async with open_rig(sim=SimSettings(mode="pull", prefill_base=1)) as rig:
        with trio.move_on_after(0.1):
            await rig.post(prompt="x")
        await rig.quiet(0.5)
        assert rig.p.requests[-1].how == "aborted"
        assert rig.d.requests == []
        assert rig.report.outcome == "disconnect"


async def test_in_pull_mode_a_failed_prefill_is_tried_elsewhere_and_strands_nothing() -> None:
    async with open_rig(prefill=2, sim=PULL) as rig:
        for status, wanted in ((500, 200), (503, 200), (400, 400)):
            rig.cluster.prefill[0].faults.add(Fault("before_head", "status", status=status))
            rig.cluster.prefill[1].faults.clear()
            statuses = {(await rig.post(prompt=f"{status} {number}")).status_code for number in range(2)}
            assert statuses == ({200, 400} if wanted == 400 else {200})
        await rig.quiet()
        assert sum(engine.stranded for engine in rig.app.pool.decode) == 0


async def test_push_and_pull_are_not_mixed() -> None:
    async with (
        open_cluster(settings=SimSettings(mode="pull"), decode_settings=SimSettings(mode="push")) as cluster,
        open_rig_on(cluster, ready=False) as rig,
    ):
        await until(lambda: all(engine.usable for engine in rig.app.pool.engines))
        response = await rig.post()
        assert response.status_code == 503
        assert "pull mode" in response.json()["error"]["message"]
        assert "same connector" in response.json()["error"]["message"]


async def test_each_rank_of_a_prefill_engine_is_a_target_of_its_own() -> None:
    async with (
        open_cluster(settings=SimSettings(dp_size=2), decode_settings=SimSettings()) as cluster,
        open_rig_on(cluster, prefill_spec={"dp_size": 2}) as rig,
    ):
        names = [engine.name for engine in rig.app.pool.prefill]
        assert names == ["prefill-0-dp0", "prefill-0-dp1"]
        ids = [engine.coordinates.engine_id for engine in rig.app.pool.prefill if engine.coordinates]
        assert len(set(ids)) == 2
        for number in range(8):
            response = await rig.post(prompt=f"prompt {number}", max_tokens=4)
            assert response.json()["choices"][0]["text"] == expected_text(f"prompt {number}", 4)
        await rig.quiet()
        ranks = [seen.headers.get("x-data-parallel-rank") for seen in rig.p.requests[2:]]
        assert sorted(ranks, key=str) == ["0"] * 4 + ["1"] * 4
        assert all("x-data-parallel-rank" not in seen.headers for seen in rig.d.requests)
