"""Making the environment and the model: once, whole or not at all. pip and the script are stand-ins here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from click.testing import CliRunner

from trio_pdproxy.cli.engines import engines
from trio_pdproxy.launch import Script, State, environment, gentle, model, open_vllm, presets
from trio_pdproxy.launch.cache import making, read_stamp, write_stamp
from trio_pdproxy.launch.environment import EngineEnvironment, ensure_environment, find_environment
from trio_pdproxy.launch.errors import EngineExitedError, EngineStartError, SetupError
from trio_pdproxy.launch.model import ensure_model
from trio_pdproxy.launch.progress import Step, silent

# Stands for both `python -m venv FOLDER` and pip: leaves a note of each call, and an interpreter.
FAKE_PYTHON = f"""#!/bin/sh
echo "$@" >> "$PDPROXY_ENGINES_HOME/calls"
if [ "$2" = venv ]; then
  mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0
fi
case "$1" in *.py) shift; mkdir -p "$1"; touch "$1/config.json"; exit 0;; esac
if [ -e "$PDPROXY_ENGINES_HOME/fail" ]; then
  echo "ERROR: No matching distribution found for torch==2.13.0+cpu"; exit 1
fi
echo "Collecting a==1"
exec {sys.executable} -c "import time; time.sleep(0.05)"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDPROXY_ENGINES_HOME", str(tmp_path))
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    fake_sys = SimpleNamespace(
        executable=str(python),
        version_info=sys.version_info,
        version=sys.version,
        base_prefix=sys.base_prefix,
    )
    monkeypatch.setattr(environment, "sys", fake_sys)
    monkeypatch.setattr(environment, "WATCH_SECONDS", 0.01)
    return tmp_path


def calls(home: Path) -> list[str]:
    return (home / "calls").read_text().splitlines()


async def test_the_environment_is_made_once_and_then_reused(home: Path) -> None:
    steps: list[Step] = []
    assert find_environment() is None
    made = await ensure_environment(progress=steps.append)
    assert made == await ensure_environment()
    assert made.python.exists()
    assert (made.gentle / "sitecustomize.py").read_text() == Path(gentle.__file__).read_text()
    assert len(calls(home)) == 2
    assert [step.what for step in steps][:1] == ["making a virtual environment"]


async def test_an_unfinished_environment_is_made_again(home: Path) -> None:
    folder = environment.environment_folder()
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "leftover").touch()
    made = await ensure_environment()
    assert made.folder == folder
    assert not (folder / "bin" / "leftover").exists()


async def test_two_at_once_make_one(home: Path) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ensure_environment)
    assert len(calls(home)) == 2


async def test_a_failed_install_leaves_no_stamp_and_the_next_try_starts_afresh(home: Path) -> None:
    (home / "fail").touch()
    with pytest.raises(SetupError, match="--torch-index URL"):
        await ensure_environment()
    assert find_environment() is None
    (home / "fail").unlink()
    await ensure_environment()
    assert find_environment() is not None


async def test_a_lost_interpreter_is_named_not_overwritten(home: Path) -> None:
    made = await ensure_environment()
    made.python.unlink()
    with pytest.raises(SetupError, match="lost its interpreter"):
        await ensure_environment()


async def test_a_folder_that_cannot_be_written_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDPROXY_ENGINES_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(SetupError, match="PDPROXY_ENGINES_HOME"):
        await ensure_environment()


async def test_the_model_is_made_once(home: Path) -> None:
    made = await ensure_environment()
    folder = await ensure_model(made)
    assert await ensure_model(made) == folder == model.model_folder()
    assert (folder / "config.json").exists()
    assert len(calls(home)) == 3


async def test_a_model_that_cannot_be_made_shows_the_scripts_words(home: Path) -> None:
    broken = EngineEnvironment(home / "nothing", 0.0)
    with pytest.raises(SetupError, match=r"(?s)test model failed \(exit code 127\).*cannot run"):
        await ensure_model(broken)
    assert read_stamp(model.model_folder()) is None


async def test_only_one_holds_the_right_to_make(tmp_path: Path) -> None:
    folder = tmp_path / "thing"
    steps: list[Step] = []
    async with making(folder, silent) as missing:
        assert missing
        with trio.move_on_after(0.05) as scope:
            async with making(folder, steps.append):
                pytest.fail("two makers at once")
        assert scope.cancelled_caught
        folder.mkdir()
        write_stamp(folder, {})
    assert steps
    async with making(folder, silent) as missing:
        assert not missing


def test_the_command_prints_where_and_how_long(home: Path) -> None:
    first = CliRunner().invoke(engines, ["install"])
    assert first.exit_code == 0, first.output
    assert str(environment.environment_folder()) in first.stdout
    assert str(model.model_folder()) in first.stdout
    assert "made in" in first.stdout
    assert "found in" in CliRunner().invoke(engines, ["install"]).stdout


def test_the_command_fails_with_pips_words(home: Path) -> None:
    (home / "fail").touch()
    result = CliRunner().invoke(engines, ["install", "--torch-index", "https://index.example"])
    assert result.exit_code == 1
    assert "No matching distribution found for torch" in result.output
    assert "--extra-index-url https://index.example" in calls(home)[-1]


# Stands for an engine: answers every GET with 200 on the port behind --port.
FAKE_ENGINE = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


CHOOSE = "import json, sys; exec(json.loads(sys.argv[3]).get(sys.argv[2], sys.argv[4]))"


@pytest.fixture
def fake_vllm(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Engines are scripts; the dict gives another script for an engine's name."""
    scripts: dict[str, str] = {}

    # The engine's interpreter: this Python, with a script for each engine instead of vLLM.
    def command(_script: Script, role: str, _found: EngineEnvironment | None) -> list[str]:
        return [sys.executable, "-c", CHOOSE, "${port}", "${name}", json.dumps(scripts).replace("$", "$$"), FAKE_ENGINE]

    monkeypatch.setattr(presets, "command", command)
    monkeypatch.setattr("trio_pdproxy.launch.process.POLL_SECONDS", 0.02)
    return scripts


async def test_open_vllm_yields_when_every_engine_is_ready(home: Path, fake_vllm: dict[str, str]) -> None:
    steps: list[Step] = []
    async with open_vllm(2, 1, log_dir=home / "logs", progress=steps.append) as running:
        assert [engine.name for engine in running.all] == ["p0", "p1", "d0"]
        assert len({engine.url for engine in running.all} | {engine.side_channel for engine in running.all}) == 6
        pids = [engine.process.group.pid for engine in running.all if engine.process.group is not None]
        assert len(pids) == 3
    assert steps[-1] == Step("starting engines", 3, 3)
    assert all(engine.process.group is None for engine in running.all)
    assert running.prefill[0].log_path == home / "logs" / "p0.log"


async def test_an_engine_that_fails_to_start_is_the_error_itself(home: Path, fake_vllm: dict[str, str]) -> None:
    fake_vllm["d0"] = "raise SystemExit(5)"
    with pytest.raises(EngineStartError, match="engine d0 ended before it was ready"):
        async with open_vllm(log_dir=home / "logs"):
            pytest.fail("never ready")


async def test_an_engine_that_dies_ends_the_block(home: Path, fake_vllm: dict[str, str]) -> None:
    async def serve_until_it_dies() -> None:
        async with open_vllm(log_dir=home / "logs") as running:
            running.kill("p0")
            await trio.sleep_forever()

    with pytest.raises(EngineExitedError, match="engine p0"):
        await serve_until_it_dies()


async def test_an_engine_can_be_killed_and_restarted(home: Path, fake_vllm: dict[str, str]) -> None:
    async with open_vllm(log_dir=home / "logs", exit_ok=True) as running:
        p0 = running.prefill[0]
        assert p0.process.group is not None
        before = p0.process.group.pid
        running.kill("p0")
        with trio.fail_after(10):
            await p0.wait_down()
        assert p0.state is State.GIVEN_UP
        await running.restart("p0")
        assert p0.process.group is not None
        assert p0.process.group.pid != before
        os.kill(p0.process.group.pid, 0)
        await running.restart("p0")  # also while it runs
        assert p0.starts == 3
        with pytest.raises(KeyError, match="no engine 'x'"):
            running.kill("x")
