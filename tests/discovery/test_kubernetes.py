"""Engines found in a Kubernetes cluster, under load, against an emulated API."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio
import trustme

from tests.discovery.emulator import Emulator, emulated
from tests.discovery.scene import Engines, Pods, load, pod, proxied, until_usable, while_loaded
from trio_pdproxy.config import Role, Settings
from trio_pdproxy.engines.discovery import kubernetes
from trio_pdproxy.engines.discovery.api import Api
from trio_pdproxy.engines.discovery.kubernetes import KubernetesSource
from trio_pdproxy.engines.discovery.source import Found
from trio_pdproxy.testing import until
from trio_pdproxy.web.app import ProxyApp


@asynccontextmanager
async def cluster(api: Emulator, **settings: object) -> AsyncIterator[tuple[Pods, ProxyApp, httpx.AsyncClient]]:
    async with trio.open_nursery() as nursery:
        pods = Pods(api, Engines(nursery))
        async with proxied(discovery="kubernetes", kubernetes_api=api.url, kubernetes_namespace="llm", **settings) as (
            app,
            client,
        ):
            yield pods, app, client
        nursery.cancel_scope.cancel("the test is over")


async def replace(pods: Pods, app: ProxyApp, old: str, new: str, role: Role) -> None:
    """As a rolling update does: the new one is ready before the old one is deleted."""
    await pods.start(new, role)
    await until(lambda: any(e.name == new and e.usable for e in app.pool.engines) and not app.pool.roster.cold, 10)
    await pods.retire(old)


async def test_pods_come_go_and_are_replaced_under_load_and_no_request_fails() -> None:
    with emulated() as api:
        async with cluster(api) as (pods, app, client):
            assert (await client.get("/ready")).status_code == 503
            await pods.start("p0", "prefill")
            await pods.start("d0", "decode")
            await until_usable(app, "p0", "d0")
            async with load(client) as seen:
                await while_loaded(seen)
                await pods.start("d1", "decode", ready=False)
                await trio.sleep(0.3)
                assert len(app.pool.engines) == 2  # not ready yet
                await pods.set("d1", ready=True)
                await until_usable(app, "p0", "d0", "d1")
                await pods.set("d0", ready=False)
                await until_usable(app, "p0", "d1")
                await pods.set("d0", ready=True)
                await until_usable(app, "p0", "d0", "d1")
                await replace(pods, app, "d0", "d2", "decode")
                await while_loaded(seen)
                await replace(pods, app, "p0", "p1", "prefill")
                await while_loaded(seen)
                await replace(pods, app, "d1", "d3", "decode")
                await while_loaded(seen)
                await until_usable(app, "p1", "d2", "d3")
            assert seen.failures == []
            assert seen.served > 100
            status = (await client.get("/status")).json()
            assert status["discovery"] == [{"source": "kubernetes", "known": True, "engines": 3, "trouble": None}]


async def test_an_outage_of_the_api_empties_nothing_and_what_changed_meanwhile_is_seen_after_it() -> None:
    with emulated() as api:
        async with cluster(api) as (pods, app, client):
            await pods.start("p0", "prefill")
            await pods.start("d0", "decode")
            await until_usable(app, "p0", "d0")
            async with load(client) as seen:
                api.api.down = True
                await api.cut_watches()
                await until(lambda: app.followers[0].source.trouble)
                asked = len(api.api.seen)
                await until(lambda: len(api.api.seen) > asked + 4, 10)
                assert "503" in str((await client.get("/status")).json()["discovery"][0]["trouble"])
                await while_loaded(seen)
                await pods.start("d1", "decode")
                await api.forget()  # an API server that comes back after an hour: 410
                api.api.down = False
                await until_usable(app, "p0", "d0", "d1")
                assert app.followers[0].source.trouble is None
                await while_loaded(seen)
            assert seen.failures == []


async def test_watches_that_end_break_or_are_refused_are_taken_up_again() -> None:
    with emulated() as api:
        async with cluster(api) as (pods, app, _):
            await pods.start("p0", "prefill")
            await pods.start("d0", "decode")
            await until_usable(app, "p0", "d0")
            lists = api.api.seen.count("LIST")
            for number, disturb in enumerate((api.end_watches, api.cut_watches, api.end_watches), 1):
                await disturb()
                await pods.start(f"d{number}", "decode")
                await until_usable(app, "p0", *(f"d{n}" for n in range(number + 1)))
            assert api.api.seen.count("LIST") == lists  # taken up where they ended
            await api.forget()
            await api.end_watches()
            await pods.start("d4", "decode")
            await until_usable(app, "p0", *(f"d{n}" for n in range(5)))
            assert api.api.seen.count("LIST") > lists


async def test_what_was_told_is_not_told_again_after_a_break() -> None:
    """A pod that has been unready long ago must not be drained once more because a connection broke."""
    told: list[list[Found]] = []
    with emulated() as api:
        settings = Settings(
            discovery="kubernetes", kubernetes_api=api.url, kubernetes_namespace="llm", discovery_interval=0.2
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(KubernetesSource(settings).watch, lambda found: told.append(list(found)))
            await until(lambda: api.api.seen.count("WATCH") == 2)
            steady, shaky = pod("d0", "decode", "127.0.9.1"), pod("d1", "decode", "127.0.9.2")
            for status in ("True", "False", "True"):
                shaky["status"]["conditions"] = [{"type": "Ready", "status": status}]
                await api.put(shaky)
            await until(lambda: len(told) >= 5)  # two lists, three events
            before = len(told)
            await api.cut_watches()
            await until(lambda: api.api.seen.count("WATCH") == 4)
            await api.put(steady)
            await until(lambda: len(told[-1]) == 2)
            assert all(found.ready for news in told[before:] for found in news)
            nursery.cancel_scope.cancel()


async def test_pods_that_are_all_called_unready_stay_in_use_while_they_answer() -> None:
    with emulated() as api:
        async with cluster(api) as (pods, app, client):
            await pods.start("p0", "prefill")
            for name in ("d0", "d1"):
                await pods.start(name, "decode")
            await until_usable(app, "p0", "d0", "d1")
            async with load(client) as seen:
                await pods.set("d0", ready=False)
                await until_usable(app, "p0", "d1")
                await pods.set("d1", ready=False)
                await trio.sleep(0.3)
                await while_loaded(seen)
                assert "d1" in {engine.name for engine in app.pool.engines}
            assert seen.failures == []


async def test_engines_are_paired_within_their_revision() -> None:
    with emulated() as api:
        async with cluster(api) as (pods, app, client):
            for revision in ("blue", "green"):
                await pods.start(f"p-{revision}", "prefill", labels={"trio-pdproxy/revision": revision})
                await pods.start(f"d-{revision}", "decode", labels={"trio-pdproxy/revision": revision})
            await until_usable(app, "p-blue", "d-blue", "p-green", "d-green")
            pairs = {(p.name, d.name) for p, partners in app.pool.roster.pairs.items() for d in partners}
            assert pairs == {("p-blue", "d-blue"), ("p-green", "d-green")}
            async with load(client) as seen:
                await while_loaded(seen)
                await pods.retire("d-blue")
                await pods.retire("p-blue")
                await while_loaded(seen)
            assert seen.failures == []
            await pods.retire("d-green")
            await pods.start("d-blue2", "decode", labels={"trio-pdproxy/revision": "blue"})
            await until_usable(app, "p-green", "d-blue2")
            assert "revision" in (await client.get("/ready")).json()["missing"][0]


async def test_credentials_are_read_again_and_never_sent_in_the_clear(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("llm")
    told: list[list[Found]] = []
    with emulated(token="first", tls=context) as api:
        settings = Settings(
            discovery="kubernetes",
            kubernetes_api=api.url,
            kubernetes_credentials=tmp_path,
            discovery_interval=0.2,
        )
        source = KubernetesSource(settings)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.watch, lambda found: told.append(list(found)))
            await api.put(pod("p0", "prefill", "127.0.9.1"))
            await until(lambda: told and len(told[-1]) == 1)
            api.api.token = "second"
            await api.end_watches()
            await until(lambda: source.trouble)
            assert "401" in str(source.trouble)
            (tmp_path / "token").write_text("second\n")
            await api.put(pod("d0", "decode", "127.0.9.2"))
            await until(lambda: len(told[-1]) == 2)
            await until(lambda: source.trouble is None)
            # Another authority: the API cannot be trusted, nothing is told.
            trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.crt"))
            before = len(told)
            await api.end_watches()
            await until(lambda: "certificate" in str(source.trouble).lower())
            assert len(told) == before
            nursery.cancel_scope.cancel()
    assert "first" not in caplog.text
    assert "second" not in caplog.text
    with emulated(token="second") as api:
        clear = Settings(discovery="kubernetes", kubernetes_api=api.url, kubernetes_credentials=tmp_path)
        source = KubernetesSource(clear)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.watch, lambda found: told.append(list(found)))
            await until(lambda: "401" in str(source.trouble))
            nursery.cancel_scope.cancel()


async def test_long_lists_come_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PAGE", 2)
    with emulated() as api:
        for number in range(5):
            await api.put(pod(f"d{number}", "decode", f"127.0.9.{number + 1}"))
        await api.put(pod("other", "prefill", "127.0.9.9", {"llm-d.ai/role": "something"}))
        told: list[list[Found]] = []
        settings = Settings(discovery="kubernetes", kubernetes_api=api.url, kubernetes_namespace="llm")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(KubernetesSource(settings).watch, lambda found: told.append(list(found)))
            await until(lambda: told and len(told[-1]) == 5)
            nursery.cancel_scope.cancel()


async def test_outside_a_cluster_it_says_what_to_set() -> None:
    settings = Settings(discovery="kubernetes")
    source = KubernetesSource(settings, Api(settings, environ={}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(source.watch, lambda found: None)
        await until(lambda: source.trouble)
        nursery.cancel_scope.cancel()
    assert "kubernetes_namespace" in str(source.trouble)
