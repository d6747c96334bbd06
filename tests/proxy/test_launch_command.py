"""`trio-pdproxy launch` as a user runs it: simulated engines, real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import trio
import yaml
from click.testing import CliRunner, Result

from trio_pdproxy.cli.launch import launch
from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.launch.guard import group_members
from trio_pdproxy.launch.ports import is_free
from trio_pdproxy.testing import until

from .launched import EXAMPLES, SECONDS, launched

FREE = {"port": "auto", "side_channel_port": "auto"}


def write(folder: Path, **script: Any) -> Path:
    values = {"preset": "sim", "prefill": FREE, "decode": FREE, "logs": "logs", "proxy": {"bind": "127.0.0.1:0"}}
    path = folder / "script.yaml"
    path.write_text(yaml.safe_dump(values | script))
    return path


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(launch, [str(arg) for arg in args], env={"HF_TOKEN": "x"})


# -- bad scripts -----------------------------------------------------------------------------------


def test_a_wrong_script_is_exit_code_2_and_nothing_is_started(tmp_path: Path) -> None:
    result = run(write(tmp_path, modle="x"))
    assert result.exit_code == 2
    assert result.stderr.startswith("trio-pdproxy launch: the configuration has a problem:")
    assert "script.yaml:5: modle: there is no such setting" in result.stderr
    assert not (tmp_path / "logs").exists()
    assert run().exit_code == 2
    assert run(tmp_path / "none.yaml").exit_code == 2


def test_a_port_in_use_is_named_with_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        for script in ({"prefill": FREE | {"port": port}}, {"proxy": {"bind": f"127.0.0.1:{port}"}}):
            result = run(write(tmp_path, **script))
            assert result.exit_code == 1
            last = result.stderr.splitlines()[-1]
            assert f"port {port} on 127.0.0.1 is in use by pid {os.getpid()} (" in last
    assert not (tmp_path / "logs").exists()


def test_a_missing_program_and_a_wrong_model_path_are_told_before_anything_starts(tmp_path: Path) -> None:
    result = run(write(tmp_path, preset="cuda", model="org/model", vllm="no-such-vllm serve"))
    assert result.exit_code == 1
    assert "trio-pdproxy launch: there is no program no-such-vllm in PATH" in result.stderr.splitlines()[-1]
    result = run(write(tmp_path, preset="cuda", model="/no/such/model"))
    assert result.exit_code == 1
    assert result.stderr == "trio-pdproxy launch: the model /no/such/model does not exist (from the folder " + (
        f"{Path.cwd()})\n"
    )
    assert not (tmp_path / "logs").exists()


def test_an_engine_that_exits_at_once_is_told_with_its_last_lines(tmp_path: Path) -> None:
    crash = [sys.executable, "-c", "print('loading'); import xgrammar_of_no_kind"]
    result = run(write(tmp_path, decode=FREE | {"command": crash}))
    assert result.exit_code == 1
    assert "  | loading" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("trio-pdproxy launch: what failed first: engine d0 ended before it was ready (exit code 1)")
    assert "module xgrammar_of_no_kind is missing" in last
    assert "Traceback" not in result.stderr.partition("engine d0 ended")[0]


def test_an_engine_that_never_gets_ready_is_told_and_ended(tmp_path: Path) -> None:
    hangs = [sys.executable, "-S", "-c", "import time; print('still loading', flush=True); time.sleep(600)"]
    result = run(write(tmp_path, ready_timeout=3, decode=FREE | {"command": hangs}))
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last == "trio-pdproxy launch: what failed first: engine d0 was not ready after 3 s (still running)"
    assert "  | still loading" in result.stderr


# -- a whole life ----------------------------------------------------------------------------------


async def test_started_served_and_ended_by_a_signal_with_nothing_left(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        script = write(tmp_path)
        async with launched(tmp_path, script, "--follow", NOTIFY_SOCKET=str(tmp_path / "notify")) as run:
            await run.ready()
            assert systemd.recv(100) == b"READY=1"
            assert await run.ask() == 200
            ports, groups = run.ports, list(run.groups.values())
            assert len(set(ports)) == 5
            assert len(groups) == 2
            run.process.send_signal(signal.SIGINT)
            assert await run.wait() == 0
            assert systemd.recv(100) == b"STOPPING=1"
    assert all(group_members(group) == [] for group in groups)
    assert all(is_free("127.0.0.1", port) for port in ports)
    # --follow: the engines' own first lines, each after its name.
    assert re.search(r"^p0 \| prefill\t", run.out, re.MULTILINE)
    assert re.search(r"^d0 \| decode\t", run.out, re.MULTILINE)
    assert len(set(re.findall(r"engine id ([0-9a-f-]{36})  log", run.out))) == 2
    for word in ("p0  starting", "d0  ready after", "stopping: running requests may finish"):
        assert word in run.err


async def test_a_launcher_that_is_sigkilled_takes_every_engine_with_it(tmp_path: Path) -> None:
    async with launched(tmp_path, write(tmp_path)) as run:
        await run.ready()
        groups, ports = list(run.groups.values()), run.ports
        assert all(len(group_members(group)) == 2 for group in groups)
        run.process.kill()
        await run.wait()
        await until(lambda: all(group_members(group) == [] for group in groups), 5)
        assert all(is_free("127.0.0.1", port) for port in ports)


async def test_an_engine_that_is_sigkilled_comes_back_and_traffic_recovers(tmp_path: Path) -> None:
    script = write(tmp_path, restart={"delay": 0.2, "attempts": 2}, proxy={"bind": "127.0.0.1:0", "eject_time": 0.2})
    async with launched(tmp_path, script) as run:
        await run.ready()
        old = run.groups["p0"]
        server = min(pid for pid in group_members(old) if pid != old)
        os.kill(server, signal.SIGKILL)
        await until(lambda: group_members(old) == [], 10)
        with trio.fail_after(SECONDS):
            while await run.ask() != 200:  # noqa: ASYNC110
                await trio.sleep(0.1)
        new = run.groups["p0"]
        assert new != old
        # The proxy was told, not restarted: it knows the engine under its new id.
        async with open_client(run.url, timeout=10) as client:
            engines = (await client.get("/status")).json()["engines"]
        log = (tmp_path / "logs" / "p0.log").read_text()
        ids = re.findall(r"engine id ([0-9a-f-]{36})", log)
        assert len(set(ids)) == 2
        assert [engine["engine_id"] for engine in engines if engine["name"] == "p0"] == ids[-1:]
        assert "engine p0 ended while it was serving (signal SIGKILL)" in run.err
        # Over its cap it is given up, and with it the launch: the last line says what failed first.
        with trio.fail_after(SECONDS):
            while run.process.poll() is None:
                for group in run.groups.values() if run.process.poll() is None else ():
                    if group != run.groups.get("d0"):
                        os.killpg(group, signal.SIGKILL)
                await trio.sleep(0.3)
        assert run.process.returncode == 1
        last = run.err.splitlines()[-1]
        assert last.startswith("trio-pdproxy launch: what failed first: engine p0 ended")


async def test_a_decode_engine_that_holds_stranded_blocks_is_restarted_while_another_serves(tmp_path: Path) -> None:
    slow = FREE | {"flags": {"prefill-ms": 1500}}
    script = write(tmp_path, prefill=slow, decode=FREE | {"count": 2}, restart={"delay": 0.2, "stranded": 1})
    async with launched(tmp_path, script) as run, trio.open_nursery() as nursery:
        await run.ready()
        nursery.start_soon(run.ask)
        await trio.sleep(0.7)  # both legs are out, and the prefill is not done
        os.killpg(run.groups["p0"], signal.SIGKILL)
        await until(lambda: "holds what nothing frees: it is restarted" in run.err, SECONDS)
        (name,) = re.findall(r"decode engine (d[01]) holds what nothing frees", run.err)
        await until(
            lambda: re.search(rf"engine {name} is usable: engine id", run.err.partition("nothing frees")[2]), 60
        )
        async with open_client(run.url, timeout=10) as client:
            engines = (await client.get("/status")).json()["engines"]
        assert [engine["stranded"] for engine in engines if engine["name"] == name] == [0]
        assert len(set(re.findall(r"engine id (\S+)", (tmp_path / "logs" / f"{name}.log").read_text()))) == 2


async def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    # A request that takes long keeps the first signal waiting.
    slow = FREE | {"flags": {"itl-ms": 1000}}
    script = write(tmp_path, decode=slow, stop_grace=60)
    async with launched(tmp_path, script) as run, trio.open_nursery() as nursery:
        await run.ready()
        groups = list(run.groups.values())
        body = {"model": "sim", "prompt": "x", "max_tokens": 500, "stream": True}

        async def long_request() -> None:
            with suppress(httpx.HTTPError):  # it is cut
                async with (
                    open_client(run.url, timeout=100) as client,
                    client.stream("POST", "/v1/completions", json=body) as response,
                ):
                    async for _ in response.aiter_raw():
                        streaming.set()

        streaming = trio.Event()
        nursery.start_soon(long_request)
        with trio.fail_after(SECONDS):
            await streaming.wait()
        run.process.send_signal(signal.SIGTERM)
        await until(lambda: "stopping" in run.err, 10)
        await trio.sleep(0.3)
        assert run.process.poll() is None
        begun = trio.current_time()
        run.process.send_signal(signal.SIGTERM)
        assert await run.wait() == 143
        assert trio.current_time() - begun < 20
        await until(lambda: all(group_members(group) == [] for group in groups), 5)


async def test_a_signal_during_the_start_stops_it(tmp_path: Path) -> None:
    hangs = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    async with launched(tmp_path, write(tmp_path, decode=FREE | {"command": hangs})) as run:
        await until(lambda: "d0  starting" in run.err, SECONDS)
        groups = list(run.groups.values())
        run.process.send_signal(signal.SIGTERM)
        assert await run.wait() == 0
        assert all(group_members(group) == [] for group in groups)


# -- examples --------------------------------------------------------------------------------------


async def test_what_a_dry_run_prints_works_when_it_is_pasted(tmp_path: Path) -> None:
    script = write(tmp_path, proxy={"bind": "127.0.0.1:18080"})
    shown = run(script, "--dry-run", "--bind", f"127.0.0.1:{free_port()}")
    assert shown.exit_code == 0
    proxy = re.search(r"# the proxy: (http://\S+)", shown.output)
    assert proxy is not None
    # In the background, as somebody with one terminal would paste it; ended as a group.
    lines = re.sub(r"\n\n|\Z", " &\n", shown.output.rstrip()) + "wait\n"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = await trio.lowlevel.open_process(
        ["bash", "-c", lines],
        env={**os.environ, "PATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with open_client(proxy[1], timeout=5) as client:
            body = {"model": "sim", "prompt": "hello", "max_tokens": 4}
            with trio.fail_after(SECONDS):
                while True:
                    try:
                        if (await client.post("/v1/completions", json=body)).status_code == 200:
                            break
                    except httpx.HTTPError:
                        pass
                    await trio.sleep(0.2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        with trio.move_on_after(5, shield=True):
            await process.wait()


def test_the_library_example_serves_with_its_own_policy(tmp_path: Path) -> None:
    script = write(tmp_path, prefill=FREE, decode=FREE | {"count": 2})
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "library.py"), str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^p0 -> d[01]: '", done.stdout, re.MULTILINE)) == 3
    # All at once, and each to the one with the most free places: both are used.
    assert {"d0", "d1"} <= set(re.findall(r"-> (d[01]):", done.stdout))


def test_the_program_in_the_documentation_serves(tmp_path: Path) -> None:
    text = (EXAMPLES.parent / "docs" / "launch.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script = write(tmp_path)
    program = program.replace("examples/sim-2p2d.yaml", str(script))
    asked = "trio.move_on_after(30):\n                while app.missing():\n                    await trio.sleep(0.05)"
    program = program.replace("await trio.sleep_forever()", f"with {asked}\n            print(app.missing())")
    # The block it stands in would wait for keep_told for ever.
    program = program.replace("print(app.missing())", "print(app.missing())\n            nursery.cancel_scope.cancel()")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert "\n[]\n" in done.stdout
    assert re.search(r"^http://127\.0\.0\.1:\d+$", done.stdout, re.MULTILINE)


def test_the_systemd_unit_starts_a_script_that_exists(tmp_path: Path) -> None:
    unit = EXAMPLES / "trio-pdproxy.service"
    (command,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
    program, subcommand, script = command.split()
    assert (Path(program).name, subcommand) == ("trio-pdproxy", "launch")
    assert Path(script).suffix == ".yaml"
    assert run(EXAMPLES / "cuda-1p1d.yaml", "--dry-run").exit_code == 0
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))
    assert settings["KillMode"] == "mixed"
    assert settings["RestartPreventExitStatus"] == "2"
    if verify := shutil.which("systemd-analyze"):
        # The paths of an installation do not exist here; everything else must be in order.
        copy = tmp_path / unit.name
        copy.write_text(unit.read_text().replace(program, sys.executable).replace("User=vllm\n", ""))
        done = subprocess.run([verify, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
        assert str(copy) not in done.stderr, done.stderr
        assert unit.name + ":" not in done.stderr, done.stderr


def test_the_schema_is_printed() -> None:
    shown = run("--schema")
    assert shown.exit_code == 0
    assert json.loads(shown.output) == json.loads((EXAMPLES / "launch.schema.json").read_text())


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
