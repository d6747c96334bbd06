"""Two proxies in front of the same engines, which are replaced one by one."""

from __future__ import annotations

import trio

from tests.discovery.emulator import emulated
from tests.discovery.scene import Engines, Pods, load, proxied, until_usable, while_loaded
from trio_pdproxy.sim import SimSettings
from trio_pdproxy.testing import until


async def test_eight_engines_are_replaced_one_by_one_behind_two_proxies_and_no_request_fails() -> None:
    with emulated() as api:
        async with trio.open_nursery() as nursery:
            pods = Pods(api, Engines(nursery))
            where = {"discovery": "kubernetes", "kubernetes_api": api.url, "kubernetes_namespace": "llm"}
            async with proxied(**where) as (one, client_one), proxied(**where) as (two, client_two):
                names = []
                for number in range(4):
                    await pods.start(f"p{number}", "prefill")
                    await pods.start(f"d{number}", "decode")
                    names += [f"p{number}", f"d{number}"]
                for app in (one, two):
                    await until_usable(app, *names, seconds=30)
                async with load(client_one, client_two, each=2) as seen:
                    for name in tuple(names):
                        new = f"{name}-next"
                        await pods.start(new, "prefill" if name.startswith("p") else "decode")
                        names = [*(n for n in names if n != name), new]
                        for app in (one, two):
                            await until_usable(app, *names, name, seconds=30)
                        await pods.retire(name)
                        await while_loaded(seen)
                    for app in (one, two):
                        await until_usable(app, *names, seconds=30)
                assert seen.failures == []
                assert all(not app.pool.waiting for app in (one, two))
                engines = pods.engines.all.values()
                await until(lambda: not any(e.blocks_held for e in engines if e.role == "decode"))
                for app in (one, two):
                    assert sum(engine.stranded for engine in app.pool.engines) == 0
            nursery.cancel_scope.cancel()


async def test_proxies_agree_on_affinity_without_talking() -> None:
    """The same prefix goes to the same prefill engine, whichever proxy it came through; caps are each proxy's own."""
    with emulated() as api:
        async with trio.open_nursery() as nursery:
            pods = Pods(api, Engines(nursery, SimSettings()))
            where = {
                "discovery": "kubernetes",
                "kubernetes_api": api.url,
                "kubernetes_namespace": "llm",
                "prefill_policy": "prefix_affinity",
                "warm_up": False,
            }
            names = [f"p{number}" for number in range(4)] + ["d0"]
            async with proxied(**where) as (one, client_one):
                for name in names:
                    await pods.start(name, "prefill" if name.startswith("p") else "decode")
                await until_usable(one, *names)
                # The second starts later and lists them in another order.
                async with proxied(**where) as (two, client_two):
                    await until_usable(two, *names)
                    chosen: dict[str, set[str]] = {}
                    for number in range(24):
                        prompt = f"{number} is the beginning of a prompt"
                        for client in (client_one, client_two):
                            before = {name: len(pods.engines.all[name].requests) for name in names[:4]}
                            answer = await client.post("/v1/completions", json={"model": "sim", "prompt": prompt})
                            assert answer.status_code == 200
                            chosen.setdefault(prompt, set()).update(
                                name
                                for name in names[:4]
                                if len(pods.engines.all[name].requests) > before[name]
                                and pods.engines.all[name].requests[-1].path == "/v1/completions"
                            )
                    assert all(len(engines) == 1 for engines in chosen.values()), chosen
                    assert len(set().union(*chosen.values())) == 4  # and all of them have their share
            nursery.cancel_scope.cancel()


async def test_caps_are_each_proxys_own_so_an_engine_gets_their_sum() -> None:
    with emulated() as api:
        async with trio.open_nursery() as nursery:
            pods = Pods(api, Engines(nursery, SimSettings(prefill_base=0.02, itl=0.01)))
            where = {
                "discovery": "kubernetes",
                "kubernetes_api": api.url,
                "kubernetes_namespace": "llm",
                "decode_max_inflight": 2,
                "warm_up": False,
            }
            async with proxied(**where) as (one, client_one), proxied(**where) as (two, client_two):
                await pods.start("p0", "prefill")
                d = await pods.start("d0", "decode")
                for app in (one, two):
                    await until_usable(app, "p0", "d0")
                most = 0
                async with load(client_one, client_two, each=6) as seen:
                    while seen.served < 60:
                        most = max(most, d.running + d.waiting)
                        await trio.sleep(0.002)
                assert seen.failures == []
                assert 2 < most <= 4
            nursery.cancel_scope.cancel()
