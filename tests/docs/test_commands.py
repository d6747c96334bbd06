"""Every command in README.md and docs/ is run as it is written; only addresses and the model's name are replaced.

A block that nothing here knows how to run fails its test: who writes a command says how it is tested. The ones that
need real engines are run in tests/engines/test_readme.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import yaml

from tests.discovery.emulator import emulated
from tests.discovery.scene import Engines, Pods
from tests.discovery.test_dns import DNSMASQ, name_server
from tests.docs.pages import ROOT, every_block
from tests.proxy.test_change import TOKEN, administered
from tests.proxy.test_commands import free_port, until_ready
from trio_pdproxy.sim import Cluster, open_cluster
from trio_pdproxy.testing import until

WITH_REAL_ENGINES = ("trio-pdproxy engines install", "VLLM_NIXL_SIDE_CHANNEL_HOST=")


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")}
    return clean | {"PATH": path} | more


async def shell(text: str, cwd: Path = ROOT, **env: str) -> str:
    """Run to its end, which must be exit code 0; what it printed."""
    with trio.fail_after(90):
        done = await trio.run_process(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=cwd,
            env=environment(**env),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    assert done.returncode == 0, f"{text}\n{done.stdout.decode()}\n{done.stderr.decode()}"
    return done.stdout.decode()


@asynccontextmanager
async def background(text: str, **env: str) -> AsyncIterator[trio.Process]:
    """Running until the block ends; then SIGTERM, and it has to go."""
    process = await trio.lowlevel.open_process(
        ["bash", "-euc", text], env=environment(**env), cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        with trio.move_on_after(20, shield=True) as waited:
            await process.wait()
        if waited.cancelled_caught:
            os.killpg(process.pid, signal.SIGKILL)


def put(text: str, cluster: Cluster, port: int) -> str:
    """The block with this machine's addresses in it."""
    p, d = cluster.prefill[0], cluster.decode[0]
    for engine, url in ((p, "http://10.0.0.1:8100"), (d, "http://10.0.0.2:8200")):
        assert url in text
        text = text.replace(url, f"'{engine.url};side_channel={engine.side_channel}'")
    return text.replace("0.0.0.0:8000", f"127.0.0.1:{port}")


# -- how each is run -----------------------------------------------------------------------------


async def demo(text: str, tmp_path: Path) -> None:
    install, command = text.split(" && ")
    assert install == "pip install -e ."  # what .ci/run does first, in an environment of its own
    assert "answer" in await shell(f"{command} --once --bind 127.0.0.1:0")


async def the_tests(text: str, tmp_path: Path) -> None:
    install, command = text.split(" && ")
    assert install.removesuffix("]'") in (ROOT / ".ci/run").read_text().replace("--quiet ", "")
    assert command == "pytest"
    await shell(f"{command} -q tests/unit/test_errors.py")


async def serve_and_ask(text: str, tmp_path: Path) -> None:
    asks = next(other for _, other in every_block("sh") if other.startswith("curl --retry"))
    async with open_cluster() as cluster:
        port = free_port()
        async with background(put(text, cluster, port), PDPROXY_BIND=f"127.0.0.1:{port}") as process:
            asked = await shell(asks.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("MODEL", "sim"))
            assert '"ready":true' in asked
            assert '"text":' in asked
        assert process.returncode == 0


async def asked_elsewhere(text: str, tmp_path: Path) -> None:
    """Run by `serve_and_ask`, against what the block before it has started."""


async def hypercorn(text: str, tmp_path: Path) -> None:
    async with open_cluster() as cluster:
        port = free_port()
        async with background(put(text, cluster, port)):
            await until_ready(f"http://127.0.0.1:{port}")


async def launch_and_check(text: str, tmp_path: Path) -> None:
    async with open_cluster() as cluster:
        printed = await shell(put(text, cluster, free_port()))
    assert "kv_producer" in printed
    assert "decode-0" in printed or str(cluster.decode[0].port) in printed


async def administer(text: str, tmp_path: Path) -> None:
    async with open_cluster(decode=2) as cluster, administered(cluster) as (rig, admin):
        new = cluster.decode[1]
        text = text.replace("127.0.0.1:9000", str(admin.base_url.netloc.decode()))
        text = text.replace("http://10.0.0.3:8200", f"{new.url};side_channel={new.side_channel}")
        text = text.replace("10.0.0.3:8200", f"{new.host}:{new.port}").replace("/d0/", "/decode-0/")
        for line in text.splitlines():
            printed = await shell(line, TOKEN=TOKEN)
            assert '"engines":[' in printed, printed
        await until(lambda: not any(engine.draining for engine in rig.app.pool.engines))
        assert [engine.name for engine in rig.app.pool.decode] == ["decode-0"]


async def look(text: str, tmp_path: Path) -> None:
    async with open_cluster() as cluster, administered(cluster) as (rig, _):
        printed = await shell(text.replace("127.0.0.1:8000", rig.url.removeprefix("http://")))
    assert '"ready":true' in printed
    assert "pdproxy_requests_total" in printed


async def render(text: str, tmp_path: Path) -> None:
    printed = await shell(text, cwd=tmp_path)
    assert len(list(yaml.safe_load_all(printed))) == len(list((tmp_path / "deploy").glob("*.yaml"))) - 1


async def outside_the_cluster(text: str, tmp_path: Path) -> None:
    """`kubectl proxy` in front of the emulated API, and the proxy in front of that."""
    if shutil.which("kubectl", path=environment()["PATH"]) is None:
        pytest.skip("there is no kubectl")
    forward, serve = text.splitlines()
    port, api_port = free_port(), free_port()
    with emulated() as api:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": api.url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}],
            "current-context": "c",
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        async with trio.open_nursery() as nursery:
            pods = Pods(api, Engines(nursery))
            await pods.start("p0", "prefill")
            await pods.start("d0", "decode")
            async with (
                background(forward.replace("8001", str(api_port)), KUBECONFIG=str(tmp_path / "config")),
                background(serve.replace("8001", str(api_port)), PDPROXY_BIND=f"127.0.0.1:{port}"),
            ):
                await until_ready(f"http://127.0.0.1:{port}")
                await pods.start("d1", "decode")
                await until(lambda: len(pods.engines.all["d1"].requests) > 0, 20)  # seen through the watch
            nursery.cancel_scope.cancel("the test is over")


async def serve_by_dns(text: str, tmp_path: Path) -> None:
    if DNSMASQ is None:
        pytest.skip("dnsmasq is not installed")
    port = free_port()
    async with trio.open_nursery() as nursery, name_server(tmp_path) as dns:
        engines = Engines(nursery)
        p = await engines.start("p0", "prefill")
        d = await engines.start("d0", "decode", port=8000, side_port=5600)
        await dns.serve(
            [
                f"host-record=p0.prefill.llm,{p.host}",
                f"srv-host=_http._tcp.prefill.llm,p0.prefill.llm,{p.port}",
                f"srv-host=_nixl._tcp.prefill.llm,p0.prefill.llm,{p.side_channel.rpartition(':')[2]}",
                f"host-record=decode.llm,{d.host}",
            ]
        )
        async with background(text, PDPROXY_DNS_SERVER=dns.address, PDPROXY_BIND=f"127.0.0.1:{port}"):
            await until_ready(f"http://127.0.0.1:{port}")
        nursery.cancel_scope.cancel("the test is over")


Run = Callable[[str, Path], Awaitable[None]]
HOW: dict[str, Run] = {
    "pip install -e . && trio-pdproxy demo": demo,
    "pip install -e '.[test]' && pytest": the_tests,
    "trio-pdproxy serve --prefill": serve_and_ask,
    "curl --retry": asked_elsewhere,
    "export PDPROXY_PREFILL": hypercorn,
    "trio-pdproxy launch": launch_and_check,
    'curl -H "authorization': administer,
    'curl -sS -H "authorization': administer,
    "curl -sS 127.0.0.1:8000/ready": look,
    "trio-pdproxy render k8s": render,
    "kubectl proxy": outside_the_cluster,
    "trio-pdproxy serve --discovery dns": serve_by_dns,
}
"""By a block's beginning."""


@pytest.mark.parametrize(("page", "text"), every_block("sh"))
async def test_commands(page: str, text: str, tmp_path: Path) -> None:
    if text.startswith(WITH_REAL_ENGINES):
        return
    ways = [run for beginning, run in HOW.items() if text.startswith(beginning)]
    assert ways, f"{page}: nothing here runs\n{text}"
    await ways[0](text, tmp_path)


@pytest.mark.parametrize(("page", "text"), every_block("python"))
async def test_programs(page: str, text: str, tmp_path: Path) -> None:
    async with open_cluster() as cluster:
        port = free_port()
        text = put(text.replace('"http://10', 'r"http://10'), cluster, port).replace("'", "").replace("8000", str(port))
        (tmp_path / "program.py").write_text(text.replace('r"', '"'))
        async with background(f"exec python {tmp_path}/program.py"):
            await until_ready(f"http://127.0.0.1:{port}")


def test_every_way_is_used() -> None:
    texts = [text for _, text in every_block("sh")]
    for beginning in HOW:
        assert any(text.startswith(beginning) for text in texts), beginning
