"""The newcomer's path in README.md, run as it is written, on real engines.

`vllm serve` is a script here that starts vLLM as it needs to be started on a CPU (and by its module: the small
environment has no `vllm` command); its arguments and its environment are the page's.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.docs.pages import ROOT, blocks
from tests.docs.test_commands import environment, shell
from tests.proxy.test_commands import free_port
from trio_pdproxy.launch import Script, presets
from trio_pdproxy.launch.environment import EngineEnvironment, ensure_environment
from trio_pdproxy.launch.model import ensure_model

pytestmark = pytest.mark.timeout(600)

WAIT = 300


def block(beginning: str) -> str:
    (found,) = [text for text in blocks("README.md", "sh") if text.startswith(beginning)]
    return found


@asynccontextmanager
async def group(text: str, log: Path, env: dict[str, str]) -> AsyncIterator[None]:
    """A command and all its children, gone at the end of the block."""
    with log.open("wb") as output:
        process = await trio.lowlevel.open_process(
            ["bash", "-euc", text], env=env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            with trio.move_on_after(15, shield=True):
                await process.wait()
        with trio.move_on_after(15, shield=True):
            await process.wait()


@pytest.mark.engines
async def test_five_minutes_to_a_real_pair(tmp_path: Path) -> None:
    install, demo = block("trio-pdproxy engines install").splitlines()
    home = os.environ.get("PDPROXY_ENGINES_HOME")
    more = {"PDPROXY_ENGINES_HOME": home} if home else {}
    with trio.fail_after(500):
        done = await trio.run_process(
            ["bash", "-euc", f"{install} && nice {demo} --once --bind 127.0.0.1:0"],
            env=environment(**more),
            cwd=ROOT,
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert done.returncode == 0, done.stdout.decode()
    assert "answer" in done.stdout.decode()


@pytest.mark.slow
async def test_engines_and_proxy_as_the_page_starts_them(tmp_path: Path) -> None:
    vllm = await ensure_environment()
    model = await ensure_model(vllm)
    arguments = "--enforce-eager --block-size 32 --max-model-len 4096 --max-num-seqs 32 --host 127.0.0.1"
    script = tmp_path / "vllm"
    script.write_text(
        f"#!/bin/sh\nshift 2\nexec nice -n {presets.NICE['cpu']} {vllm.python} -m vllm.entrypoints.openai.api_server "
        f'--model {model} --served-model-name MODEL {arguments} "$@"\n'
    )
    script.chmod(0o755)
    ports = {name: free_port() for name in ("8100", "8200", "5601", "5602", "8000")}
    p, d = [text for text in blocks("README.md", "sh") if text.startswith("VLLM_NIXL_SIDE_CHANNEL_HOST=")]
    serve = block("trio-pdproxy serve --prefill")
    for port, side in (("8100", "5601"), ("8200", "5602")):
        spec = f"http://127.0.0.1:{ports[port]};side_channel=127.0.0.1:{ports[side]}"
        serve = re.sub(rf"http://10\.0\.0\.\d:{port}", shlex.quote(spec), serve)
    ready, ask = block("curl --retry").replace("127.0.0.1:8000", f"127.0.0.1:{ports['8000']}").splitlines()
    async with (
        group(*_engine(p, ports, "5601", vllm, folder=tmp_path)),
        group(*_engine(d, ports, "5602", vllm, folder=tmp_path)),
        group(serve, tmp_path / "proxy.log", environment(PDPROXY_BIND=f"127.0.0.1:{ports['8000']}")),
    ):
        with trio.fail_after(WAIT):
            await _until_well(ready)  # the page waits a minute; two engines that load on two busy cores take longer
            answer = await shell(ask)
    assert '"finish_reason":"length"' in answer.replace(" ", ""), answer


async def _until_well(command: str) -> None:
    while True:
        done = await trio.run_process(["bash", "-c", command], check=False, capture_stdout=True, capture_stderr=True)
        if done.returncode == 0:
            return
        await trio.sleep(1)


def _engine(
    text: str, ports: dict[str, int], side: str, vllm: EngineEnvironment, *, folder: Path
) -> tuple[str, Path, dict[str, str]]:
    """The page's command on this machine's addresses, its log, its environment."""
    text = re.sub(r"10\.0\.0\.\d", "127.0.0.1", text).replace("PORT=5600", f"PORT={ports[side]}")
    for name in ("8100", "8200"):
        text = text.replace(f"--port {name}", f"--port {ports[name]}")
    env = dict(os.environ)
    for name, value in presets.environment(Script.model_validate({"preset": "cpu"}), "prefill", vllm).items():
        if value is None:
            env.pop(name, None)
        elif "${" not in value:  # the page sets those itself
            env[name] = value
    env["PATH"] = f"{folder}:{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    return text, folder / f"{side}.log", env
