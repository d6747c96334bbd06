"""Changing the engines while serving: by the admin paths, and by editing the file."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio
import yaml

from tests.proxy.test_commands import free_port
from trio_pdproxy.config import load_settings
from trio_pdproxy.core.reach import NotAllowedError, check_host
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.serve import serving
from trio_pdproxy.sim import Cluster, SimSettings, open_cluster
from trio_pdproxy.testing import Rig, until
from trio_pdproxy.testing.rig import open_rig_on
from trio_pdproxy.web.app import create_app

TOKEN = "a-long-admin-token"


@asynccontextmanager
async def administered(cluster: Cluster, **settings: object) -> AsyncIterator[tuple[Rig, httpx.AsyncClient]]:
    """A rig in front of the cluster's first decode engine, and a client of its admin paths with the right token."""
    bind = f"127.0.0.1:{free_port()}"
    more = {"admin_bind": bind, "admin_token": TOKEN, "admin_allow": "127.0.0.0/8", "decode": 1} | settings
    async with (
        open_rig_on(cluster, **more) as rig,  # type: ignore[arg-type]
        open_client(f"http://{bind}", timeout=10, headers={"authorization": f"Bearer {TOKEN}"}) as client,
    ):
        yield rig, client


async def test_an_engine_is_added_drained_and_removed_while_serving() -> None:
    async with (
        open_cluster(decode=2, settings=SimSettings(prefill_base=0.2)) as cluster,
        administered(cluster) as (rig, admin),
    ):
        new = cluster.decode[1]
        added = await admin.post(
            "/engines", json={"role": "decode", "engine": f"{new.url};side_channel={new.side_channel};name=new"}
        )
        assert added.status_code == 201, added.text
        await until(lambda: all(engine.usable for engine in rig.app.pool.engines))
        assert {engine["name"] for engine in (await admin.get("/engines")).json()["engines"]} == {
            "prefill-0",
            "decode-0",
            "new",
        }
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await rig.post()).status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)
            await until(lambda: cluster.decode[0].waiting)
            assert (await admin.post("/engines/decode-0/drain")).status_code == 200
            resumed = await admin.post("/engines/decode-0/resume")
            assert resumed.json()["engines"][0]["draining"] is False
            assert (await admin.post("/engines/nobody/resume")).status_code == 404
            removed = await admin.delete("/engines/decode-0")
            assert removed.status_code == 202
            assert removed.json()["engines"][0]["draining"] is True
        assert statuses == [200] * 8
        await until(lambda: len(rig.app.pool.decode) == 1)
        seen = len(cluster.decode[0].requests)
        assert (await rig.post()).status_code == 200
        assert len(cluster.decode[0].requests) == seen
        assert (await admin.delete("/engines/decode-0")).status_code == 404


async def test_draining_waits_for_debts_too() -> None:
    async with open_cluster(settings=SimSettings(prefill_base=0.5)) as cluster, administered(cluster) as (rig, admin):
        with trio.move_on_after(0.1):
            await rig.post(prompt="x" * 100)
        assert (await admin.delete("/engines/decode-0")).status_code == 202
        await trio.sleep(0.05)
        assert len(rig.app.pool.decode) == 1
        assert rig.app.pool.decode[0].debts == 1
        await until(lambda: not rig.app.pool.decode)
        assert cluster.decode[0].blocks_held == 0


async def test_the_admin_paths_want_their_token_and_are_not_on_the_clients_listener() -> None:
    async with open_cluster() as cluster, administered(cluster) as (rig, admin):
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": TOKEN},
            {"authorization": f"Bearer {TOKEN} "},
        ):
            async with httpx.AsyncClient(base_url=str(admin.base_url), headers=headers) as client:
                if headers.get("authorization", "").rstrip() == f"Bearer {TOKEN}":
                    continue  # the space at the end is no part of a header's value
                for method, path in (("GET", "/engines"), ("POST", "/engines"), ("DELETE", "/engines/decode-0")):
                    assert (await client.request(method, path)).status_code == 401
        assert (await rig.client.get("/engines")).status_code == 404
        assert (await rig.client.request("DELETE", "/engines/decode-0")).status_code == 404


@pytest.mark.parametrize(
    ("engine", "status"),
    [
        ("http://169.254.169.254", 403),
        ("http://[::ffff:169.254.169.254]", 403),
        ("http://[fe80::1]", 403),
        ("http://[64:ff9b::a9fe:a9fe]", 403),
        ("http://localhost:8000", 403),
        ("http://0.0.0.0:80", 403),
        ("http://192.0.2.1:8000", 403),
        ("http://127.0.0.1:8000;side_channel=169.254.169.254:80", 403),
        ("ftp://127.0.0.1", 400),
        ("file:///etc/passwd", 400),
        ("http://user:secret@127.0.0.1:8000", 400),
        ("http://no-such-host.invalid:8000", 400),
        ("nonsense", 400),
    ],
)
async def test_no_engine_is_added_where_none_may_be(engine: str, status: int) -> None:
    async with open_cluster() as cluster, administered(cluster) as (rig, admin):
        response = await admin.post("/engines", json={"role": "decode", "engine": engine})
        assert response.status_code == status, response.text
        assert "secret" not in response.text
        assert len(rig.app.pool.engines) == 2


async def test_nothing_may_be_added_unless_a_list_says_where() -> None:
    async with open_cluster() as cluster, administered(cluster, admin_allow="") as (_, admin):
        response = await admin.post("/engines", json={"role": "decode", "engine": "http://127.0.0.1:9"})
        assert response.status_code == 403
        assert "admin_allow" in response.json()["error"]["message"]


async def test_a_bad_or_double_addition_is_refused() -> None:
    async with open_cluster() as cluster, administered(cluster) as (_, admin):
        d = cluster.decode[0]
        for body, status in (
            ({"role": "decode", "engine": f"{d.url};name=other"}, 409),
            ({"role": "decode", "engine": "http://127.0.0.1:9;name=decode-0"}, 409),
            ({"role": "router", "engine": "http://127.0.0.1:9"}, 400),
            ({"role": "decode"}, 400),
            ({"role": "decode", "engine": "http://127.0.0.1:9", "more": 1}, 400),
            ([], 400),
        ):
            assert (await admin.post("/engines", json=body)).status_code == status, body


def test_names_and_networks_are_allowed_as_listed() -> None:
    check_host("d1.pods.example", ["10.1.2.3"], ["*.pods.example"])
    check_host("d1", ["10.1.2.3"], ["d1"])
    check_host("10.1.2.3", ["10.1.2.3"], ["10.0.0.0/8"])
    check_host("fd00::1", ["fd00::1"], ["10.0.0.0/8", "fd00::/8"])
    check_host("64:ff9b::a01:203", ["64:ff9b::a01:203"], ["10.0.0.0/8"])
    for host, resolved, allowed in (
        ("pods.example.evil", ["10.1.2.3"], ["*.pods.example"]),
        ("d1", ["10.1.2.3", "192.0.2.1"], ["10.0.0.0/8"]),
        ("d1", ["10.1.2.3"], ["10.0.0.0/8"]),  # tomorrow it may stand for another place
        ("64:ff9b::a9fe:a9fe", ["64:ff9b::a9fe:a9fe"], ["::/0"]),
        ("2002:a9fe:a9fe::", ["2002:a9fe:a9fe::"], ["::/0"]),
        ("d1.pods.example", ["169.254.169.254"], ["*.pods.example"]),
        ("10.1.2.3", ["10.1.2.3"], ["10.1.2.4"]),
        ("d1", [], []),
    ):
        with pytest.raises(NotAllowedError):
            check_host(host, resolved, allowed)


def written(path: Path, cluster: Cluster, decode: int, **more: object) -> None:
    """The file as an editor replaces it: whole, by a rename."""
    p = cluster.prefill[0]
    content = {
        "prefill": [{"url": p.url, "side_channel": p.side_channel}],
        "decode": [{"url": d.url, "side_channel": d.side_channel, "name": d.name} for d in cluster.decode[:decode]],
        "bind": "127.0.0.1:0",
    } | more
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(content))
    os.replace(new, path)


async def test_an_edit_of_the_file_is_applied_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "proxy.yaml"
    async with open_cluster(decode=3) as cluster:
        written(path, cluster, 1)
        load = partial(load_settings, file=path, environ={})
        settings = load()
        app = create_app(settings, watched=(path, load))
        async with serving(app, settings) as url, open_client(url, timeout=10) as client:
            await until(lambda: not app.missing())
            written(path, cluster, 3)
            await until(lambda: sum(engine.usable for engine in app.pool.decode) == 3)
            path.write_text("decode: [\n")
            await until(lambda: "is not used" in caplog.text)
            assert len(app.pool.decode) == 3
            written(path, cluster, 2, idle_timeout=11)
            await until(lambda: len(app.pool.decode) == 2)
            await until(lambda: "idle_timeout" in caplog.text)
            path.unlink()
            await trio.sleep(1.2)
            assert len(app.pool.decode) == 2
            response = await client.post("/v1/completions", json={"model": "sim", "prompt": "x"})
            assert response.status_code == 200
