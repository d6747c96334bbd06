"""An engine's life: ready, dead while starting, dead while serving, stopped. Engines are scripts."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_pdproxy.launch import process as process_module
from trio_pdproxy.launch.errors import EngineExitedError, EngineStartError, MissingProgramError, PortInUseError
from trio_pdproxy.launch.guard import group_members
from trio_pdproxy.launch.ports import choose_run
from trio_pdproxy.launch.process import EngineProcess

FAKE = """
import http.server, os, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass
if os.fork() == 0:  # an engine core
    __import__("signal").pause()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture(autouse=True)
def _poll_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "POLL_SECONDS", 0.02)


def engine(tmp_path: Path, script: str = FAKE, **options: Any) -> EngineProcess:
    port = choose_run(1, "127.0.0.1", set())
    argv = [sys.executable, "-c", script, str(port)]
    settings: dict[str, Any] = {
        "env": dict(os.environ),
        "log_path": tmp_path / "p0.log",
        "ready_url": f"http://127.0.0.1:{port}",
        "ports": [("127.0.0.1", port)],
        "ready_timeout": 20.0,
    }
    return EngineProcess("p0", argv, **(settings | options))


async def test_start_returns_when_health_answers_and_cancelling_leaves_nothing(tmp_path: Path) -> None:
    p0 = engine(tmp_path)
    async with trio.open_nursery() as nursery:
        assert await nursery.start(p0.run) is p0
        assert p0.group is not None
        assert p0.ready_after is not None
        pid = p0.group.pid
        assert len(group_members(pid)) == 3
        nursery.cancel_scope.cancel()
    assert group_members(pid) == []
    assert p0.group is None


async def test_an_engine_that_dies_while_starting_says_why(tmp_path: Path) -> None:
    p0 = engine(tmp_path, "print('loading'); import no_such_module")
    with pytest.raises(EngineStartError) as caught:
        await p0.run()
    error = caught.value
    assert error.returncode == 1
    assert "loading" in error.tail
    assert error.cause is not None
    assert "no_such_module" in error.cause
    assert "exit code 1" in str(error)
    assert str(p0.log_path) in str(error)


async def test_an_earlier_runs_failure_in_the_same_log_explains_nothing(tmp_path: Path) -> None:
    (tmp_path / "p0.log").write_text("OSError: Address already in use\n")
    with pytest.raises(EngineStartError) as caught:
        await engine(tmp_path, "raise SystemExit('today')").run()
    assert caught.value.cause is None
    assert caught.value.tail == ["today"]


async def test_an_engine_that_is_never_ready_is_stopped_at_its_deadline(tmp_path: Path) -> None:
    p0 = engine(tmp_path, "import time; print('still loading', flush=True); time.sleep(60)", ready_timeout=0.5)
    with pytest.raises(EngineStartError, match=r"not ready after 0\.5 s \(still running\)"):
        await p0.run()


async def test_exit_outranks_an_answer_from_somebody_else(tmp_path: Path) -> None:
    async def stranger(_url: str) -> bool:
        assert p0.group is not None
        await p0.group.wait_exit()
        return True

    p0 = engine(tmp_path, "raise SystemExit(9)", probe=stranger)
    with pytest.raises(EngineStartError) as caught:
        await p0.run()
    assert caught.value.returncode == 9


async def test_an_engine_that_dies_while_serving_takes_its_nursery_down(tmp_path: Path) -> None:
    p0 = engine(tmp_path)
    with pytest.RaisesGroup(EngineExitedError):
        async with trio.open_nursery() as nursery:
            await nursery.start(p0.run)
            p0.kill()
            await trio.sleep_forever()
    assert p0.returncode == -signal.SIGKILL


async def test_the_leaders_death_ends_the_rest_and_the_engine_can_be_started_again(tmp_path: Path) -> None:
    p0 = engine(tmp_path)
    with pytest.RaisesGroup(EngineExitedError):
        async with trio.open_nursery() as nursery:
            await nursery.start(p0.run)
            assert p0.group is not None
            guard = p0.group.pid
            with pytest.raises(RuntimeError, match="running already"):
                await p0.run()
            # The command is the guard's child; its own child would be an orphan holding the ports.
            command = min(pid for pid in group_members(guard) if pid != guard)
            os.kill(command, signal.SIGKILL)
    assert group_members(guard) == []
    assert p0.returncode == -signal.SIGKILL
    async with trio.open_nursery() as nursery:
        await nursery.start(p0.run)
        nursery.cancel_scope.cancel()


async def test_a_missing_program_is_told_before_anything_is_started(tmp_path: Path) -> None:
    p0 = engine(tmp_path)
    p0.argv = ("no-such-program", "serve")
    with pytest.raises(MissingProgramError, match="no program no-such-program in PATH"):
        await p0.run()
    p0.argv = (str(tmp_path), "serve")
    with pytest.raises(MissingProgramError, match="cannot be executed"):
        await p0.run()
    assert not p0.log_path.exists()


async def test_a_taken_port_is_named_with_its_holder_and_nobody_is_touched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        p0 = engine(tmp_path, ports=[("127.0.0.1", port)])
        with pytest.raises(PortInUseError, match=rf"port {port} on 127\.0\.0\.1 is in use by pid {os.getpid()} \("):
            await p0.run()
    assert not p0.log_path.exists()
