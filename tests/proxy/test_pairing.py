"""Which engines are paired, which are refused, and what is said about it."""

from __future__ import annotations

from trio_pdproxy.sim import SimSettings, open_cluster
from trio_pdproxy.testing import until
from trio_pdproxy.testing.rig import open_rig_on


async def test_engines_that_cannot_pair_are_refused_with_what_can_be_compared() -> None:
    async with (
        open_cluster(settings=SimSettings(), decode_settings=SimSettings(version="0.33.0", block_size=32)) as cluster,
        open_rig_on(cluster, ready=False) as rig,
    ):
        await until(lambda: all(engine.usable for engine in rig.app.pool.engines))
        response = await rig.post()
        assert response.status_code == 503
        message = response.json()["error"]["message"]
        for words in (
            "prefill-0",
            "decode-0",
            "0.32.0",
            "0.33.0",
            "block size 16",
            "block size 32",
            "same vLLM version",
        ):
            assert words in message
        assert (await rig.client.get("/ready")).json()["missing"] == [message]
        assert rig.p.requests == [] or all(seen.transfer for seen in rig.p.requests)
        assert rig.d.requests == []


async def test_explicit_coordinates_need_no_probe() -> None:
    async with open_cluster() as cluster:
        p = cluster.prefill[0]
        async with open_rig_on(cluster, prefill_spec={"engine_id": p.engine_id, "tp_size": 1, "pp_size": 1}) as rig:
            assert p.requests == []
            assert (await rig.post()).status_code == 200


async def test_a_side_channel_of_another_engine_is_noticed() -> None:
    async with open_cluster(prefill=2) as cluster:
        first, second = cluster.prefill
        wrong = {"side_channel": second.side_channel}
        async with open_rig_on(cluster, prefill_spec=wrong, prefill=1, ready=False) as rig:
            await until(lambda: "another engine" in rig.app.pool.prefill[0].why)
            assert first.engine_id in rig.app.pool.prefill[0].why
            assert second.engine_id in rig.app.pool.prefill[0].why


async def test_what_is_no_nixl_engine_is_named() -> None:
    async with open_cluster() as cluster:
        d = cluster.decode[0]
        # A server that answers, but whose side channel nobody listens on.
        async with open_rig_on(
            cluster, prefill_spec={"side_channel": "127.0.0.1:9"}, ready=False, health_timeout=0.2
        ) as rig:
            await until(lambda: "side channel" in rig.app.pool.prefill[0].why)
            assert d.requests == []


async def test_an_engine_whose_id_changes_is_asked_again_before_it_is_used() -> None:
    async with open_cluster() as cluster, open_rig_on(cluster, health_interval=0.2, health_timeout=0.2) as rig:
        old = rig.app.pool.prefill[0].coordinates
        await rig.p.restart()
        await until(lambda: rig.app.pool.prefill[0].coordinates not in (old, None), 10)
        for _ in range(5):
            assert (await rig.post()).status_code == 200
        await rig.quiet()
