"""What leaves a serving proxy: timelines on the listeners they belong on, and the sums over several workers."""

from __future__ import annotations

import json
import socket
import subprocess
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from trio_pdproxy.config import Settings
from trio_pdproxy.core.errors import ProxyError
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.sim import SimSettings, open_cluster
from trio_pdproxy.testing.rig import open_rig
from trio_pdproxy.web.siblings import Siblings, find_siblings

from .test_commands import COMMAND, HYPERCORN, complete, environment, free_port, running, until_ready

PROMPT = "a prompt that must stay here"


async def test_timelines_are_not_public_unless_asked_for() -> None:
    async with open_rig() as rig:
        await rig.post(prompt=PROMPT)
        response = await rig.client.get("/timelines")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"


async def test_exposed_timelines_tell_both_legs_and_no_prompt() -> None:
    async with open_rig(expose_timelines=True, timelines=3) as rig:
        for number in range(5):
            await rig.stream(prompt=f"{PROMPT} {number}", max_tokens=4)
        await rig.quiet()
        response = await rig.client.get("/timelines")
        lines = response.json()["timelines"]
        assert len(lines) == 3, "as many as the setting says"
        assert all(line["outcome"] == "ok" and line["tries"][0]["prompt_tokens"] for line in lines)
        assert "must stay" not in response.text
        for asked, there in ((1, 1), (2, 2), (9, 3), (0, 3), (-1, 3)):
            assert len((await rig.client.get(f"/timelines?last={asked}")).json()["timelines"]) == there
        first = lines[0]["tries"][0]
        assert first["prefill"]["sent"] < first["decode"]["sent"] < first["decode"]["first"] < first["decode"]["end"]


async def test_the_admin_listener_always_has_them() -> None:
    bind = f"127.0.0.1:{free_port()}"
    async with open_rig(admin_bind=bind, admin_token="sesame") as rig:
        await rig.post()
        await rig.quiet()
        async with open_client(f"http://{bind}", timeout=5) as admin:
            assert (await admin.get("/timelines")).status_code == 401
            response = await admin.get("/timelines", headers={"authorization": "Bearer sesame"})
            assert response.status_code == 200
            assert len(response.json()["timelines"]) == 1


async def test_serial_legs_are_sent_one_after_the_other_and_are_served_the_same() -> None:
    async with open_rig(legs="serial", sim=SimSettings(prefill_base=0.05)) as rig:
        answered = await rig.stream(prompt="hello", max_tokens=5)
        assert answered.status == 200
        assert answered.complete
        await rig.quiet()
        (tried,) = rig.report.dispatches
        assert tried.prefill is not None
        assert tried.prefill.end is not None
        assert tried.decode.sent is not None
        assert tried.decode.sent > tried.prefill.end
        assert tried.gap is not None
        assert tried.gap >= 0.05
    async with open_rig() as rig:
        assert (await rig.stream(prompt="hello", max_tokens=5)).text == answered.text


# -- several workers -----------------------------------------------------------------------------


def counted(text: str, name: str) -> float:
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


async def test_two_hypercorn_workers_tell_one_sum_whoever_is_asked() -> None:
    async with open_cluster() as cluster:
        bind = f"127.0.0.1:{free_port()}"
        url = f"http://{bind}"
        env = environment(cluster) | {"PDPROXY_EXPOSE_TIMELINES": "true"}
        async with running([*HYPERCORN, "--workers", "2", "--bind", bind], env):
            await until_ready(url)
            with trio.fail_after(30):
                while (await get(url, "/status")).json()["workers"] != 2:  # noqa: ASYNC110  another process's state
                    await trio.sleep(0.05)
            pids: set[int] = set()
            for number in range(200):
                if number >= 24 and len(pids) == 2:
                    break
                pids.add((await get(url, "/status")).json()["pid"])
            assert len(pids) == 2, "both are asked"
            served = 0
            for number in range(20):
                status, _ = await complete(url, f"prompt {number}", max_tokens=2)
                served += status == 200
            assert served >= 10  # one that has not looked at its engines yet says 503
            for _ in range(6):  # whichever is asked
                text = (await get(url, "/metrics")).text
                assert counted(text, "pdproxy_requests_total") == 20
                assert counted(text, "pdproxy_decode_start_gap_seconds_count") == served
                assert counted(text, "pdproxy_ready") == 1
                assert counted(text, "pdproxy_engine_up") == 2
                assert len((await get(url, "/timelines")).json()["timelines"]) == 20


async def get(url: str, path: str) -> httpx.Response:
    async with open_client(url, timeout=10) as client:  # a connection of its own: any worker may take it
        return await client.get(path)


async def test_a_worker_that_is_gone_is_forgotten_and_one_that_is_silent_fails_the_scrape(tmp_path: Path) -> None:
    siblings = Siblings(tmp_path, {"metrics": lambda: b"mine"}, name="3")
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "1.sock"))  # bound and never listened to: as after a kill
    async with trio.open_nursery() as nursery:
        await nursery.start(siblings.run)
        assert await siblings.ask("metrics") == [b"mine"]
        assert not (tmp_path / "1.sock").exists()
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(tmp_path / "2.sock"))
            silent.listen()
            with pytest.raises(ProxyError, match="does not answer") as caught:
                await siblings.ask("metrics")
            assert caught.value.status == 503
        nursery.cancel_scope.cancel()
    assert not (tmp_path / "3.sock").exists()


async def test_siblings_answer_each_other(tmp_path: Path) -> None:
    """Two in one process stand for two processes."""
    one, two = (Siblings(tmp_path, {"x": partial(str.encode, name)}, name=name) for name in "12")
    async with trio.open_nursery() as nursery:
        await nursery.start(one.run)
        await nursery.start(two.run)
        assert await one.ask("x") == [b"1", b"2"]
        assert await two.ask("x") == [b"2", b"1"]
        assert one.count == 2
        nursery.cancel_scope.cancel()


def test_a_process_of_its_own_has_no_siblings() -> None:
    assert find_siblings(Settings(prefill=["http://p"], decode=["http://d"]), {}) is None


# -- trace ---------------------------------------------------------------------------------------


async def test_trace_writes_both_pictures(tmp_path: Path) -> None:
    async with open_rig(expose_timelines=True) as rig:
        for _ in range(3):
            await rig.stream(max_tokens=3)
        await rig.quiet()
        done = await command("trace", rig.url, "-o", str(tmp_path / "t"), "--raw")
        assert done.returncode == 0, done.stderr
        assert "3 exchanges" in done.stdout.decode()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert b"<!doctype html>" in (tmp_path / "t.html").read_bytes()
    again = await command("trace", str(tmp_path / "t.timelines.json"), "-o", str(tmp_path / "u"), "--last", "2")
    assert "2 exchanges" in again.stdout.decode()


async def test_trace_says_what_to_do_where_timelines_are_not_shown(tmp_path: Path) -> None:
    async with open_rig() as rig:
        done = await command("trace", rig.url, "-o", str(tmp_path / "t"))
    assert done.returncode == 1
    assert "admin_bind" in done.stderr.decode()
    nobody = await command("trace", f"http://127.0.0.1:{free_port()}")
    assert nobody.returncode == 1
    assert "does not answer" in nobody.stderr.decode()


async def command(*args: str) -> subprocess.CompletedProcess[bytes]:
    return await trio.run_process([*COMMAND, *args], capture_stdout=True, capture_stderr=True, check=False)
