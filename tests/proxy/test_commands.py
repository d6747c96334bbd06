"""The commands as a user runs them: their output, their exit codes, their signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import trio

from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.sim import Cluster, SimSettings, expected_text, open_cluster
from trio_pdproxy.testing import until

COMMAND = [sys.executable, "-m", "trio_pdproxy"]
HYPERCORN = [sys.executable, "-m", "hypercorn", "trio_pdproxy:app", "--worker-class", "trio"]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def environment(cluster: Cluster) -> dict[str, str]:
    p, d = cluster.prefill[0], cluster.decode[0]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")},
        "PDPROXY_PREFILL": f"{p.url};side_channel={p.side_channel}",
        "PDPROXY_DECODE": f"{d.url};side_channel={d.side_channel}",
    }


@asynccontextmanager
async def running(argv: list[str], env: dict[str, str]) -> AsyncIterator[trio.Process]:
    """The command, in a process group of its own, gone at the end of the block."""
    process = await trio.lowlevel.open_process(
        argv, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        with trio.move_on_after(5, shield=True):
            await process.wait()


async def until_ready(url: str) -> None:
    with trio.fail_after(90):  # a worker that starts is slow on a busy machine
        while True:
            async with open_client(url, timeout=5) as client:
                try:
                    if (await client.get("/ready")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
            await trio.sleep(0.05)


async def complete(url: str, prompt: str, **more: object) -> tuple[int, str]:
    async with open_client(url, timeout=30) as client:
        response = await client.post("/v1/completions", json={"model": "sim", "prompt": prompt, **more})
        return response.status_code, response.text


async def test_the_hypercorn_command_serves_the_app_with_one_worker_or_two() -> None:
    async with open_cluster() as cluster:
        for workers in ("1", "2"):
            bind = f"127.0.0.1:{free_port()}"
            argv = [*HYPERCORN, "--workers", workers, "--bind", bind]
            async with running(argv, environment(cluster)):
                await until_ready(f"http://{bind}")
                for number in range(6):
                    status, text = await complete(f"http://{bind}", f"prompt {number}", max_tokens=3)
                    assert status == 200
                    assert expected_text(f"prompt {number}", 3) in text


async def test_serve_finishes_running_requests_on_the_first_signal_and_exits_0() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        async with open_cluster(settings=SimSettings(prefill_base=0.5)) as cluster:
            bind = f"127.0.0.1:{free_port()}"
            async with running([*COMMAND, "serve", "--bind", bind], environment(cluster)) as process:
                await until_ready(f"http://{bind}")
                answers: list[tuple[int, str]] = []

                async def ask(url: str, into: list[tuple[int, str]]) -> None:
                    into.append(await complete(url, "x"))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask, f"http://{bind}", answers)
                    await until(lambda: cluster.prefill[0].running)
                    process.send_signal(number)
                assert answers[0][0] == 200
                with trio.fail_after(5):
                    assert await process.wait() == 0


async def test_serve_ends_at_once_on_the_second_signal() -> None:
    async with open_cluster(settings=SimSettings(prefill_base=20)) as cluster:
        bind = f"127.0.0.1:{free_port()}"
        env = environment(cluster) | {"PDPROXY_PREFILL": environment(cluster)["PDPROXY_PREFILL"]}
        env["PDPROXY_PREFILL"] += f";engine_id={cluster.prefill[0].engine_id};tp_size=1;pp_size=1"
        async with running([*COMMAND, "serve", "--bind", bind], env) as process:
            await until_ready(f"http://{bind}")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(swallow, f"http://{bind}")
                await until(lambda: cluster.prefill[0].running)
                process.send_signal(signal.SIGTERM)
                await trio.sleep(0.2)
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                with trio.fail_after(5):
                    assert await process.wait() == 143
                nursery.cancel_scope.cancel()


async def swallow(url: str) -> None:
    with suppress(httpx.HTTPError):
        await complete(url, "x")


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")}
    return subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, timeout=60, check=False, env=clean | (env or {})
    )


def test_a_wrong_configuration_is_one_message_with_every_problem_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("prefill:\n  - url: ftp://x\nidle_timeout: -1\nspeed: fast\n")
    done = run("serve", "--config", str(file), "--write-timeout", "never", env={"PDPROXY_QUEUE_SIZE": "x"})
    assert done.returncode == 2
    for place in ("proxy.yaml:2", "proxy.yaml:3", "proxy.yaml:4", "--write-timeout", "PDPROXY_QUEUE_SIZE", "decode"):
        assert place in done.stderr, done.stderr
    assert done.stdout == ""


def test_a_port_in_use_is_exit_code_1_and_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        for args in (
            ("serve", "--bind", bind, "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"),
            ("demo", "--bind", bind),
            ("sim", "--prefill-port", bind.rpartition(":")[2], "--decode-port", "0", "--side-port", "0"),
            ("sim", "--prefill-port", "0", "--decode-port", "0", "--side-port", bind.rpartition(":")[2]),
        ):
            done = run(*args)
            assert done.returncode == 1
            assert bind in done.stderr
            assert "in use" in done.stderr.lower()
            assert "Traceback" not in done.stderr


def test_demo_once_shows_the_answer_the_timeline_and_the_gap() -> None:
    done = run("demo", "--once", "--bind", f"127.0.0.1:{free_port()}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in ("answer", "prefill leg", "decode leg", "first token", "200 quick requests", "curl -N"):
        assert words in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        [],
        *(["serve"], ["demo"], ["launch"], ["check"], ["bench"], ["trace"], ["top"], ["sim"]),
        *(["engines"], ["engines", "install"], ["render"], ["render", "k8s"]),
    ],
)
def test_every_command_has_help(command: list[str]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_usage_errors_are_exit_code_2() -> None:
    assert run("serv").returncode == 2
    assert run("serve", "--no-such-flag").returncode == 2
