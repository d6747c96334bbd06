"""Engines kept running: restarts, back-off, the cap, and what a proxy's pool is told. Engines are small scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_pdproxy.config import Settings
from trio_pdproxy.engines.pool import Pool
from trio_pdproxy.launch import (
    EngineError,
    EngineEvent,
    EngineExitedError,
    EngineSet,
    EngineStartError,
    LaunchError,
    LaunchPlan,
    MissingProgramError,
    PortInUseError,
    Restart,
    Script,
    SetupError,
    State,
    keep_told,
    make_plan,
    prepare,
    run_plan,
)
from trio_pdproxy.launch import process as process_module
from trio_pdproxy.launch.guard import group_members
from trio_pdproxy.launch.logs import follow
from trio_pdproxy.launch.supervise import Backoff
from trio_pdproxy.testing import until

# Answers /health; ends with 3 once the file named by GATE is there (which it removes, or leaves with KEEP_GATE).
FAKE = """
import http.server, os, sys, threading, time
gate = os.environ.get("GATE", "")
print("engine", sys.argv[2], flush=True)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
def watch():
    while not (gate and os.path.exists(gate)):
        time.sleep(0.01)
    os.environ.get("KEEP_GATE") or os.unlink(gate)
    os._exit(3)
threading.Thread(target=watch, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture(autouse=True)
def _poll_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "POLL_SECONDS", 0.02)


def script(tmp_path: Path, **more: Any) -> Script:
    role: dict[str, Any] = {
        "port": "auto",
        "side_channel_port": "auto",
        "command": [sys.executable, "-S", "-c", FAKE.replace("$", "$$"), "${port}", "${engine_id}"],
        "env": {"GATE": str(tmp_path / "${name}.gate")},
    }
    roles = {name: role | more.pop(name, {}) for name in ("prefill", "decode")}
    settings = {"preset": "sim", "logs": tmp_path / "logs", "restart": {"delay": 0.01, "attempts": 2}}
    return Script.model_validate(settings | roles | more)


def plan(tmp_path: Path, **more: Any) -> LaunchPlan:
    return make_plan(script(tmp_path, **more))


def test_the_delay_doubles_up_to_a_bound_and_the_cap_counts_within_its_time() -> None:
    backoff = Backoff(Restart(attempts=4, within=100, delay=1, max_delay=3))
    assert [backoff.next(now) for now in (0, 10, 20, 30)] == [1, 2, 3, 3]
    assert backoff.next(40) is None
    assert backoff.next(101) == 3  # the first is forgotten
    assert backoff.next(102) is None
    assert Backoff(Restart(attempts=0)).next(0) is None


async def test_one_that_ends_is_restarted_with_a_new_engine_id_and_the_others_stay(tmp_path: Path) -> None:
    events: list[EngineEvent] = []
    async with run_plan(plan(tmp_path), tell=[events.append]) as engines:
        p0, d0 = engines.prefill[0], engines.decode[0]
        assert p0.process.group is not None
        assert d0.process.group is not None
        before, other = p0.process.group.pid, d0.process.group.pid
        (tmp_path / "p0.gate").touch()
        await until(lambda: p0.starts == 2 and p0.state is State.READY, 10)
        assert p0.process.group.pid != before
        assert group_members(before) == []
        assert d0.process.group.pid == other
        assert isinstance(p0.error, EngineExitedError)
        assert "exit code 3" in str(p0.error)
    ids = p0.log_path.read_text().split()[1::2]
    assert len(set(ids)) == len(ids) == 2
    told = [event.state for event in events if event.name == "p0"]
    assert told == [State.STARTING, State.READY, State.BACKING_OFF, State.STARTING, State.READY, State.STOPPED]
    assert all(engine.process.group is None for engine in engines.all)


async def test_the_last_engine_of_a_role_that_is_given_up_ends_the_block_with_what_failed_first(tmp_path: Path) -> None:
    async def serve_until_it_fails() -> None:
        async with run_plan(plan(tmp_path, decode={"env": {"GATE": "", "KEEP_GATE": "1"}})) as engines:
            assert not engines.failed.is_set()
            (tmp_path / "p0.gate").touch()
            await until(lambda: engines.prefill[0].starts == 2, 10)
            while True:
                (tmp_path / "p0.gate").touch()
                await trio.sleep(0.05)

    with trio.fail_after(20), pytest.raises(EngineError, match=r"engine p0 ended"):
        await serve_until_it_fails()


async def test_with_another_engine_of_its_role_left_the_set_goes_on(tmp_path: Path) -> None:
    async with run_plan(plan(tmp_path, restart="never", prefill={"count": 2})) as engines:
        engines.kill("p0")
        await until(lambda: engines.named("p0").state is State.GIVEN_UP, 10)
        assert not engines.failed.is_set()
        await engines.restart("p0")
        assert engines.named("p0").state is State.READY
        engines.kill("p0")
        engines.kill("p1")
        with trio.fail_after(10):
            with pytest.raises(EngineExitedError, match=r"engine p[01] ended"):
                raise await first_failure(engines)
            engines.failed = trio.Event()  # so that the block does not end of it here


async def first_failure(engines: Any) -> LaunchError:
    await until(lambda: engines.failure is not None, 10)
    failure = engines.failure
    assert isinstance(failure, LaunchError)
    return failure


async def test_an_engine_that_never_gets_ready_is_told_with_its_last_lines_and_nothing_is_left(tmp_path: Path) -> None:
    silent = [sys.executable, "-c", "import time; print('loading weights', flush=True); time.sleep(60)"]
    seen: list[int] = []

    def note(event: EngineEvent) -> None:
        seen.append(os.getpid())

    with pytest.raises(EngineStartError, match=r"d0 was not ready after 0\.7 s") as caught:
        async with run_plan(plan(tmp_path, ready_timeout=0.7, decode={"command": silent}), tell=[note]):
            pytest.fail("never ready")
    assert caught.value.tail == ["loading weights"]
    assert seen


async def test_nothing_is_started_when_a_port_is_taken_or_a_program_is_missing(tmp_path: Path) -> None:
    made = plan(tmp_path, decode={"command": ["no-such-program"]})
    with pytest.raises(MissingProgramError, match="no-such-program"):
        async with run_plan(made):
            pytest.fail("it cannot start")
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listeners[0]:
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"port {port} on 127\.0\.0\.1 is in use by pid {os.getpid()} "):
            async with run_plan(plan(tmp_path), also_free=[("127.0.0.1", port)]):
                pytest.fail("it must not start")
    assert not (tmp_path / "logs").exists()


async def test_a_model_folder_that_is_not_there_is_told_before_anything_is_made(tmp_path: Path) -> None:
    for model in (str(tmp_path / "none"), "./none"):
        with pytest.raises(SetupError, match=r"none does not exist"):
            await prepare(Script(preset="cuda", model=model))
    with pytest.raises(SetupError, match="write the whole path"):
        await prepare(Script(preset="cuda", model="~/model"))
    await prepare(Script(preset="cuda", model="org/on-the-hub"))


async def test_kill_all_takes_no_grace(tmp_path: Path) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + FAKE
    command = [sys.executable, "-c", stubborn, "${port}", "${engine_id}"]
    with trio.fail_after(20):
        made = plan(tmp_path, stop_grace=60, prefill={"command": command}, decode={"command": command})
        async with run_plan(made) as engines:
            pids = [engine.process.group.pid for engine in engines.all if engine.process.group is not None]
            engines.kill_all()
            with trio.CancelScope() as scope:
                scope.cancel()
                await trio.lowlevel.checkpoint()
    assert all(group_members(pid) == [] for pid in pids)


async def test_a_pool_is_told_at_once(tmp_path: Path) -> None:
    """Only how it is told: what the pool then makes of the engine is its own affair (and these are no vLLM)."""
    made = plan(tmp_path, restart={"delay": 0.3, "attempts": 1}, prefill={"count": 2})
    async with run_plan(made) as engines, trio.open_nursery() as nursery:
        settings = engines.settings
        pool = Pool(Settings.model_validate(dict(settings) | {"health_interval": 1000, "health_timeout": 1}))
        await nursery.start(pool.run)
        nursery.start_soon(keep_told, engines, pool)
        await trio.testing.wait_all_tasks_blocked(0.01)
        (p0,) = (engine for engine in pool.prefill if engine.name == "p0")
        doubts = p0.doubts
        engines.kill("p0")
        await until(lambda: engines.named("p0").state is State.BACKING_OFF, 10)
        assert p0.doubts == doubts + 1
        assert p0.why == "it is being restarted"
        await until(lambda: engines.named("p0").state is State.READY, 10)
        engines.kill("p0")
        await until(lambda: engines.named("p0").state is State.GIVEN_UP, 10)
        await until(lambda: p0 not in pool.prefill, 10)
        await engines.restart("p0")
        await until(lambda: any(engine.name == "p0" for engine in pool.prefill), 10)
        nursery.cancel_scope.cancel()


def test_a_set_without_a_proxy_has_no_settings_for_one(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="proxy: false"):
        _ = EngineSet(plan(tmp_path, proxy=False)).settings


async def test_logs_are_followed_as_one_stream_and_an_earlier_runs_is_kept(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "p0.log").write_text("an earlier run\n")
    seen: list[tuple[str, str]] = []
    made = plan(tmp_path)
    async with run_plan(made) as engines, trio.open_nursery() as nursery:
        paths = {engine.name: engine.log_path for engine in engines.all}
        nursery.start_soon(follow, paths, lambda name, line: seen.append((name, line)))
        await until(lambda: len(seen) == 2, 10)
        with paths["d0"].open("a") as log:
            log.write("half a ")
            log.flush()
            await trio.sleep(0.3)
            log.write("line\n25%\r50%\r\n")
        await until(lambda: len(seen) == 5, 10)
        nursery.cancel_scope.cancel()
    assert {name for name, _ in seen[:2]} == {"p0", "d0"}
    assert seen[2:] == [("d0", "half a line"), ("d0", "25%"), ("d0", "50%")]
    assert (logs / "p0.log.1").read_text() == "an earlier run\n"
    assert "earlier" not in (logs / "p0.log").read_text()


async def test_cancelling_a_start_stops_at_once_what_does_not_listen(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    made = plan(tmp_path, stop_grace=60, prefill={"command": [sys.executable, "-c", deaf]})
    log = made.logs / "p0.log"
    with trio.fail_after(20), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when, lambda: log.exists() and "up" in log.read_text(), scope)
            async with run_plan(made):
                pytest.fail("never ready")
    assert scope.cancelled_caught


async def _cancel_when(wanted: Callable[[], bool], scope: trio.CancelScope) -> None:
    await until(wanted, 10)
    scope.cancel()
